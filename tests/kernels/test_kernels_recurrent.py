"""``CausalConv`` and ``LinearAttention`` against NumPy, and against themselves in other company and
other pieces.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from maskdial.kernels.installed import Kernels
from tests.kernels.conftest import open_operator

Floats = NDArray[np.float32]
Feeds = dict[str, Any]


def open_conv(kernels: Kernels, *, bias: bool = True, silu: int = 1, threads: int = 1) -> Any:
    names = dict.fromkeys(("x", "state", "taps"), np.float32)
    inputs = {**names, "bias": np.float32 if bias else None, "new_tokens": np.int32}
    return open_operator(kernels.path, "CausalConv", inputs, threads=threads, silu=silu)


def drawn_conv(counts: Sequence[int], channels: int, num_taps: int) -> Feeds:
    rng = np.random.default_rng(channels)
    return {
        "x": rng.standard_normal((1, sum(counts), channels), np.float32),
        "state": rng.standard_normal((len(counts), num_taps - 1, channels), np.float32),
        "taps": rng.standard_normal(num_taps * channels, np.float32),
        "bias": rng.standard_normal(channels, np.float32),
        "new_tokens": np.array(counts, np.int32),
    }


def run(session: Any, feeds: Feeds, **changes: Any) -> tuple[Floats, Floats]:
    """The result and the states afterwards; those of the feeds stay as they are."""
    feeds = {**feeds, **changes}
    feeds["state"] = feeds["state"].copy()
    (result,) = session.run(None, feeds)
    return result, feeds["state"]


def test_a_convolution_is_numpys(kernels: Kernels, processor: str) -> None:
    for channels, num_taps, bias, silu in itertools.product(
        (1, 7, 16, 300), (2, 3, 4, 6), (False, True), (0, 1)
    ):
        counts = [5, 0, 1, 2, 9]
        feeds = drawn_conv(counts, channels, num_taps)
        if not bias:
            del feeds["bias"]
        result, state = run(open_conv(kernels, bias=bias, silu=silu, threads=2), feeds)
        start, taps = 0, feeds["taps"].reshape(num_taps, channels).astype(np.float64)
        for row, count in enumerate(counts):
            joined = np.concatenate([feeds["state"][row], feeds["x"][0, start : start + count]])
            expected = sum(taps[i] * joined[i : i + count] for i in range(num_taps))
            expected = expected + (feeds["bias"] if bias else 0)
            expected = expected / (1 + np.exp(-expected)) if silu else expected
            np.testing.assert_allclose(
                result[0, start : start + count], expected, rtol=1e-5, atol=1e-5
            )
            np.testing.assert_array_equal(state[row], joined[count:])
            start += count


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of linear attention; ``key_heads`` of queries and keys."""

    heads: int
    key_heads: int
    num_keys: int
    columns: int
    by_key: bool = False
    delta: bool = False
    epsilon: float = 0.0


SHAPES = [
    Shape(2, 1, 16, 32),
    Shape(4, 2, 5, 7, by_key=True),
    Shape(3, 3, 128, 128, delta=True, epsilon=1e-6),
    Shape(2, 2, 33, 48, by_key=True, delta=True, epsilon=1e-6),
    Shape(70, 1, 16, 1, by_key=True),
    Shape(70, 70, 9, 1),
    Shape(2, 1, 8, 1, delta=True),
]


def open_attention(kernels: Kernels, shape: Shape, threads: int = 1) -> Any:
    names = dict.fromkeys(("query", "key", "value", "state", "decay"), np.float32)
    inputs = {**names, "beta": np.float32 if shape.delta else None, "new_tokens": np.int32}
    return open_operator(
        kernels.path,
        "LinearAttention",
        inputs,
        threads=threads,
        scale=0.25,
        epsilon=shape.epsilon,
    )


def drawn_attention(counts: Sequence[int], shape: Shape) -> Feeds:
    rng = np.random.default_rng(shape.num_keys)
    tokens, heads, keys = sum(counts), shape.heads, shape.num_keys

    def normal(*dims: int) -> Floats:
        return rng.standard_normal(dims, np.float32)

    feeds = {
        "query": normal(1, tokens, shape.key_heads * keys),
        "key": normal(1, tokens, shape.key_heads * keys),
        "value": normal(1, tokens, heads * shape.columns),
        "state": normal(len(counts), heads, keys, shape.columns),
        "decay": -np.abs(normal(1, tokens, heads * (keys if shape.by_key else 1))),
        "new_tokens": np.array(counts, np.int32),
    }
    if shape.delta:
        feeds["beta"] = rng.random((1, tokens, heads), np.float32)
        if not shape.epsilon:  # keys of any length make the delta rule diverge
            feeds["key"] /= np.float32(keys)
    return feeds


def attended(feeds: Feeds, shape: Shape) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The results and the states, token by token in float64."""
    heads, keys, columns = shape.heads, shape.num_keys, shape.columns
    states = feeds["state"].astype(np.float64)
    parts = {
        name: feeds[name][0].astype(np.float64).reshape(-1, shape.key_heads, keys)
        for name in ("query", "key")
    }
    if shape.epsilon:
        parts = {
            name: part / np.sqrt((part**2).sum(-1, keepdims=True) + shape.epsilon)
            for name, part in parts.items()
        }
    query, key = (
        np.repeat(part, heads // shape.key_heads, axis=1)
        for part in (parts["query"] * 0.25, parts["key"])
    )
    value = feeds["value"][0].astype(np.float64).reshape(-1, heads, columns)
    decay = np.exp(feeds["decay"][0].astype(np.float64)).reshape(len(value), heads, -1, 1)
    results = np.zeros_like(value)
    rows = np.repeat(np.arange(len(states)), feeds["new_tokens"])
    for token, row in enumerate(rows):
        state = states[row] * decay[token]
        added = value[token]
        if shape.delta:
            known = np.einsum("hk,hkc->hc", key[token], state)
            added = (added - known) * feeds["beta"][0, token][:, None]
        states[row] = state + key[token][:, :, None] * added[:, None, :]
        results[token] = np.einsum("hk,hkc->hc", query[token], states[row])
    return results.reshape(1, len(value), -1), states


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_attention_is_numpys(kernels: Kernels, processor: str, shape: Shape) -> None:
    feeds = drawn_attention([3, 0, 1, 17], shape)
    result, state = run(open_attention(kernels, shape, threads=2), feeds)
    expected, states = attended(feeds, shape)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(state, states, rtol=1e-4, atol=2e-5)


def pieces(feeds: Feeds, row: int, cuts: Sequence[int]) -> list[Feeds]:
    """A row's tokens alone, in pieces of some lengths; without states."""
    start = int(feeds["new_tokens"][:row].sum())
    found = []
    for count in cuts:
        piece: Feeds = {
            name: value[:, start : start + count]
            for name, value in feeds.items()
            if value.ndim == 3 and name != "state"
        }
        piece |= {name: feeds[name] for name in ("taps", "bias") if name in feeds}
        found.append(piece | {"new_tokens": np.array([count], np.int32)})
        start += count
    return found


def agree_to_the_last_bit(
    sessions: Sequence[Any], feeds: Feeds, row: int, ways: Sequence[Sequence[int]]
) -> None:
    """Checks a row in company and alone, in one piece and in several, between sessions."""
    (first, states), *others = [run(session, feeds) for session in sessions]
    for result, state in others:
        np.testing.assert_array_equal(result, first)
        np.testing.assert_array_equal(state, states)
    start, count = int(feeds["new_tokens"][:row].sum()), int(feeds["new_tokens"][row])
    for session, cuts in itertools.product(sessions, ways):
        state, results = feeds["state"][row : row + 1], []
        for piece in pieces(feeds, row, cuts):
            result, state = run(session, {**piece, "state": state})
            results.append(result)
        np.testing.assert_array_equal(np.concatenate(results, 1), first[:, start : start + count])
        np.testing.assert_array_equal(state, states[row : row + 1])


WAYS = [[19], [1] * 19, [2, 1, 7, 9], [16, 3]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_in_company_and_in_pieces_agrees_to_the_last_bit(
    kernels: Kernels,
    instruction_sets: list[str],
    monkeypatch: pytest.MonkeyPatch,
    shape: Shape,
) -> None:
    sessions = []
    for name, threads in itertools.product(instruction_sets, (1, 2)):
        monkeypatch.setenv("MASKDIAL_KERNELS_ISA", name)
        sessions.append(open_attention(kernels, shape, threads))
    agree_to_the_last_bit(sessions, drawn_attention([1, 19, 0, 6], shape), 1, WAYS)


def test_convolutions_in_company_and_in_pieces_agree_to_the_last_bit(
    kernels: Kernels, instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = []
    for name, threads in itertools.product(instruction_sets, (1, 2)):
        monkeypatch.setenv("MASKDIAL_KERNELS_ISA", name)
        sessions.append(open_conv(kernels, threads=threads))
    for num_taps in (2, 4, 5):
        agree_to_the_last_bit(sessions, drawn_conv([1, 19, 0, 6], 270, num_taps), 1, WAYS)


def test_decays_of_any_size_are_those_of_their_exponent(kernels: Kernels, processor: str) -> None:
    shape = Shape(1, 1, 4, 32)
    feeds = drawn_attention([3], shape)
    feeds["decay"] = np.array([0.0, -1e30, -80.0], np.float32).reshape(1, 3, 1)
    result, state = run(open_attention(kernels, shape), feeds)
    expected, states = attended(feeds, shape)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(state, states, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"new_tokens": np.array([3, 3], np.int32)}, "new tokens"),
        ({"new_tokens": np.array([6, -1], np.int32)}, "new tokens"),
        ({"new_tokens": np.array([5], np.int32)}, "new tokens"),
        ({"taps": np.zeros(3 * 16, np.float32)}, "taps"),
        ({"bias": np.zeros(15, np.float32)}, "bias"),
        ({"state": np.zeros((2, 3, 8), np.float32)}, "state"),
        ({"state": np.zeros((2, 16, 16), np.float32)}, "taps"),
        ({"x": np.zeros((2, 5, 16), np.float32)}, "ranks"),
    ],
)
def test_convolutions_refuse_inputs_that_do_not_fit(
    kernels: Kernels, changes: Feeds, what: str
) -> None:
    feeds = drawn_conv([2, 3], 16, 4)
    if changes.get("state") is not None and changes["state"].shape[2] == 8:
        feeds["taps"] = feeds["taps"][: 4 * 16]
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument) as refused:
        run(open_conv(kernels), feeds, **changes)
    assert f"inputs of CausalConv do not fit: {what}" in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"new_tokens": np.array([2, 2], np.int32)}, "new tokens"),
        ({"query": np.zeros((1, 5, 15), np.float32)}, "query and key"),
        ({"key": np.zeros((1, 5, 32), np.float32)}, "query and key"),
        ({"key": np.zeros((1, 4, 16), np.float32)}, "tokens"),
        ({"value": np.zeros((1, 5, 63), np.float32)}, "value"),
        ({"state": np.zeros((2, 2, 0, 32), np.float32)}, "state"),
        ({"state": np.zeros((2, 2, 16), np.float32)}, "state"),
        ({"decay": np.zeros((1, 5, 3), np.float32)}, "decay"),
        ({"beta": np.zeros((1, 5, 1), np.float32)}, "beta"),
    ],
)
def test_attention_refuses_inputs_that_do_not_fit(
    kernels: Kernels, changes: Feeds, what: str
) -> None:
    shape = Shape(2, 1, 16, 32, delta=True)
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument) as refused:
        run(open_attention(kernels, shape), drawn_attention([2, 3], shape), **changes)
    assert f"inputs of LinearAttention do not fit: {what}" in str(refused.value)
