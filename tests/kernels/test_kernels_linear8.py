"""``Linear8`` against NumPy: equal to the last bit in any shape, for any values, in any company."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from tests.kernels.conftest import fma
from tests.kernels.test_kernels_linear4 import quantized, rows

Open = Callable[..., ort.InferenceSession]
Floats = NDArray[np.float32]
Drawn = tuple[NDArray[np.uint8], Floats, Floats | None, Floats | None]
"""Weights, scales, and perhaps biases and minima."""
Numbers = Literal["floats", "halves", "multiples", "minima", "half minima", "multiple minima"]

NAMES = [f"{prefix}{name}" for prefix in ("", "up_") for name in ("w", "s", "b", "m")]


def product(
    x: Floats,
    weight: NDArray[np.uint8],
    scale: Floats,
    bias: Floats | None = None,
    minimum: Floats | None = None,
) -> Floats:
    """The operator's product in NumPy: exact integers, then float32 in the same order."""
    block_size = weight.shape[2]
    total = np.zeros((len(x), len(weight)), np.float32)
    for block in range(weight.shape[1]):
        values, step = quantized(x[:, block * block_size : (block + 1) * block_size])
        integers = weight[:, block, : values.shape[1]].astype(np.int64) - 128
        exact = (values @ integers.T).astype(np.float32)
        total = fma(exact * scale[:, block], step, total)
        if minimum is not None:
            sums = values.sum(axis=1, keepdims=True).astype(np.float32)
            total = fma(minimum[block], -sums * step, total)
    return total if bias is None else total + bias


def drawn(
    rng: np.random.Generator,
    num_inputs: int,
    num_outputs: int,
    numbers: Numbers = "floats",
    *,
    block_size: int = 32,
    bias: bool = False,
) -> Drawn:
    """Weights with many of the extremes, and scales in each of the forms that a panel has.

    Eight blocks' "multiples" are integers times a float16: up to 128 as in Q6_K, or with minima up
    to 63 as in Q5_K.
    """
    num_blocks = -(-num_inputs // block_size)
    shape = num_outputs, num_blocks, block_size
    weight = rng.integers(0, 256, shape).astype(np.uint8)
    weight[rng.random(shape) < 0.2] = 0
    weight[rng.random(shape) < 0.2] = 255
    scale = rng.standard_normal((num_outputs, num_blocks), np.float32)
    minimum = rng.standard_normal((num_blocks, num_outputs), np.float32)
    if numbers in ("halves", "half minima"):
        scale, minimum = (each.astype(np.float16).astype(np.float32) for each in (scale, minimum))
    elif numbers in ("multiples", "multiple minima"):
        largest = 128 if numbers == "multiples" else 63
        steps = rng.standard_normal((2, num_outputs, -(-num_blocks // 8), 1)).astype(np.float16)
        times = rng.integers(0, largest + 1, (*steps.shape[:3], 8)).astype(np.float32)
        both = (steps.astype(np.float32) * times).reshape(2, num_outputs, -1)[..., :num_blocks]
        scale, minimum = both[0].copy(), both[1].T.copy()
    biases = rng.standard_normal(num_outputs, np.float32) if bias else None
    return weight, scale, biases, minimum if numbers.endswith("minima") else None


@pytest.fixture
def linear8(linear: Open) -> Open:
    """A session of one ``Linear8`` from the tuples that `drawn` returns."""

    def opened(num_inputs: int, *weights: Drawn, **options: Any) -> ort.InferenceSession:
        arrays = dict(zip(NAMES, (array for each in weights for array in each), strict=False))
        return linear(num_inputs, arrays, op_type="Linear8", num_inputs=num_inputs, **options)

    return opened


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs"),
    [(1, 1, 1), (1, 576, 100), (2, 3, 33), (4, 127, 16), (6, 130, 64), (13, 66, 65), (40, 289, 70)],
)
def test_products_are_numpys_to_the_last_bit(
    linear8: Open, num_rows: int, num_inputs: int, num_outputs: int, block_size: int
) -> None:
    rng = np.random.default_rng(num_rows * num_inputs)
    x = rows(rng, num_rows, num_inputs)
    cases: list[Numbers] = ["floats", "halves", "multiples", "minima", "multiple minima"]
    for index, numbers in enumerate(cases):
        weights = drawn(
            rng, num_inputs, num_outputs, numbers, block_size=block_size, bias=index % 2 > 0
        )
        (result,) = linear8(num_inputs, weights).run(None, {"x": x})
        np.testing.assert_array_equal(result, product(x, *weights))


def narrowed(rng: np.random.Generator, weights: Drawn, least: int, most: int) -> Drawn:
    """The same scales and minima over integers between two, with many of these.

    Without minima half of the blocks have the negatives, as an export writes blocks whose scale is
    negative in the file.
    """
    weight, scale, bias, minimum = weights
    values = rng.integers(least, most + 1, weight.shape)
    values[rng.random(weight.shape) < 0.2] = least
    values[rng.random(weight.shape) < 0.2] = most
    if minimum is None:
        values *= rng.choice([-1, 1], (*weight.shape[:2], 1))
    return (values + 128).astype(np.uint8), scale, bias, minimum


NARROW: list[tuple[int, int, int, Numbers]] = [
    (16, -32, 31, "multiples"),  # Q6_K
    (16, 0, 3, "multiple minima"),  # Q2_K
    (16, -32, 32, "multiples"),  # no file's
    (32, -16, 15, "halves"),  # Q5_0
    (32, 0, 31, "half minima"),  # Q5_1
    (32, 0, 31, "multiple minima"),  # Q5_K
    (32, -127, 113, "multiples"),  # IQ4_XS
    (32, -16, 31, "minima"),
]


@pytest.mark.parametrize(("num_rows", "num_inputs"), [(1, 768), (2, 300), (7, 45), (26, 522)])
def test_weights_of_few_bits_give_the_same_products(
    linear8: Open, num_rows: int, num_inputs: int
) -> None:
    rng = np.random.default_rng(num_rows)
    x = rows(rng, num_rows, num_inputs)
    for block_size, least, most, numbers in NARROW:
        weights = drawn(rng, num_inputs, 70, numbers, block_size=block_size, bias=num_rows > 1)
        weights = narrowed(rng, weights, least, most)
        (result,) = linear8(num_inputs, weights).run(None, {"x": x})
        np.testing.assert_array_equal(result, product(x, *weights))


@pytest.mark.parametrize(("block_size", "numbers"), [(16, "multiples"), (32, "halves")])
def test_weights_of_few_bits_do_not_saturate(
    linear8: Open, block_size: int, numbers: Numbers
) -> None:
    rng = np.random.default_rng(0)
    least, most = (-32, 31) if block_size == 16 else (-16, 15)
    x = np.where(np.arange(2048) % 2, np.float32(-9), np.float32(9))[None].repeat(3, 0)
    for values in (least, most):
        weights = drawn(rng, 2048, 40, numbers, block_size=block_size)
        weights = narrowed(rng, weights, values, values)
        (result,) = linear8(2048, weights).run(None, {"x": x})
        np.testing.assert_array_equal(result, product(x, *weights))
        (result,) = linear8(2048, weights).run(None, {"x": np.abs(x)})
        np.testing.assert_array_equal(result, product(np.abs(x), *weights))


@pytest.mark.parametrize("block_size", [16, 32])
def test_a_matrix_may_turn_out_to_need_more_bits(linear8: Open, block_size: int) -> None:
    """The first panel tells how the others are packed, and may be wrong, of either of two."""
    rng = np.random.default_rng(block_size)
    x = rng.standard_normal((9, 320), np.float32)
    numbers: Numbers = "multiples" if block_size == 16 else "halves"
    first = narrowed(rng, drawn(rng, 320, 150, numbers, block_size=block_size), -16, 15)
    weight, scale = first[0].copy(), first[1].copy()
    weight[140, 3, 5], scale[90, 2] = 170, np.float32(0.1)
    second: Drawn = (weight, scale, None, None)
    x /= np.abs(product(x, *first)).max() / np.float32(9)  # as ONNX Runtime's Sigmoid wants
    for weights in (first, second):
        (result,) = linear8(320, weights).run(None, {"x": x})
        np.testing.assert_array_equal(result, product(x, *weights))
    for gate, up in ((first, second), (second, first), (second, second)):
        (result,) = linear8(320, gate, up).run(None, {"x": x})
        gated = product(x, *gate).astype(np.float64)
        expected = gated / (1 + np.exp(-gated)) * product(x, *up)
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_size", [16, 32])
def test_scales_of_128_steps_fit_with_a_sign(linear8: Open, block_size: int) -> None:
    rng = np.random.default_rng(block_size)
    x = rows(rng, 5, 512)
    weight, scale, *_ = drawn(rng, 512, 40, "multiples", block_size=block_size)
    scale[:, 1::8], scale[:, ::8] = np.float32(0.375), np.float32(48)  # once and 128 times
    scale[:, 2::8] = np.float32(0.375 * 127)
    for integers in (weight, np.clip(weight, 96, 159), np.clip(weight, 97, 160)):
        (result,) = linear8(512, (integers, scale)).run(None, {"x": x})
        np.testing.assert_array_equal(result, product(x, integers, scale))


@pytest.mark.parametrize("weight", [0, 255])
@pytest.mark.parametrize("value", [-1000, 1000])
def test_largest_products_do_not_saturate(linear8: Open, weight: int, value: float) -> None:
    weights = np.full((40, 64, 32), weight, np.uint8)
    scale = np.full((40, 64), 127, np.float32)
    x = np.full((3, 2048), value, np.float32)
    (result,) = linear8(2048, (weights, scale)).run(None, {"x": x})
    np.testing.assert_allclose(result, 127 * value * (weight - 128) * 2048, rtol=1e-6)


def test_gated_products_are_silu_times_up(linear8: Open) -> None:
    rng = np.random.default_rng(0)
    # ONNX Runtime's Sigmoid, which this repeats, is exact to a few bits between -18 and 18.
    x = rng.standard_normal((14, 170), np.float32) * np.float32(0.0005)
    gate, up = drawn(rng, 170, 45, "halves", bias=True), drawn(rng, 170, 45, "minima")
    (result,) = linear8(170, gate, up).run(None, {"x": x})
    first = product(x, *gate).astype(np.float64)
    second = product(x, *up).astype(np.float64)
    expected = first / (1 + np.exp(-first)) * second
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_a_row_does_not_depend_on_its_company_or_on_the_threads(linear8: Open) -> None:
    rng = np.random.default_rng(0)
    x = rows(rng, 100, 200)
    weights = drawn(rng, 200, 301, "multiples", block_size=16, bias=True)
    one, two = (linear8(200, weights, threads=threads) for threads in (1, 2))
    (together,) = one.run(None, {"x": x})
    (threaded,) = two.run(None, {"x": x})
    np.testing.assert_array_equal(threaded, together)
    for start, stop in ((0, 1), (7, 8), (20, 22), (40, 53)):
        (alone,) = two.run(None, {"x": x[start:stop]})
        np.testing.assert_array_equal(alone, together[start:stop])


WEIGHT, SCALE = np.zeros((4, 2, 32), np.uint8), np.ones((4, 2), np.float32)
SCALE3 = np.ones((4, 3), np.float32)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((np.zeros((4, 32), np.uint8), SCALE), "weight of Linear8 must be a matrix in blocks"),
        ((np.zeros((4, 1, 64), np.uint8), SCALE[:, :1]), "must have 16 or 32 inputs"),
        ((np.zeros((4, 3, 32), np.uint8), SCALE), "number of inputs"),
        ((WEIGHT, SCALE[:3]), "scale of Linear8 does not fit"),
        ((WEIGHT, SCALE, None, SCALE[:3]), "minima of Linear8 do not fit"),
        ((WEIGHT, SCALE, None, None, np.zeros((4, 3, 16), np.uint8), SCALE3), "blocks"),
    ],
)
def test_wrong_weights_are_errors(linear8: Open, weights: Any, message: str) -> None:
    with pytest.raises(Exception, match=message):
        linear8(40, weights)
