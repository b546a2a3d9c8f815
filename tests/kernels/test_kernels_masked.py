"""``MaskedAttention``, ``Pack`` and ``Unpack`` against NumPy, and against themselves in other
company."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from maskdial.kernels.installed import Kernels
from tests.kernels.conftest import open_operator

pytestmark = pytest.mark.slow

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of an attention; a scale of 0 means the usual one, a window of 0 none.

    ``integers``: whether numbers are rounded to 12 bits.
    """

    num_heads: int
    size: int
    scale: float = 0.0
    window: int = 0
    integers: bool = False

    @property
    def columns(self) -> int:
        return self.num_heads * self.size

    def open(
        self,
        kernels: Kernels,
        *,
        packed: bool,
        bias: bool = False,
        rows: bool = False,
        threads: int = 2,
    ) -> ort.InferenceSession:
        return open_operator(
            kernels.path,
            "MaskedAttention",
            {
                **dict.fromkeys("qkv", np.float32),
                "bias": np.float32 if bias else None,
                "lengths": np.int32,
                **({"rows": np.int64} if rows else {}),
            },
            threads=threads,
            num_heads=self.num_heads,
            scale=self.scale,
            window=self.window,
            packed=int(packed),
            integers=int(self.integers),
        )

    def expected(
        self, qkv: Floats, bias: Floats | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64] | float]:
        """One text's attention in NumPy, and how far off it may be because weights are rounded.

        ``qkv``: (3, length, columns).
        """
        given = qkv if bias is None else qkv + bias.reshape(3, 1, -1)
        heads = given.reshape(3, qkv.shape[1], self.num_heads, self.size)
        integers = self.integers and not self.window and self.size <= 512
        peaks = np.abs(heads).max(axis=3)
        steps = peaks / np.float32(2047)
        if integers:
            heads = np.rint(heads * (np.float32(2047) / peaks)[..., None]) * steps[..., None]
        query, key, value = heads.astype(np.float64)
        scale = self.scale or self.size**-0.5
        scores = np.einsum("qhd,khd->hqk", query, key) * scale
        places = np.arange(qkv.shape[1])
        if self.window:
            scores[:, np.abs(places[:, None] - places) >= self.window] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        result: NDArray[np.float64] = np.einsum("hqk,khd->qhd", weights, value)
        bound = np.zeros_like(result)
        for start in range(0, len(value) if integers else 0, 256):
            # A weight times its value's step is off by at most half of a 4095th of the largest.
            some = slice(start, start + 256)
            max_weight = (weights[:, :, some] * steps[2, some].T[:, None]).max(axis=2).T
            sums = np.abs(value[some] / steps[2, some, :, None]).sum(axis=0)
            bound += 0.5 / 4095 * max_weight[:, :, None] * sums
        return result.reshape(len(result), -1), bound.reshape(len(result), -1)


HEADS = [
    Heads(12, 64),
    Heads(3, 16, 0.7),
    Heads(2, 48),
    Heads(1, 128),
    Heads(2, 80, 0.05),
    Heads(4, 20),
    Heads(5, 3),
    Heads(3, 1),
    Heads(2, 16, window=1),
    Heads(2, 32, window=5),
    Heads(1, 64, window=64),
    Heads(2, 20, window=71),
    Heads(12, 64, integers=True),
    Heads(4, 20, 0.3, integers=True),
    Heads(3, 1, integers=True),
    Heads(1, 512, integers=True),
    Heads(1, 520, integers=True),  # too large for sums of 32 bits, so by floats
    Heads(2, 32, window=5, integers=True),
]
ROUNDING = HEADS[12]
LENGTHS = [5, 1, 90, 64, 33, 2, 65, 17, 150, 300]


def drawn(rng: np.random.Generator, heads: Heads, lengths: list[int]) -> list[Floats]:
    """Texts of (3, length, columns): queries, keys and values."""
    return [
        rng.standard_normal((3, length, heads.columns), np.float32) * np.float32(2)
        for length in lengths
    ]


def feeds_of(texts: list[Floats], *, packed: bool, bias: Floats | None = None) -> dict[str, Any]:
    """The operator's inputs."""
    lengths = [text.shape[1] for text in texts]
    if packed:
        parts = np.concatenate(texts, axis=1)[:, :, None]
    else:
        parts = np.full((3, len(texts), max(lengths), texts[0].shape[2]), np.nan, np.float32)
        for row, text in enumerate(texts):
            parts[:, row, : text.shape[1]] = text
    feeds: dict[str, Any] = dict(zip("qkv", parts, strict=True))
    feeds["lengths"] = np.array(lengths, np.int32)
    return feeds if bias is None else feeds | {"bias": bias}


@cache
def drawn_and_expected(heads: Heads) -> list[tuple[list[Floats], Floats | None, list[Any]]]:
    """Texts, without a bias and with one, and what NumPy makes of each."""
    rng = np.random.default_rng(heads.columns)
    texts = drawn(rng, heads, LENGTHS)
    biases = (None, rng.standard_normal(3 * heads.columns, np.float32))
    return [(texts, bias, [heads.expected(text, bias) for text in texts]) for bias in biases]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_attention_is_numpys(kernels: Kernels, processor: str, heads: Heads, packed: bool) -> None:
    for texts, bias, expected in drawn_and_expected(heads):
        session = heads.open(kernels, packed=packed, bias=bias is not None)
        (result,) = session.run(None, feeds_of(texts, packed=packed, bias=bias))
        rows = np.split(result[:, 0], np.cumsum(LENGTHS)[:-1]) if packed else result
        for row, (exact, bound) in zip(rows, expected, strict=True):
            length = len(exact)
            error = np.abs(row[:length] - exact)
            assert (error <= 1e-4 * np.abs(exact) + 4e-5 + bound).all()
            assert not row[length:].any()


@pytest.mark.parametrize("heads", [HEADS[0], HEADS[5], HEADS[11], ROUNDING])
def test_a_text_does_not_depend_on_company_padding_or_threads(
    kernels: Kernels, processor: str, heads: Heads
) -> None:
    rng = np.random.default_rng(0)
    texts = drawn(rng, heads, LENGTHS)
    bias = rng.standard_normal(3 * heads.columns, np.float32)
    padded, packed, alone = (
        heads.open(kernels, packed=each, bias=True, threads=threads)
        for each, threads in ((False, 2), (True, 2), (True, 1))
    )
    (rows,) = padded.run(None, feeds_of(texts, packed=False, bias=bias))
    (packed_result,) = packed.run(None, feeds_of(texts, packed=True, bias=bias))
    for text, row, part in zip(
        texts, rows, np.split(packed_result[:, 0], np.cumsum(LENGTHS)[:-1]), strict=True
    ):
        (result,) = alone.run(None, feeds_of([text], packed=True, bias=bias))
        np.testing.assert_array_equal(row[: text.shape[1]], result[:, 0])
        np.testing.assert_array_equal(part, result[:, 0])


@pytest.mark.parametrize("heads", [HEADS[0], HEADS[5], HEADS[9], HEADS[11], ROUNDING])
@pytest.mark.parametrize("kind", ["some", "one", "all", "any order", "more than tokens", "none"])
def test_queries_of_some_tokens_have_their_results_of_all(
    kernels: Kernels, processor: str, heads: Heads, kind: str
) -> None:
    rng = np.random.default_rng(0)
    texts = drawn(rng, heads, LENGTHS)
    feeds = feeds_of(texts, packed=True, bias=rng.standard_normal(3 * heads.columns, np.float32))
    (everything,) = heads.open(kernels, packed=True, bias=True).run(None, feeds)
    tokens = sum(LENGTHS)
    rows = {
        "some": np.flatnonzero(rng.random(tokens) < 0.3),
        "one": np.array([77]),
        "all": np.arange(tokens),
        "any order": rng.permutation(tokens)[: tokens // 2],
        "more than tokens": np.sort(rng.integers(0, 6, 400)),  # of texts of 5 tokens and of 1
        "none": np.arange(0),
    }[kind]
    session = heads.open(kernels, packed=True, bias=True, rows=True)
    (result,) = session.run(None, feeds | {"q": feeds["q"][rows], "rows": rows})
    np.testing.assert_array_equal(result, everything[rows])


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": np.array([0, 5, 1])},
        {"rows": np.array([0, -1, 1])},
        {"rows": np.array([0, 1])},
        {"rows": np.array([[0, 1, 2]])},
        {"rows": np.array([0, 1, 2]), "lengths": np.array([4, 2], np.int32)},
        {"rows": np.array([0, 1, 2]), "lengths": np.array([5, 0], np.int32)},
        {"rows": np.array([0, 1, 2]), "q": np.zeros((3, 1, 48), np.float32)},
    ],
)
def test_rows_that_do_not_fit_are_errors(kernels: Kernels, changes: dict[str, Any]) -> None:
    feeds: dict[str, Any] = {name: np.zeros((5, 1, 64), np.float32) for name in "kv"}
    feeds |= {"q": np.zeros((3, 1, 64), np.float32), "lengths": np.array([4, 1], np.int32)}
    session = SMALL.open(kernels, packed=True, rows=True)
    session.run(None, feeds | {"rows": np.array([0, 4, 1])})
    with pytest.raises(Exception, match="inputs of MaskedAttention do not fit"):
        session.run(None, feeds | changes)
    padded: dict[str, Any] = {name: np.zeros((3, 1, 64), np.float32) for name in "qkv"}
    padded |= {"lengths": np.ones(3, np.int32), "rows": np.arange(3)}
    with pytest.raises(Exception, match="inputs of MaskedAttention do not fit: rows"):
        SMALL.open(kernels, packed=False, rows=True).run(None, padded)


@pytest.mark.parametrize("heads", [HEADS[0], HEADS[5], HEADS[11], ROUNDING])
def test_all_instruction_sets_agree_to_the_last_bit(
    kernels: Kernels, instruction_sets: list[str], heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = drawn(np.random.default_rng(0), heads, LENGTHS)
    results = []
    for name in instruction_sets:
        monkeypatch.setenv("MASKDIAL_KERNELS_ISA", name)
        results += heads.open(kernels, packed=True).run(None, feeds_of(texts, packed=True))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("heads", [HEADS[0], ROUNDING])
def test_extreme_scores_stay_finite(kernels: Kernels, processor: str, heads: Heads) -> None:
    text = np.zeros((3, 40, heads.columns), np.float32)
    text[0, ::2] = 1e15
    text[1, 1::2] = -1e15
    text[2, 2::3] = 1e-42
    (result,) = heads.open(kernels, packed=True).run(None, feeds_of([text], packed=True))
    assert np.isfinite(result).all()


SMALL = Heads(4, 16)
GOOD = {name: np.zeros((2, 3, 64), np.float32) for name in "qkv"} | {
    "bias": np.zeros(192, np.float32),
    "lengths": np.array([3, 1], np.int32),
}


@pytest.mark.parametrize(
    "changes",
    [
        {"q": np.zeros((2, 3, 63), np.float32)},
        {"k": np.zeros((2, 2, 64), np.float32)},
        {"v": np.zeros((1, 3, 64), np.float32)},
        {"q": np.zeros((6, 64), np.float32)},
        {name: np.zeros((6, 64), np.float32) for name in "qkv"},
        {name: np.zeros((2, 3, 66), np.float32) for name in "qkv"},
        {name: np.zeros((2, 3, 0), np.float32) for name in "qkv"},
        {"bias": np.zeros(191, np.float32)},
        {"bias": np.zeros(0, np.float32)},
        {"lengths": np.array([3], np.int32)},
        {"lengths": np.array([3, 1, 1], np.int32)},
        {"lengths": np.array([3, 4], np.int32)},
        {"lengths": np.array([0, 3], np.int32)},
        {"lengths": np.array([3, -1], np.int32)},
        {"lengths": np.array([[3, 1]], np.int32)},
    ],
)
def test_padded_inputs_that_do_not_fit_are_errors(
    kernels: Kernels, changes: dict[str, Any]
) -> None:
    session = SMALL.open(kernels, packed=False, bias=True)
    session.run(None, GOOD)
    with pytest.raises(Exception, match="inputs of MaskedAttention do not fit"):
        session.run(None, GOOD | changes)


@pytest.mark.parametrize("lengths", [[3, 1], [3, 3], [6], [2, 2, 2], [5, 0], [-1, 6], []])
def test_packed_lengths_that_do_not_add_up_are_errors(kernels: Kernels, lengths: list[int]) -> None:
    session = SMALL.open(kernels, packed=True)
    feeds = {name: np.zeros((5, 1, 64), np.float32) for name in "qkv"}
    session.run(None, feeds | {"lengths": np.array([4, 1], np.int32)})
    with pytest.raises(Exception, match="inputs of MaskedAttention do not fit"):
        session.run(None, feeds | {"lengths": np.array(lengths, np.int32)})
    padded = {name: np.zeros((5, 2, 64), np.float32) for name in "qkv"}
    with pytest.raises(Exception, match="inputs of MaskedAttention do not fit"):
        session.run(None, padded | {"lengths": np.array([5], np.int32)})


def test_a_window_must_not_be_negative(kernels: Kernels) -> None:
    with pytest.raises(Exception, match="window of MaskedAttention must not be negative"):
        Heads(2, 16, window=-1).open(kernels, packed=True)


@pytest.mark.parametrize("num_heads", [0, -1])
def test_a_number_of_heads_must_be_positive(kernels: Kernels, num_heads: int) -> None:
    with pytest.raises(Exception, match="num_heads of MaskedAttention must be positive"):
        Heads(num_heads, 16, 1.0).open(kernels, packed=True)


def packing(kernels: Kernels) -> tuple[ort.InferenceSession, ...]:
    """Sessions of Pack, Unpack and TokenPositions."""
    pack = {"x": np.float32, "lengths": np.int32}
    return (
        open_operator(kernels.path, "Pack", pack),
        open_operator(kernels.path, "Unpack", pack | {"input_ids": np.int64}),
        open_operator(
            kernels.path, "TokenPositions", {"lengths": np.int32}, onnx.TensorProto.INT64
        ),
    )


@pytest.mark.parametrize("shape", [(5,), (3, 4), ()])
def test_packed_texts_have_no_padding_and_unpacked_ones_have_zeros(
    kernels: Kernels, shape: tuple[int, ...]
) -> None:
    pack, unpack, positions = packing(kernels)
    lengths = np.array([2, 7, 1, 4], np.int32)
    x = np.random.default_rng(0).standard_normal((4, 7, *shape), np.float32)
    (packed,) = pack.run(None, {"x": x, "lengths": lengths})
    parts = [row[:length] for row, length in zip(x, lengths, strict=True)]
    np.testing.assert_array_equal(packed[:, 0], np.concatenate(parts))
    feeds = {"x": packed, "lengths": lengths, "input_ids": np.zeros((4, 7), np.int64)}
    (unpacked,) = unpack.run(None, feeds)
    for row, part in zip(unpacked, parts, strict=True):
        np.testing.assert_array_equal(row[: len(part)], part)
        assert not row[len(part) :].any()
    (places,) = positions.run(None, {"lengths": lengths})
    np.testing.assert_array_equal(places[:, 0], np.concatenate([np.arange(n) for n in lengths]))


def test_texts_that_do_not_fit_their_lengths_are_errors(kernels: Kernels) -> None:
    pack, unpack, positions = packing(kernels)
    x, ids = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3), np.int64)
    for wrong in ([1], [1, 4], [-1, 2], [[1, 2]], [1, 1, 1]):
        lengths = np.array(wrong, np.int32)
        with pytest.raises(Exception, match=r"inputs of \w+ do not fit"):
            pack.run(None, {"x": x, "lengths": lengths})
        with pytest.raises(Exception, match=r"inputs of \w+ do not fit"):
            unpack.run(None, {"x": x.reshape(6, 1, 4), "lengths": lengths, "input_ids": ids})
    lengths = np.array([3, 2], np.int32)
    with pytest.raises(Exception, match=r"inputs of \w+ do not fit"):
        pack.run(None, {"x": np.zeros(2, np.float32), "lengths": lengths})
    for packed, like in (
        (np.zeros((5, 2, 4), np.float32), ids),
        (np.zeros((4, 1, 4), np.float32), ids),
        (np.zeros(5, np.float32), ids),
        (np.zeros((5, 1, 4), np.float32), ids[:, :2]),
        (np.zeros((5, 1, 4), np.float32), ids[:1]),
        (np.zeros((5, 1, 4), np.float32), ids[0]),
    ):
        with pytest.raises(Exception, match=r"inputs of \w+ do not fit"):
            unpack.run(None, {"x": packed, "lengths": lengths, "input_ids": like})
    with pytest.raises(Exception, match=r"inputs of \w+ do not fit"):
        positions.run(None, {"lengths": np.array([2, -1], np.int32)})


def test_packed_rows_are_where_the_padded_ones_were(kernels: Kernels) -> None:
    inputs = {"rows": np.int64, "lengths": np.int32, "input_ids": np.int64}
    packed = open_operator(kernels.path, "PackedRows", inputs, onnx.TensorProto.INT64)
    lengths, ids = np.array([2, 7, 1, 4], np.int32), np.zeros((4, 7), np.int64)
    rows = [(3, 0), (1, 6), (0, 1), (1, 0), (2, 0), (1, 6)]
    feeds = {"rows": np.array([7 * row + place for row, place in rows]), "lengths": lengths}
    (places,) = packed.run(None, feeds | {"input_ids": ids})
    starts = np.cumsum(lengths) - lengths
    np.testing.assert_array_equal(places, [starts[row] + place for row, place in rows])
    (first,) = open_operator(
        kernels.path, "FirstRows", {"lengths": np.int32}, onnx.TensorProto.INT64
    ).run(None, {"lengths": lengths})
    np.testing.assert_array_equal(first, starts)
    for wrong in ([2], [-1], [28], [[0]]):  # the first is padding
        with pytest.raises(Exception, match="do not fit"):
            packed.run(None, feeds | {"input_ids": ids, "rows": np.array(wrong)})
    with pytest.raises(Exception, match="do not fit"):
        packed.run(None, feeds | {"input_ids": ids[:3]})


@pytest.mark.parametrize("lengths", [[2, 0], [-1, 2]])
def test_texts_without_a_first_token_are_errors(kernels: Kernels, lengths: list[int]) -> None:
    session = open_operator(
        kernels.path, "FirstRows", {"lengths": np.int32}, onnx.TensorProto.INT64
    )
    with pytest.raises(Exception, match="do not fit"):
        session.run(None, {"lengths": np.array(lengths, np.int32)})
