"""The sampler against a plain float64 implementation of the same definitions."""

import math
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from maskdial.causal.params import SamplingParams
from maskdial.causal.sampler import distribution, sample, uniform
from maskdial.causal.sequence import Sequence

VOCAB = 1000


def softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    weights: NDArray[np.float64] = np.exp(scores - scores.max())
    weights /= weights.sum()
    return weights


def reference(
    logits: NDArray[np.float32], token_ids: list[int], params: SamplingParams
) -> NDArray[np.float64]:
    """Sorts everything and works in float64: transformers' processors, read off one by one."""
    scores = logits.astype(np.float64)
    for token in set(token_ids):
        factor = params.repetition_penalty
        scores[token] *= factor if scores[token] < 0 else 1 / factor
    scores /= params.temperature
    if params.top_k:
        kth = np.sort(scores)[::-1][min(params.top_k, len(scores)) - 1]
        scores[scores < kth] = -np.inf
    if params.top_p < 1:
        order = np.argsort(-scores, kind="stable")
        before = np.cumsum(softmax(scores)[order]) - softmax(scores)[order]
        dropped = before >= params.top_p
        dropped[0] = False
        scores[order[dropped]] = -np.inf
    return softmax(scores)


def random_logits(seed: int, n: int = 1, vocab: int = VOCAB) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((n, vocab)) * 3).astype(np.float32)


def penalized(
    logits: NDArray[np.float32], token_ids: list[int], penalty: float
) -> NDArray[np.float32]:
    scores = logits.copy()
    for token in set(token_ids):
        scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
    return scores


PARAMS = [
    SamplingParams(do_sample=True),
    SamplingParams(do_sample=True, temperature=0.3),
    SamplingParams(do_sample=True, temperature=2.5),
    SamplingParams(do_sample=True, top_k=1),
    SamplingParams(do_sample=True, top_k=40),
    SamplingParams(do_sample=True, top_k=5000),
    SamplingParams(do_sample=True, top_p=0.01),
    SamplingParams(do_sample=True, top_p=0.9),
    SamplingParams(do_sample=True, temperature=3.0, top_p=0.999),
    SamplingParams(do_sample=True, temperature=0.7, top_k=50, top_p=0.95),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_distribution(params: SamplingParams, seed: int) -> None:
    logits = random_logits(seed)[0]
    computed = distribution(logits, params)
    wanted = reference(logits, [], params)
    assert np.abs(computed - wanted).max() <= 1e-6
    assert np.array_equal(computed > 0, wanted > 0)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab=st.sampled_from([2, 17, 300, 3000]),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 400),
    top_p=st.floats(0.01, 1),
)
def test_distribution_mixed(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float
) -> None:
    params = SamplingParams(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    logits = random_logits(seed, vocab=vocab)[0]
    computed, wanted = distribution(logits, params), reference(logits, [], params)
    assert np.isclose(computed.sum(), 1)
    # A token right at the edge of the nucleus may fall either way when sums round.
    assert np.abs(computed - wanted).max() <= 1e-5 or np.sum((computed > 0) != (wanted > 0)) == 1


def test_tokens_as_likely_as_the_kth_stay() -> None:
    logits = np.array([1, 3, 2, 2, 2, 0], np.float32)
    kept = distribution(logits, SamplingParams(do_sample=True, top_k=2)) > 0
    assert kept.tolist() == [False, True, True, True, True, False]


def test_equally_likely_tokens_enter_the_nucleus_in_order() -> None:
    params = SamplingParams(do_sample=True, top_p=0.5)
    assert np.flatnonzero(distribution(np.zeros(4000, np.float32), params)).tolist() == list(
        range(2000)
    )


class SilentDetokenizer:
    """Every token is the empty text."""

    special_ids: frozenset[int] = frozenset()

    def decoder(self, prompt_ids: SequenceOf[int]) -> "SilentDetokenizer":
        return self

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def draw(logits: NDArray[np.float32], params: SamplingParams, prompt: list[int]) -> int:
    (chosen,) = sample(logits[None], [Sequence(prompt, params)])
    return chosen.token_id


def test_repetition_penalty_applies_to_prompt_and_output() -> None:
    logits = np.array([2.0, 1.9, 1.8, -1.0], np.float32)
    params = SamplingParams(repetition_penalty=1.2)
    sequence = Sequence([0, 0, 3], params)
    assert sample(logits[None], [sequence])[0].token_id == 1
    sequence.accept(
        1, 0.0, detokenizer=SilentDetokenizer(), eos_token_ids=frozenset(), max_length=100
    )
    assert sample(logits[None], [sequence])[0].token_id == 2
    assert logits.tolist() == np.array([2.0, 1.9, 1.8, -1.0], np.float32).tolist()


def test_repetition_penalty_distribution() -> None:
    logits = random_logits(4)[0]
    params = SamplingParams(do_sample=True, repetition_penalty=1.7, top_p=0.8)
    prompt = [1, 5, 5, 9, *np.argsort(-logits)[:3].tolist()]
    computed = distribution(penalized(logits, prompt, 1.7), params)
    assert np.abs(computed - reference(logits, prompt, params)).max() <= 1e-6


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5, top_k=3),
        SamplingParams(do_sample=True, temperature=0.0),
        SamplingParams(do_sample=True, temperature=1e-30),
    ],
    ids=str,
)
def test_greedy_takes_the_most_likely(params: SamplingParams) -> None:
    logits = random_logits(1, n=6)
    sequences = [Sequence([1], params) for _ in range(6)]
    assert [s.token_id for s in sample(logits, sequences)] == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(do_sample=True),
        SamplingParams(do_sample=True, temperature=0.5, top_p=0.9),
        SamplingParams(do_sample=True, temperature=2.0, top_k=5),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square over 4,000 seeds; with at most 8 degrees of freedom, 26.1 is the 0.1% point."""
    logits = random_logits(2, vocab=9)[0] / 3
    wanted = distribution(logits, params)
    counts = Counter(draw(logits, replace(params, seed=seed), [0]) for seed in range(4000))
    assert set(counts) <= set(np.flatnonzero(wanted).tolist())
    chi_square = sum(
        (counts[token] - 4000 * p) ** 2 / (4000 * p) for token, p in enumerate(wanted) if p > 0
    )
    assert chi_square < 26.1


def test_a_large_vocabulary_is_drawn_from_in_proportion() -> None:
    """The walk over blocks must land where one running sum over everything lands."""
    logits = random_logits(3, vocab=5003)[0]
    probabilities = softmax(logits.astype(np.float64))
    edges = np.cumsum(probabilities)
    for seed in range(300):
        u = uniform(seed, 0)
        params = SamplingParams(do_sample=True, seed=seed)
        token = draw(logits, params, [0])
        low = edges[token - 1] if token else 0.0
        assert low - 1e-5 <= u <= edges[token] + 1e-5


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_row_is_the_same_alone_and_in_a_batch(params: SamplingParams) -> None:
    logits = random_logits(5, n=7, vocab=1237)
    sequences = [
        Sequence([3, 4, row], replace(params, repetition_penalty=1.3, seed=row)) for row in range(7)
    ]
    together = sample(logits, sequences)
    alone = [
        sample(logits[row : row + 1].copy(), [sequence])[0]
        for row, sequence in enumerate(sequences)
    ]
    assert together == alone


def test_random_numbers_depend_on_seed_and_index_only() -> None:
    numbers = [uniform(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(50)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    assert uniform(1, 7) == numbers[50 + 7]
    generator = np.random.Generator(np.random.Philox(key=1, counter=7))
    assert uniform(1, 7) == generator.random()


def test_logprob_is_the_models_own() -> None:
    logits = random_logits(6)[0]
    params = SamplingParams(do_sample=True, temperature=0.4, top_k=5, repetition_penalty=2.0)
    (chosen,) = sample(logits[None], [Sequence([1, 2], params)])
    wanted = math.log(softmax(logits.astype(np.float64))[chosen.token_id])
    assert chosen.logprob == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_spoil_their_own_row_only(bad: float) -> None:
    logits = random_logits(7, n=2)
    logits[0, 3] = bad
    sequences = [Sequence([1], SamplingParams(do_sample=True, seed=1)) for _ in range(2)]
    first, second = sample(logits, sequences)
    assert math.isnan(first.logprob)
    assert math.isfinite(second.logprob)


def test_drawn_seeds_differ_and_survive_json_numbers() -> None:
    seeds = {Sequence([1], SamplingParams()).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(int(float(seed)) == seed for seed in seeds)
    assert Sequence([1], SamplingParams(seed=5)).seed == 5
