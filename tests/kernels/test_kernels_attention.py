"""``CausalAttention`` against NumPy, and against itself in other company and other pieces.

With a KV cache of float32, and with one of int8 or int16 (``Int8CausalAttention`` and so on).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper

from maskdial.bundle.manifest import CACHE_HEADERS
from maskdial.kernels.installed import Kernels

pytestmark = pytest.mark.slow

Floats = NDArray[np.float32]
CACHE = ("past_key", "past_value")
BLOCK = 128  # tokens whose values are added up as integers
NAMES = ("qkv", "", "", *CACHE, "lengths", "longest", "cos", "sin", "sinks", "new", "ahead", "rows")


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of an attention; ``num_rotated`` columns of each are rotated.

    ``cache``: element type of the cache. ``window``: tokens that one sees, 0 for all. ``sinks``:
    whether each head has one.
    """

    heads: int
    kv_heads: int
    size: int
    num_rotated: int = 0
    cache: Literal["float32", "int16", "int8"] = "float32"
    window: int = 0
    sinks: bool = False

    @property
    def operator(self) -> str:
        return f"{'' if self.cache == 'float32' else self.cache.title()}CausalAttention"

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.cache)

    @property
    def width(self) -> int:
        """Elements of a head's key or value in the cache."""
        return self.size + (0 if self.cache == "float32" else CACHE_HEADERS[self.cache])

    @property
    def max_compared(self) -> int:
        """The largest integer of queries and keys: a sum of ``size`` products fits 32 bits."""
        return 127 if self.cache == "int8" else int(np.sqrt((2**31 - 1) // self.size))

    @property
    def max_value(self) -> int:
        """The largest integer of values."""
        return 127 if self.cache == "int8" else 4095

    @property
    def max_weight(self) -> int:
        """The largest integer of the weights of values, in blocks of `BLOCK`."""
        return 32767 if self.cache == "int8" else 4095

    @property
    def sink_scores(self) -> Floats:
        """One below the usual scores, one among them, and so on."""
        return np.linspace(-1, 3, self.heads, dtype=np.float32)

    @property
    def columns(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.size


def open_attention(
    library: Path,
    shape: Shape,
    threads: int = 1,
    *,
    fused: bool = True,
    packed: bool = False,
    looks_ahead: bool = False,
    selects: bool = False,
    **changes: Any,
) -> Any:
    """A session of one operator.

    Args:
        library: the kernels.
        shape: of the heads.
        threads: of the session.
        fused: whether queries, keys and values are one input, ``qkv``, or three.
        packed: whether the rows' tokens follow one another without padding; ``new`` counts them.
        looks_ahead: whether ``ahead`` counts the later tokens that each one sees.
        selects: whether only the tokens ``rows`` attend.
        changes: attributes.
    """
    used = {"cos", "sin"} if shape.num_rotated else set()
    used |= {"sinks"} if shape.sinks else set()
    used |= {"new"} if packed else set()
    used |= {"ahead"} if looks_ahead else set()
    used |= {"rows"} if selects else set()
    names = [*(NAMES[:3] if fused else ("q", "k", "v")), *NAMES[3:7]]
    names += [name if name in used else "" for name in NAMES[7:]]
    while not names[-1]:
        names.pop()
    attributes = {"num_heads": shape.heads, "kv_num_heads": shape.kv_heads, "scale": 0.0}
    attributes |= {"window": shape.window} | changes
    node = helper.make_node(shape.operator, names, ["y"], domain="maskdial", **attributes)
    types: dict[str, int] = dict.fromkeys(
        ("lengths", "longest", "new", "ahead"), onnx.TensorProto.INT32
    )
    types["rows"] = onnx.TensorProto.INT64
    types |= dict.fromkeys(CACHE, helper.np_dtype_to_tensor_dtype(shape.dtype))
    inputs = [
        helper.make_tensor_value_info(name, types.get(name, onnx.TensorProto.FLOAT), None)
        for name in filter(None, names)
    ]
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "attention", inputs, [output])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("maskdial", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("maskdial.threads", str(threads))
    if threads > 2:  # more than the machine may have
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def tables(shape: Shape, positions: int) -> dict[str, Floats]:
    """The cosines and sines of each position; empty without rotation."""
    if not shape.num_rotated:
        return {}
    half = shape.num_rotated // 2
    angles = np.outer(np.arange(positions), 10_000.0 ** (-np.arange(half) / half))
    return {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}


class Cache:
    """Keys and values of some rows, and passes over them as the server makes them."""

    def __init__(self, session: Any, shape: Shape, batch: int, max_length: int) -> None:
        dims = (batch, shape.kv_heads, max_length, shape.width)
        # Elements that were never written must not matter. As floats, headers of -1 are NaN, too.
        garbage = np.nan if shape.cache == "float32" else -1
        self.key = np.full(dims, garbage, shape.dtype)
        self.value = np.full(dims, garbage, shape.dtype)
        self._session = session
        self._tables = tables(shape, max_length)
        if shape.sinks:
            self._tables["sinks"] = shape.sink_scores

    def run(
        self,
        qkv: Floats,
        lengths: list[int],
        *,
        new: list[int] | None = None,
        ahead: NDArray[np.int32] | None = None,
        selected: NDArray[np.int64] | None = None,
    ) -> Floats:
        """A pass in place; ``lengths`` include the new tokens, which ``new`` counts if packed.

        ``ahead``: how many later tokens each one sees. ``selected``: the tokens that attend, if not
        all.
        """
        return self.run_apart({"qkv": qkv}, lengths, new=new, ahead=ahead, selected=selected)

    def run_apart(
        self,
        tokens: dict[str, Floats],
        lengths: list[int],
        *,
        new: list[int] | None = None,
        ahead: NDArray[np.int32] | None = None,
        selected: NDArray[np.int64] | None = None,
    ) -> Floats:
        """The same with the queries, keys and values by the names of the session's inputs."""
        binding = self._session.io_binding()
        feeds: dict[str, NDArray[Any]] = {
            **{name: np.ascontiguousarray(array) for name, array in tokens.items()},
            "lengths": np.array(lengths, np.int32) - 1,
            "longest": np.array(max(lengths), np.int32),
            **self._tables,
        }
        if new is not None:
            feeds["new"] = np.array(new, np.int32)
        if ahead is not None:
            feeds["ahead"] = ahead
        if selected is not None:
            feeds["rows"] = selected
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for name, array in zip(CACHE, (self.key, self.value), strict=True):
            address = array.ctypes.data
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, address)
        binding.bind_output("y")
        self._session.run_with_iobinding(binding)
        result: Floats = binding.get_outputs()[0].numpy()
        return result


def rounded(heads: Floats, max_integer: int) -> Floats:
    """Each head in integers up to ``max_integer`` times its step, as a cache of integers has it."""
    peak = np.abs(heads).max(axis=-1, keepdims=True)
    integers = np.rint(heads * (np.float32(max_integer) / peak))
    return np.asarray(integers * (peak / np.float32(max_integer)), np.float32)


def expected(
    shape: Shape, qkv: Floats, ahead: NDArray[np.int32] | int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64] | float]:
    """One text's attention in NumPy, and how far off rounding may be; qkv (length, columns).

    ``ahead``: how many later tokens each one sees.
    """
    length = len(qkv)
    # In float32 up to the rounding to integers, so that none is rounded to its neighbor.
    parts = qkv.reshape(length, -1, shape.size).copy()
    if shape.num_rotated:
        half = shape.num_rotated // 2
        cos, sin = (table[:length, None] for table in tables(shape, length).values())
        turned = parts[:, : shape.heads + shape.kv_heads]
        first, second = turned[..., :half].copy(), turned[..., half : 2 * half].copy()
        turned[..., :half] = first * cos - second * sin
        turned[..., half : 2 * half] = second * cos + first * sin
    if shape.cache != "float32":
        compared, values = np.split(parts, [shape.heads + shape.kv_heads], axis=1)
        compared = rounded(compared, shape.max_compared)
        parts = np.concatenate([compared, rounded(values, shape.max_value)], axis=1)
    parts = parts.astype(np.float64)
    query = parts[:, : shape.heads]
    key, value = (
        np.repeat(each, shape.heads // shape.kv_heads, axis=1)
        for each in (
            parts[:, shape.heads : shape.heads + shape.kv_heads],
            parts[:, shape.heads + shape.kv_heads :],
        )
    )
    scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(shape.size)
    places = np.arange(length)
    seen = places <= (places + ahead)[:, None]
    if shape.window:
        seen &= ~np.tri(length, k=-shape.window, dtype=bool)
    scores[:, ~seen] = -np.inf
    weights = np.exp(scores)
    sinks = np.exp(shape.sink_scores.astype(np.float64)) if shape.sinks else np.zeros(shape.heads)
    weights /= weights.sum(axis=2, keepdims=True) + sinks[:, None, None]
    result: NDArray[np.float64] = np.einsum("hqk,khd->qhd", weights, value).reshape(length, -1)
    if shape.cache == "float32":
        return result, 0.0
    return result, max_rounding(shape, weights, value).reshape(length, -1)


def max_rounding(shape: Shape, weights: NDArray[Any], value: NDArray[Any]) -> NDArray[np.float64]:
    """How far results may be off because weights over a cache of integers are such, too.

    In each block of tokens, a weight times its value's step is off by at most half of the largest
    such product divided by the largest integer.

    Args:
        shape: of the heads.
        weights: softmax weights [heads, queries, keys].
        value: the keys' values [keys, heads, size], as they are in the cache.

    Returns:
        [queries, heads, size].
    """
    step = np.abs(value).max(axis=2) / shape.max_value
    bound = np.zeros((weights.shape[1], *value.shape[1:]))
    for start in range(0, len(value), BLOCK):
        block = slice(start, start + BLOCK)
        max_weight = (weights[:, :, block] * step[block].T[:, None]).max(axis=2)
        integers = np.abs(value[block] / step[block, :, None]).sum(axis=0)
        bound += 0.5 / shape.max_weight * max_weight.T[:, :, None] * integers
    return bound


WINDOWS: list[tuple[Literal["float32", "int16", "int8"], int, bool]] = [
    ("float32", 1, False),
    ("float32", 13, True),
    ("float32", 64, False),
    ("int8", 13, True),
    ("int8", 100, False),
    ("int16", 13, False),
    ("int16", 64, True),
    ("int16", 0, True),
]
SHAPES = [
    Shape(9, 3, 64, 64),
    Shape(4, 4, 32),
    Shape(6, 1, 48, 16),
    Shape(2, 2, 16, 2),
    Shape(64, 1, 16, 16),
    Shape(1, 1, 128, 128),
    Shape(3, 1, 80, 80),
    Shape(9, 3, 64, 64, "int8"),
    Shape(4, 4, 32, cache="int8"),
    Shape(6, 1, 48, 16, "int8"),
    Shape(64, 1, 16, 16, "int8"),
    Shape(1, 1, 512, 512, "int8"),
    Shape(9, 3, 64, 64, "int16"),
    Shape(4, 4, 32, cache="int16"),
    Shape(6, 1, 48, 16, "int16"),
    Shape(64, 1, 16, 16, "int16"),
    Shape(1, 1, 512, 512, "int16"),
    *(Shape(4, 2, 32, 32, cache, window, sinks) for cache, window, sinks in WINDOWS),
]
CACHES: tuple[Literal["float32", "int16", "int8"], ...] = ("float32", "int16", "int8")
each_cache = pytest.mark.parametrize(
    "shape",
    [Shape(9, 3, 64, 64, cache, *more) for cache in CACHES for more in ((), (40, True))],
)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_numpys_in_one_piece_in_chunks_and_step_by_step(
    kernels: Kernels, processor: str, shape: Shape
) -> None:
    rng = np.random.default_rng(shape.size)
    session = open_attention(kernels.path, shape, threads=2)
    for length in (1, 2, 15, 64, 65, 150, *((300,) if shape.window else ())):
        qkv = rng.standard_normal((1, length, shape.columns), np.float32)
        whole = Cache(session, shape, 1, 304).run(qkv, [length])
        exact, rounding = expected(shape, qkv[0])
        assert (np.abs(whole[0] - exact) <= 1e-4 * np.abs(exact) + 2e-5 + rounding).all()
        for pieces in ([1] * min(length, 70), [7] * (length // 7), [length // 2]):
            cache, start = Cache(session, shape, 1, 304), 0
            for piece in [*pieces, length - sum(pieces)]:
                if piece:
                    part = cache.run(qkv[:, start : start + piece], [start + piece])
                    np.testing.assert_array_equal(part[0], whole[0, start : start + piece])
                start += piece


@pytest.mark.parametrize("length", [127, 128, 129, 1025])
@pytest.mark.parametrize("cache", ["int8", "int16"])
def test_many_tokens_are_added_up_in_blocks(
    kernels: Kernels, processor: str, cache: Literal["int16", "int8"], length: int
) -> None:
    """The largest integers, whose sum needs 31 bits, and an odd number of tokens."""
    shape = Shape(3, 1, 16, cache=cache)
    rng = np.random.default_rng(length)
    qkv = rng.standard_normal((1, length, shape.columns), np.float32)
    qkv[0, :, 3 * 16 : 4 * 16] = 1  # equal keys, and so equal weights
    qkv[0, :, -16:] = np.float32(1) + np.float32(0.5) * (np.arange(16) == 3)
    session = open_attention(kernels.path, shape, threads=2)
    whole = Cache(session, shape, 1, length).run(qkv, [length])
    exact, rounding = expected(shape, qkv[0])
    assert (np.abs(whole[0] - exact) <= 1e-5 * np.abs(exact) + rounding).all()
    pieces, start = Cache(session, shape, 1, length), 0
    for stop in (length - 100, length - 2, length - 1, length):
        part = pieces.run(qkv[:, start:stop], [stop])
        np.testing.assert_array_equal(part[0], whole[0, start:stop])
        start = stop


@each_cache
def test_queries_keys_and_values_may_be_apart(kernels: Kernels, shape: Shape) -> None:
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((2, 5, shape.columns), np.float32)
    columns = shape.heads * shape.size, (shape.heads + shape.kv_heads) * shape.size
    parts = dict(zip("qkv", np.split(qkv, columns, axis=2), strict=True))
    together = Cache(open_attention(kernels.path, shape), shape, 2, 8)
    apart = Cache(open_attention(kernels.path, shape, fused=False), shape, 2, 8)
    np.testing.assert_array_equal(apart.run_apart(parts, [5, 5]), together.run(qkv, [5, 5]))
    np.testing.assert_array_equal(apart.key, together.key)
    np.testing.assert_array_equal(apart.value, together.value)
    for name in "qkv":
        with pytest.raises(Exception, match="do not fit"):
            apart.run_apart(parts | {name: parts[name][:, :, :-1]}, [5, 5])


@each_cache
def test_rows_of_different_lengths_do_not_touch_each_other(
    kernels: Kernels, processor: str, shape: Shape
) -> None:
    lengths = [5, 1, 90, 33]
    rng = np.random.default_rng(0)
    session = open_attention(kernels.path, shape, threads=2)
    qkv = rng.standard_normal((4, max(lengths), shape.columns), np.float32)
    for row, length in enumerate(lengths):
        qkv[row, length:] = np.nan  # padding
    together, steps = Cache(session, shape, 4, 128), qkv[:, :1].copy()
    result = together.run(qkv, lengths)
    stepped = together.run(steps, [length + 1 for length in lengths])
    for row, length in enumerate(lengths):
        alone = Cache(session, shape, 1, 128)
        (text,) = alone.run(qkv[row : row + 1, :length], [length])
        np.testing.assert_array_equal(result[row, :length], text)
        assert not result[row, length:].any()
        np.testing.assert_array_equal(
            stepped[row : row + 1], alone.run(steps[row : row + 1], [length + 1])
        )


@each_cache
def test_steps_and_prompts_share_a_pass_without_padding(
    kernels: Kernels, processor: str, shape: Shape
) -> None:
    """Rows with many new tokens, one, and none: each as alone; a row with none keeps its cache."""
    rng = np.random.default_rng(0)
    texts = [rng.standard_normal((1, n, shape.columns), np.float32) for n in (90, 1, 33, 20, 64)]
    past, new = [40, 0, 32, 20, 0], [50, 1, 1, 0, 64]
    packed = Cache(open_attention(kernels.path, shape, 2, packed=True), shape, 5, 128)
    alone = []
    for row, text in enumerate(texts):
        cache = Cache(open_attention(kernels.path, shape), shape, 1, 128)
        if past[row]:
            cache.run(text[:, : past[row]], [past[row]])
            packed.key[row], packed.value[row] = cache.key[0], cache.value[0]
        if new[row]:
            alone.append(cache.run(text[:, past[row] :], [past[row] + new[row]])[0])
    before = packed.key[3].copy()
    tokens = [text[:, start:] for text, start in zip(texts, past, strict=True)]
    lengths = [a + b for a, b in zip(past, new, strict=True)]
    result = packed.run(np.concatenate(tokens, axis=1), lengths, new=new)
    np.testing.assert_array_equal(result[0], np.concatenate(alone))
    np.testing.assert_array_equal(packed.key[3], before)


@each_cache
@pytest.mark.parametrize("kind", ["last", "some", "any order", "twice", "none"])
def test_tokens_that_do_not_attend_change_nothing(
    kernels: Kernels, processor: str, shape: Shape, kind: str
) -> None:
    rng = np.random.default_rng(0)
    past, new = [40, 0, 32, 20, 0, 3], [50, 1, 1, 0, 64, 0]
    lengths = [a + b for a, b in zip(past, new, strict=True)]
    qkv = rng.standard_normal((1, sum(new), shape.columns), np.float32)
    full, some = (
        Cache(open_attention(kernels.path, shape, 2, packed=True, selects=each), shape, 6, 128)
        for each in (False, True)
    )
    before = rng.standard_normal((6, 40, shape.columns), np.float32)
    for cache in (full, some):
        selected = np.arange(240) if cache is some else None
        cache.run(before.reshape(1, 240, -1), [40] * 6, new=[40] * 6, selected=selected)
    everything = full.run(qkv, lengths, new=new)
    selected = {
        "last": np.cumsum(new)[[0, 1, 2, 4]] - 1,
        "some": np.flatnonzero(rng.random(sum(new)) < 0.4),
        "any order": rng.permutation(sum(new))[:30],
        "twice": np.array([7, 7, 8, 7, 115]),
        "none": np.arange(0),
    }[kind]
    result = some.run(qkv, lengths, new=new, selected=selected)
    np.testing.assert_array_equal(result[0], everything[0, selected])
    np.testing.assert_array_equal(some.key, full.key)
    np.testing.assert_array_equal(some.value, full.value)


@each_cache
def test_tokens_may_see_those_behind_them(kernels: Kernels, processor: str, shape: Shape) -> None:
    """A whole prompt, a block after some tokens, two blocks, and a step, in one pass."""
    rng = np.random.default_rng(0)
    past, new = [0, 40, 150, 30], [140, 33, 60, 1]
    blocks = [[140], [*[1] * 10, 23], [30, 30], [1]]
    ahead = [
        np.concatenate([np.arange(size)[::-1] for size in sizes]).astype(np.int32)
        for sizes in blocks
    ]
    lengths = [a + b for a, b in zip(past, new, strict=True)]
    texts = [rng.standard_normal((1, n, shape.columns), np.float32) for n in lengths]
    packed, some = (
        Cache(
            open_attention(kernels.path, shape, 2, packed=True, looks_ahead=True, selects=each),
            shape,
            4,
            256,
        )
        for each in (False, True)
    )
    alone = []
    for row, text in enumerate(texts):
        cache = Cache(
            open_attention(kernels.path, shape, packed=True, looks_ahead=True), shape, 1, 256
        )
        if past[row]:
            before = text[:, : past[row]]
            none = np.zeros(past[row], np.int32)
            cache.run(before, [past[row]], new=[past[row]], ahead=none)
            for each in (packed, some):
                each.key[row], each.value[row] = cache.key[0], cache.value[0]
        tokens = text[:, past[row] :]
        alone.append(cache.run(tokens, [lengths[row]], new=[new[row]], ahead=ahead[row])[0])
        counts = np.concatenate([np.zeros(past[row], np.int32), ahead[row]])
        exact, rounding = expected(shape, text[0], counts)
        error = np.abs(alone[-1] - exact[past[row] :])
        bound = rounding if isinstance(rounding, float) else rounding[past[row] :]
        assert (error <= 1e-4 * np.abs(exact[past[row] :]) + 2e-5 + bound).all()
    tokens = np.concatenate([t[:, s:] for t, s in zip(texts, past, strict=True)], axis=1)
    counts = np.concatenate(ahead)
    result = packed.run(tokens, lengths, new=new, ahead=counts)
    np.testing.assert_array_equal(result[0], np.concatenate(alone))
    selected = np.flatnonzero(rng.random(sum(new)) < 0.4)
    part = some.run(tokens, lengths, new=new, ahead=counts, selected=selected)
    np.testing.assert_array_equal(part[0], result[0, selected])


@pytest.mark.parametrize("ahead", [[2, 0, 0], [1, 0, 1], [-1, 0, 0], [0, 0], [3, 2, 1]], ids=str)
def test_tokens_that_see_beyond_their_row_are_errors(kernels: Kernels, ahead: list[int]) -> None:
    session = open_attention(kernels.path, Shape(4, 4, 16, 16), packed=True, looks_ahead=True)
    good = GOOD | {"qkv": np.zeros((1, 3, 12 * 16), np.float32), "new": np.array([2, 1], np.int32)}
    session.run(None, good | {"ahead": np.array([1, 0, 0], np.int32)})
    with pytest.raises(Exception, match=r"inputs of \w*CausalAttention do not fit: tokens ahead"):
        session.run(None, good | {"ahead": np.array(ahead, np.int32)})
    uneven = good | {"lengths": np.array([4, 5], np.int32), "new": np.array([3, 0], np.int32)}
    with pytest.raises(Exception, match=r"inputs of \w*CausalAttention do not fit: tokens ahead"):
        session.run(None, uneven | {"ahead": np.array([2, 0, 0], np.int32)})


@pytest.mark.parametrize("rows", [[0, 3], [-1], [[0, 1]]])
def test_rows_that_do_not_fit_are_errors(kernels: Kernels, rows: Any) -> None:
    session = open_attention(kernels.path, Shape(4, 4, 16, 16), packed=True, selects=True)
    good = GOOD | {"qkv": np.zeros((1, 3, 12 * 16), np.float32), "new": np.array([2, 1], np.int32)}
    session.run(None, good | {"rows": np.array([2, 0])})
    with pytest.raises(Exception, match=r"inputs of \w*CausalAttention do not fit: rows"):
        session.run(None, good | {"rows": np.array(rows)})
    padded = open_attention(kernels.path, Shape(4, 4, 16, 16), selects=True)
    with pytest.raises(Exception, match=r"inputs of \w*CausalAttention do not fit: rows"):
        padded.run(None, GOOD | {"rows": np.array([0])})


@pytest.mark.parametrize(
    "changes",
    [
        {"new": np.array([2, 2], np.int32)},
        {"new": np.array([4, -1], np.int32)},
        {"new": np.array([3], np.int32)},
        {"new": np.array([2, 1], np.int32), "lengths": np.array([0, 5], np.int32)},
        {"lengths": np.array([8, 5], np.int32)},
        {"lengths": np.array([-2, 5], np.int32), "new": np.array([0, 3], np.int32)},
        {"qkv": np.zeros((3, 1, 12 * 16), np.float32)},
    ],
)
def test_packed_inputs_that_do_not_fit_are_errors(
    kernels: Kernels, changes: dict[str, Any]
) -> None:
    session = open_attention(kernels.path, Shape(4, 4, 16, 16), packed=True)
    good = GOOD | {"qkv": np.zeros((1, 3, 12 * 16), np.float32), "new": np.array([2, 1], np.int32)}
    session.run(None, good)
    with pytest.raises(Exception, match=r"inputs of \w*CausalAttention do not fit"):
        session.run(None, good | changes)


@each_cache
def test_all_instruction_sets_agree_to_the_last_bit(
    kernels: Kernels, instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch, shape: Shape
) -> None:
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((1, 100, shape.columns), np.float32)
    results = []
    for name in instruction_sets:
        monkeypatch.setenv("MASKDIAL_KERNELS_ISA", name)
        session = open_attention(kernels.path, shape)
        results.append(Cache(session, shape, 1, 100).run(qkv, [100]))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@each_cache
def test_extreme_scores_stay_finite(kernels: Kernels, processor: str, shape: Shape) -> None:
    qkv = np.zeros((1, 40, shape.columns), np.float32)
    qkv[0, ::2, : shape.heads * shape.size] = 1e15
    qkv[0, 1::2, shape.heads * shape.size :] = -1e15
    qkv[0, 2::3, shape.heads * shape.size :] = 1e-42
    result = Cache(open_attention(kernels.path, shape), shape, 1, 40).run(qkv, [40])
    assert np.isfinite(result).all()


GOOD: dict[str, Any] = {
    "qkv": np.zeros((2, 3, 12 * 16), np.float32),
    "past_key": np.zeros((2, 4, 8, 16), np.float32),
    "past_value": np.zeros((2, 4, 8, 16), np.float32),
    "lengths": np.array([4, 5], np.int32),
    "longest": np.array(6, np.int32),
    "cos": np.zeros((8, 8), np.float32),
    "sin": np.zeros((8, 8), np.float32),
}


@pytest.mark.parametrize(
    "changes",
    [
        {"qkv": np.zeros((2, 3, 11 * 16), np.float32)},
        {"qkv": np.zeros((3, 3, 12 * 16), np.float32)},
        {"qkv": np.zeros((2, 12 * 16), np.float32)},
        {"past_key": np.zeros((2, 4, 7, 16), np.float32)},
        {"past_value": np.zeros((2, 3, 8, 16), np.float32)},
        {"past_key": np.zeros((2, 4, 8), np.float32)},
        {name: np.zeros((2, 4, 8, 12), np.float32) for name in ("past_key", "past_value")},
        {name: np.zeros((2, 4, 8, 0), np.float32) for name in ("past_key", "past_value")},
        {"lengths": np.array([4], np.int32)},
        {"lengths": np.array([4, 8], np.int32)},
        {"lengths": np.array([1, 5], np.int32)},
        {"lengths": np.array([-1, 5], np.int32)},
        {"lengths": np.array([2, 3], np.int32), "longest": np.array(3, np.int32)},
        {"longest": np.array(-1, np.int32)},
        {"longest": np.zeros(0, np.int32)},
        {"cos": np.zeros((5, 8), np.float32), "sin": np.zeros((5, 8), np.float32)},
        {"cos": np.zeros((8, 9), np.float32), "sin": np.zeros((8, 9), np.float32)},
        {"sin": np.zeros((8, 7), np.float32)},
    ],
)
@pytest.mark.parametrize("cache", CACHES)
def test_inputs_that_do_not_fit_are_errors(
    kernels: Kernels, changes: dict[str, Any], cache: Literal["float32", "int16", "int8"]
) -> None:
    shape = Shape(4, 4, 16, 16, cache)
    session = open_attention(kernels.path, shape)

    def feeds(changes: dict[str, Any]) -> dict[str, Any]:
        """Inputs whose past is as wide as the cache, and as wrong as the changes make it."""
        given = GOOD | changes
        for name in CACHE:
            dims = list(given[name].shape)
            dims[-1] += shape.width - shape.size if len(dims) == 4 else 0
            given[name] = np.zeros(dims, shape.dtype)
        return given

    session.run(None, feeds({}))
    with pytest.raises(Exception, match=r"inputs of \w*CausalAttention do not fit"):
        session.run(None, feeds(changes))


def test_heads_that_cannot_be_grouped_are_errors(kernels: Kernels) -> None:
    wrong: tuple[dict[str, Any], ...] = ({"num_heads": 5}, {"kv_num_heads": 0}, {"num_heads": -4})
    for changes in wrong:
        with pytest.raises(Exception, match="multiple of kv_num_heads"):
            open_attention(kernels.path, Shape(4, 2, 16), **changes)
