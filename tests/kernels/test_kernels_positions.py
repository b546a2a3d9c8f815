"""``MaskedAttention`` with scores by the distance of two tokens, against NumPy, and against itself
in other company."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from maskdial.kernels.installed import Kernels
from tests.kernels.conftest import open_operator
from tests.kernels.test_kernels_masked import LENGTHS, drawn, feeds_of
from tests.kernels.test_kernels_masked import Heads as PlainHeads

pytestmark = pytest.mark.slow

Floats = NDArray[np.float32]
BLOCK = 64
"""Columns of a block of a table."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of an attention with positions up to a span, some of which are for many distances.

    ``sides``: which scores are added, those by the keys of positions or by their queries.
    """

    num_heads: int
    size: int
    span: int
    exact: int
    integers: bool = False
    sides: str = "keys queries"

    @property
    def columns(self) -> int:
        return self.num_heads * self.size

    @property
    def scale(self) -> float:
        return float((3 * self.size) ** -0.5)

    @property
    def reaches(self) -> NDArray[np.int32]:
        """Distances of one position each up to `exact`, and then of ever more."""
        steps = np.arange(self.span + 1)
        beyond = np.maximum(steps - self.exact, 0)
        return np.asarray(steps + beyond * (beyond + 1) // 2, np.int32)

    def rows(self) -> dict[str, Floats]:
        """Keys and queries of positions, (2 * span, num_heads, size)."""
        rng = np.random.default_rng(self.span)
        shape = (2 * self.span, self.num_heads, self.size)
        return {side: rng.standard_normal(shape, np.float32) for side in self.sides.split()}

    def inputs(self) -> dict[str, Any]:
        """The operator's inputs of positions: tables in the order in which they are read."""
        span, feeds = self.span, {"reaches": self.reaches}
        columns = np.arange(-(-(2 * span + 1) // BLOCK) * BLOCK)
        for side, rows in self.rows().items():
            order = 2 * span - columns if side == "keys" else columns
            table = rows[np.clip(order, 0, 2 * span - 1)]
            if self.integers:
                integers, steps = rounded(table)
                table = integers.astype(np.int16)
                feeds[f"{side}.factors"] = np.ascontiguousarray(steps.T)
            table = np.pad(table, ((0, 0), (0, 0), (0, -self.size % 16)))
            pair = 2 if self.integers else 1
            table = table.reshape(-1, BLOCK, self.num_heads, table.shape[2] // pair, pair)
            feeds[side] = np.ascontiguousarray(table.transpose(2, 0, 3, 1, 4))
        return feeds

    def open(
        self,
        kernels: Kernels,
        *,
        packed: bool = True,
        rows: bool = False,
        threads: int = 2,
        integers: bool | None = None,
    ) -> ort.InferenceSession:
        """A session; ``integers`` says how it computes, if not as its tables are."""
        given: dict[str, Any] = {
            **dict.fromkeys("qkv", np.float32),
            "bias": None,
            "lengths": np.int32,
            "rows": np.int64 if rows else None,
        }
        positions = self.inputs()
        for side in ("keys", "queries"):
            for name in (side, f"{side}.factors"):
                given[name] = positions[name].dtype if name in positions else None
        given["reaches"] = np.int32
        return open_operator(
            kernels.path,
            "MaskedAttention",
            given,
            threads=threads,
            num_heads=self.num_heads,
            scale=self.scale,
            window=0,
            packed=int(packed),
            integers=int(self.integers if integers is None else integers),
        )

    def expected(self, qkv: Floats) -> NDArray[np.float64]:
        """One text's attention by its definition: Hugging Face's, of indices that are gathered."""
        heads = qkv.reshape(3, qkv.shape[1], self.num_heads, self.size)
        rows = self.rows()
        if self.integers:
            heads = np.stack([np.multiply(*with_steps(each)) for each in heads])
            rows = {side: np.multiply(*with_steps(each)) for side, each in rows.items()}
        query, key, value = heads.astype(np.float64)
        scores = np.einsum("qhd,khd->hqk", query, key)
        places = np.arange(len(query))
        distance = places[:, None] - places
        away = np.searchsorted(self.reaches, np.abs(distance), side="right") - 1
        index = np.clip(self.span + np.sign(distance) * away, 0, 2 * self.span - 1)
        if "keys" in rows:
            scores += np.einsum("qhd,qkhd->hqk", query, rows["keys"][index].astype(np.float64))
        if "queries" in rows:
            scores += np.einsum("khd,qkhd->hqk", key, rows["queries"][index].astype(np.float64))
        scores *= self.scale
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        result: NDArray[np.float64] = np.einsum("hqk,khd->qhd", weights, value)
        return result.reshape(len(result), -1)


def rounded(heads: Floats) -> tuple[Floats, Floats]:
    """Heads as integers of 12 bits, and the steps between them."""
    peaks = np.abs(heads).max(axis=-1)
    return np.rint(heads * (np.float32(2047) / peaks)[..., None]), peaks / np.float32(2047)


def with_steps(heads: Floats) -> tuple[Floats, Floats]:
    integers, steps = rounded(heads)
    return integers, steps[..., None]


WIDE, NARROW = Heads(4, 64, 256, 128), Heads(3, 16, 8, 4)
HEADS = [
    WIDE,
    replace(WIDE, integers=True),
    NARROW,
    replace(NARROW, integers=True),
    replace(NARROW, sides="keys"),
    replace(NARROW, sides="queries"),
    replace(NARROW, sides="keys", integers=True),
    replace(NARROW, sides="queries", integers=True),
    Heads(2, 20, 32, 32),
    Heads(2, 20, 31, 5, integers=True),
    Heads(5, 3, 1, 1),
    Heads(1, 512, 40, 40, integers=True),
]


def texts_of(heads: Heads) -> list[Floats]:
    plain = PlainHeads(heads.num_heads, heads.size)
    half = np.float32(0.5)
    return [text * half for text in drawn(np.random.default_rng(heads.columns), plain, LENGTHS)]


def feeds_with(heads: Heads, texts: list[Floats], *, packed: bool = True) -> dict[str, Any]:
    return feeds_of(texts, packed=packed) | heads.inputs()


def split(result: Floats) -> list[Floats]:
    return np.split(result[:, 0], np.cumsum(LENGTHS)[:-1])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("packed", [True, False])
def test_attention_by_distance_is_numpys(
    kernels: Kernels, processor: str, heads: Heads, packed: bool
) -> None:
    texts = texts_of(heads)
    (result,) = heads.open(kernels, packed=packed).run(
        None, feeds_with(heads, texts, packed=packed)
    )
    for text, row in zip(texts, split(result) if packed else result, strict=True):
        exact = heads.expected(text)
        # Weights times values are rounded to 12 bits, too, in steps of each block's largest one.
        bound = 4e-3 * np.abs(text[2]).max() if heads.integers else 4e-5
        assert (np.abs(row[: len(exact)] - exact) <= 1e-4 * np.abs(exact) + bound).all()
        assert not row[len(exact) :].any()


@pytest.mark.parametrize("heads", [HEADS[0], HEADS[1], HEADS[9]])
def test_a_text_does_not_depend_on_company_padding_or_threads(
    kernels: Kernels, processor: str, heads: Heads
) -> None:
    texts = texts_of(heads)
    (padded,) = heads.open(kernels, packed=False).run(None, feeds_with(heads, texts, packed=False))
    (packed,) = heads.open(kernels, threads=16).run(None, feeds_with(heads, texts))
    alone = heads.open(kernels, threads=1)
    for text, row, part in zip(texts, padded, split(packed), strict=True):
        (result,) = alone.run(None, feeds_with(heads, [text]))
        np.testing.assert_array_equal(row[: text.shape[1]], result[:, 0])
        np.testing.assert_array_equal(part, result[:, 0])


@pytest.mark.parametrize("heads", [HEADS[0], HEADS[1], HEADS[9]])
@pytest.mark.parametrize("kind", ["first", "some", "any order", "twice", "none"])
def test_queries_of_some_tokens_have_their_results_of_all(
    kernels: Kernels, processor: str, heads: Heads, kind: str
) -> None:
    rng = np.random.default_rng(0)
    feeds = feeds_with(heads, texts_of(heads))
    (everything,) = heads.open(kernels).run(None, feeds)
    tokens = sum(LENGTHS)
    rows = {
        "first": np.cumsum([0, *LENGTHS[:-1]]),
        "some": np.flatnonzero(rng.random(tokens) < 0.3),
        "any order": rng.permutation(tokens)[: tokens // 2],
        "twice": np.sort(rng.integers(0, tokens, 400)),
        "none": np.arange(0),
    }[kind]
    session = heads.open(kernels, rows=True)
    (result,) = session.run(None, feeds | {"q": feeds["q"][rows], "rows": rows})
    np.testing.assert_array_equal(result, everything[rows])


@pytest.mark.parametrize("heads", [HEADS[0], HEADS[1], HEADS[8], HEADS[9]])
def test_all_instruction_sets_agree_to_the_last_bit(
    kernels: Kernels, instruction_sets: list[str], heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeds = feeds_with(heads, texts_of(heads))
    results = []
    for name in instruction_sets:
        monkeypatch.setenv("MASKDIAL_KERNELS_ISA", name)
        results += heads.open(kernels).run(None, feeds)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("heads", [NARROW, replace(NARROW, integers=True)])
def test_positions_that_do_not_fit_are_errors(kernels: Kernels, heads: Heads) -> None:
    feeds = feeds_with(heads, texts_of(heads))
    session = heads.open(kernels)
    session.run(None, feeds)
    reaches = heads.reaches
    wrong: list[dict[str, Any]] = [
        {"reaches": reaches[:1]},
        {"reaches": reaches[::-1]},
        {"reaches": reaches + 1},
        {"reaches": reaches.clip(max=reaches[-2])},
        {"reaches": np.arange(BLOCK, dtype=np.int32)},
        {"keys": feeds["keys"][:-1]},
        {"queries": feeds["queries"][..., :-1, :]},
    ]
    if heads.integers:
        wrong.append({"keys.factors": feeds["keys.factors"][:, 1:]})
    for changes in wrong:
        with pytest.raises(Exception, match="inputs of MaskedAttention do not fit"):
            session.run(None, feeds | changes)
    other = heads.open(kernels, integers=not heads.integers)
    with pytest.raises(Exception, match="inputs of MaskedAttention do not fit: positions"):
        other.run(None, feeds)


@pytest.mark.parametrize("heads", [HEADS[2], HEADS[3]])
def test_extreme_numbers_stay_finite(kernels: Kernels, processor: str, heads: Heads) -> None:
    text = np.zeros((3, 40, heads.columns), np.float32)
    text[0, ::2] = 1e15
    text[1, 1::2] = -1e15
    text[2, 2::3] = 1e-42
    (result,) = heads.open(kernels).run(None, feeds_with(heads, [text]))
    assert np.isfinite(result).all()
