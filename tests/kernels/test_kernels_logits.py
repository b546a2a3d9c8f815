"""`VocabularyKernels` against NumPy, and the sampler with them against the sampler without."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from maskdial.causal.sampling.candidates import greatest_k, narrow
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sampling.sampler import Sample, Sampler
from maskdial.causal.sequence import Sequence
from maskdial.kernels.installed import Kernels
from maskdial.kernels.logits import SUMMARY, VocabularyKernels
from tests.kernels.conftest import open_operator

pytestmark = pytest.mark.slow

Floats = NDArray[np.float32]

SIZES = [1, 2, 15, 16, 17, 127, 128, 129, 511, 513, 1000, 4099, 49152]
TINY = np.float32(1e-45)  # denormal


def rows_of(size: int) -> Floats:
    """Ordinary rows, and those that could go wrong."""
    rng = np.random.default_rng(size)
    rows = np.stack([rng.standard_normal(size, np.float32) * np.float32(s) for s in (0.1, 3, 40)])
    ties = rng.integers(-3, 3, size).astype(np.float32)
    equal = np.full(size, 2.5, np.float32)
    signs = np.where(rng.random(size) < 0.5, np.float32(0.0), np.float32(-0.0))
    tiny = np.where(rng.random(size) < 0.5, TINY, -TINY)
    huge = rng.standard_normal(size, np.float32) * np.float32(2e37)
    few = np.where(rng.random(size) < 0.05, rows[1], np.float32(-np.inf))
    few[-1] = 1.0
    peaked = rows[1].copy()
    peaked[size // 2] = 500.0
    return np.stack([*rows, ties, equal, signs, tiny, huge, few, peaked]).astype(np.float32)


def sum_exp_of(rows: Floats, temperature: float = 1.0) -> NDArray[np.float64]:
    rows = rows.astype(np.float64)
    with np.errstate(under="ignore"):
        weights: NDArray[np.float64] = np.exp(
            (rows - rows.max(axis=1, keepdims=True)) / temperature
        )
    total: NDArray[np.float64] = weights.sum(axis=1)
    return total


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_summarized_as_by_numpy(kernels: Kernels, processor: str, size: int) -> None:
    rows = rows_of(size)
    best, max_logits, sum_exp = zip(
        *VocabularyKernels(kernels.path, size).summarize(rows), strict=True
    )
    assert list(best) == rows.argmax(axis=1).tolist()
    assert list(max_logits) == rows.max(axis=1).tolist()
    np.testing.assert_allclose(sum_exp, sum_exp_of(rows), rtol=5e-7)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_a_graph_summarizes_to_the_same_bits(
    kernels: Kernels, processor: str, size: int, threads: int
) -> None:
    rows = np.concatenate([rows_of(size), *map(spoilt, (np.nan, np.inf, -np.inf), [size] * 3)])
    session = summary_session(kernels.path, threads)
    results = session.run(None, {"logits": rows})
    assert [each.dtype for each in results] == [np.int64, np.float32, np.float64]
    wanted = VocabularyKernels(kernels.path, size).summarize(rows)
    np.testing.assert_array_equal(
        [each.tolist() for each in results], np.array(wanted, np.float64).T
    )
    alone = [session.run(None, {"logits": row[None]}) for row in rows]
    np.testing.assert_array_equal(np.concatenate(alone, axis=1), results)


def spoilt(value: float, size: int) -> Floats:
    """A row with a number that is none, in its last place."""
    row = np.zeros((1, size), np.float32)
    row[0, -1] = value
    return row


def summary_session(library: Path, threads: int) -> ort.InferenceSession:
    return open_operator(library, "LogitsSummary", {"logits": np.float32}, SUMMARY, threads)


@pytest.mark.parametrize("shape", [(0, 7), (0, 5000)])
def test_no_rows_have_no_summary(kernels: Kernels, shape: tuple[int, ...]) -> None:
    results = summary_session(kernels.path, 2).run(None, {"logits": np.zeros(shape, np.float32)})
    assert [len(each) for each in results] == [0, 0, 0]


@pytest.mark.parametrize("shape", [(2, 0), ()])
def test_rows_without_logits_are_refused(kernels: Kernels, shape: tuple[int, ...]) -> None:
    session = summary_session(kernels.path, 1)
    with pytest.raises(Exception, match="rows of floats"):
        session.run(None, {"logits": np.zeros(shape, np.float32)})


NARROWED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.01},
    {"temperature": 30.0},
    {"top_k": 1},
    {"top_k": 50, "temperature": 0.7},
    {"top_k": 700, "top_p": 0.9},
    {"top_k": 10**9, "top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.5, "temperature": 1.7},
    {"top_p": 0.95, "temperature": 100.0},
    {"top_p": 1e-9},
    {"top_p": 0.99999},
    {"top_p": 1 - 1e-16},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-50},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.1, "temperature": 0.8},
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("narrowed", NARROWED, ids=str)
def test_draws_are_those_of_numpy(
    kernels: Kernels, processor: str, size: int, narrowed: dict[str, Any]
) -> None:
    """The token, or one beside it if the share drawn is where one's ends, but for rounding.

    NumPy leaves out tokens that weigh less, together, than that.
    """
    one = VocabularyKernels(kernels.path, size)
    rng = np.random.default_rng(size)
    for row in rows_of(size):
        with np.errstate(over="ignore"):  # quotients that are infinite weigh nothing
            expected = narrow(row, row.max(), SamplingParams(do_sample=True, **narrowed))
        token_ids = np.arange(size) if expected.token_ids is None else expected.token_ids
        ends = np.cumsum(expected.weights, dtype=np.float64) / expected.weights.sum(dtype=float)
        for u in (1e-6, *rng.random(20), 1 - 1e-6):
            found = one.draw(row, float(row.max()), u, **narrowed)
            if found == expected.pick(u):
                continue
            # One token more or less in the nucleus moves the others by its share.
            moved = 1e-6 + (2 / len(token_ids) if narrowed.get("top_p", 1) < 1 else 0)
            (place,) = np.flatnonzero(token_ids == found)
            assert ends[place] - expected.weights[place] / expected.total - moved <= u
            assert u <= ends[place] + moved


@pytest.mark.parametrize("size", [3, 512, 513, 1024, 5000])
def test_what_has_no_weight_is_not_drawn(kernels: Kernels, processor: str, size: int) -> None:
    one = VocabularyKernels(kernels.path, size)
    rng = np.random.default_rng(size)
    for narrowed in NARROWED:
        row = np.full(size, -np.inf, np.float32)
        some = rng.choice(size, min(size - 1, 40), replace=False)
        row[some] = rng.standard_normal(len(some))
        for u in (0.0, 1e-300, *rng.random(10), 1 - 2**-53):
            assert one.draw(row, float(row.max()), u, **narrowed) in some


def test_draws_follow_the_weights(kernels: Kernels, processor: str) -> None:
    """Of tokens with known shares, over equally spaced numbers."""
    one = VocabularyKernels(kernels.path, 2000)
    row = np.full(2000, -np.inf, np.float32)
    shares = {3: 0.5, 511: 0.125, 512: 0.25, 1999: 0.125}
    for token_id, share in shares.items():
        row[token_id] = math.log(share)
    numbers = [(i + 0.5) / 1000 for i in range(1000)]
    drawn = Counter(one.draw(row, math.log(0.5), u) for u in numbers)
    assert drawn == {token_id: 1000 * share for token_id, share in shares.items()}
    # Of the two lightest, whose weights are equal, the first one is needed.
    drawn = Counter(one.draw(row, math.log(0.5), u, top_p=0.8) for u in numbers)
    assert list(drawn) == [3, 511, 512]
    assert [drawn[t] / 1000 for t in (3, 511, 512)] == pytest.approx(
        [4 / 7, 1 / 7, 2 / 7], abs=2e-3
    )


@pytest.mark.parametrize("size", SIZES)
def test_the_greatest(kernels: Kernels, processor: str, size: int) -> None:
    one = VocabularyKernels(kernels.path, size)
    for row in rows_of(size):
        for k in {1, 2, 7, 50, size // 128, size // 2, size - 1, size} & set(range(1, size + 1)):
            assert one.greatest_k(row, k).tolist() == greatest_k(row, k).tolist()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_what_is_not_a_number_is_seen_anywhere(
    kernels: Kernels, processor: str, size: int, bad: float
) -> None:
    one = VocabularyKernels(kernels.path, size)
    for place in {0, size // 3, size - 1}:
        rows = rows_of(size)
        rows[1::2, place] = bad
        for row, (best, peak, total) in zip(rows, one.summarize(rows), strict=True):
            assert peak == row.max() or (math.isnan(peak) and math.isnan(row.max()))
            assert best == row.argmax() or math.isnan(peak)
            assert math.isfinite(peak) == (total > 0)
            assert 0 <= one.draw(row, 1.0, 0.5, top_p=0.9) < size
            assert len(one.greatest_k(row, min(size, 5))) >= min(size - 1, 5)
    nothing = np.full((1, size), -np.inf, np.float32)
    assert one.summarize(nothing) == [(0, -np.inf, 0.0)]


def test_instruction_sets_and_company_change_no_bit(
    kernels: Kernels, instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(5001)
    results: list[Any] = []
    for name in instruction_sets:
        monkeypatch.setenv("MASKDIAL_KERNELS_ISA", name)
        one = VocabularyKernels(kernels.path, 5001)
        results.append(one.summarize(rows))
        results.append([each for row in rows for each in one.summarize(row[None])])
        drawn = [
            one.draw(row, float(row.max()), u, **narrowed)
            for row in rows
            for u in np.linspace(0, 1, 50, endpoint=False).tolist()
            for narrowed in NARROWED
        ]
        results.append(drawn)
    assert all(each == results[i % 3] for i, each in enumerate(results))


def test_other_rows_are_refused(kernels: Kernels) -> None:
    one = VocabularyKernels(kernels.path, 100)
    for wrong in (np.zeros(99, np.float32), np.zeros(100), np.zeros(200, np.float32)[::2]):
        with pytest.raises(ValueError, match=r"float32|expected 100"):
            one.draw(wrong, 0.0, 0.5)  # type: ignore[arg-type]
    assert len(one.summarize(np.zeros((4, 200), np.float32)[::2, :100])) == 2


PARAMS = [
    {},
    {"top_n_tokens": 5},
    {"do_sample": True},
    {"do_sample": True, "top_k": 50},
    {"do_sample": True, "top_k": 50, "top_p": 0.9, "temperature": 0.7, "top_n_tokens": 20},
    {"do_sample": True, "top_p": 0.9},
    {"do_sample": True, "top_p": 0.2, "temperature": 1.7},
    {"do_sample": True, "top_p": 0.999999, "temperature": 0.2},
    {"do_sample": True, "top_p": 1e-6},
    {"do_sample": True, "top_p": 0.5, "temperature": 1e30},
    {"do_sample": True, "top_p": 0.8, "min_p": 0.05, "typical_p": 0.9},
    {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.3, "logit_bias": ((7, 3.0),)},
    {"do_sample": True, "top_k": 100_000, "top_p": 0.9},
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("size", [8, 17, 300, 12_001])
def test_the_sampler_draws_the_same_tokens_with_them(
    kernels: Kernels, processor: str, params: dict[str, object], size: int
) -> None:
    eos = frozenset({0})
    plain = Sampler(size, eos)
    fast = Sampler(size, eos, kernels=VocabularyKernels(kernels.path, size))
    rows = np.concatenate([rows_of(size), rows_of(size)[:, ::-1]])
    rows[4, size // 2] = np.nan
    for seed in range(5):
        given = SamplingParams(**params)  # type: ignore[arg-type]
        sequences = [Sequence([min(3, size - 1)], given, seed=seed) for _ in rows]
        for one, other in zip(
            plain.sample(rows, sequences), fast.sample(rows, sequences), strict=True
        ):
            assert isinstance(one, Sample)
            assert isinstance(other, Sample)
            if math.isnan(one.logprob):
                assert math.isnan(other.logprob)
                continue
            assert one.token_id == other.token_id
            assert other.logprob == pytest.approx(one.logprob, rel=1e-6, abs=1e-6)
            assert [each[0] for each in one.top] == [each[0] for each in other.top]
            logprobs = [each[1] for each in one.top]
            assert [each[1] for each in other.top] == pytest.approx(logprobs, rel=1e-6, abs=1e-6)
