"""``Linear4`` against NumPy: equal to the last bit in any shape, for any values, in any company."""

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from tests.kernels.conftest import fma

Open = Callable[..., ort.InferenceSession]
Floats = NDArray[np.float32]
Drawn = tuple[NDArray[np.uint8], Floats, Floats | None, NDArray[np.uint8] | None, Floats | None]
"""Weights, scales, and perhaps biases, zeros and minima."""
Numbers = Literal["middle", "zeros", "minima", "multiples"]

LARGEST = np.float32(127)
LEAST_PEAK = np.float32(2.0**-120)
TINY = np.float32(1e-42)  # a denormal
NAMES = [f"{prefix}{name}" for prefix in ("", "up_") for name in ("w", "s", "b", "z", "m")]


def quantized(block: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """A block of each row as integers, and the step between them (rows, 1)."""
    peak = np.abs(block).max(axis=1, keepdims=True)
    peak = np.where(peak >= LEAST_PEAK, peak, np.float32(0))
    with np.errstate(divide="ignore"):
        factor = np.where(peak > 0, LARGEST / peak, np.float32(0))
    return np.rint(block * factor).astype(np.int64), (peak / LARGEST).astype(np.float32)


def product(
    x: NDArray[np.float32],
    packed: NDArray[np.uint8],
    scale: NDArray[np.float32],
    bias: NDArray[np.float32] | None = None,
    zeros: NDArray[np.uint8] | None = None,
    minimum: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """The operator's product in NumPy: exact integers, then float32 in the same order."""
    block_size = 2 * packed.shape[2]
    total = np.zeros((len(x), len(packed)), np.float32)
    for block in range(packed.shape[1]):
        values, step = quantized(x[:, block * block_size : (block + 1) * block_size])
        weights = nibbles(packed[:, block])[:, : values.shape[1]]
        sums = values.sum(axis=1, keepdims=True)
        zero = np.int64(8) if zeros is None else nibbles(zeros)[:, block]
        exact = values @ weights.T - (sums * zero if minimum is None else 0)
        total = fma(exact.astype(np.float32) * scale[:, block], step, total)
        if minimum is not None:
            total = fma(minimum[block], -sums.astype(np.float32) * step, total)
    return total if bias is None else total + bias


def nibbles(packed: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Bytes (rows, columns) as pairs of integers of 4 bits."""
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(len(packed), -1).astype(np.int64)


def drawn(
    rng: np.random.Generator,
    num_inputs: int,
    num_outputs: int,
    *,
    bias: bool = False,
    block_size: int = 128,
    numbers: Numbers = "middle",
    halves: bool = False,
) -> Drawn:
    """Weights with many of the extremes, and scales of both signs as exported ones have.

    Scales and minima are numbers of 16 bits with ``halves``, among them denormal ones. Of
    "multiples", eight blocks each have scales and minima of 6 bits times a float16, as Q4_K.
    """
    num_blocks = -(-num_inputs // block_size)
    shape = num_outputs, num_blocks, block_size // 2
    weight = rng.integers(0, 256, shape).astype(np.uint8)
    weight[rng.random(shape) < 0.2] = 0
    weight[rng.random(shape) < 0.2] = 255
    scale = rng.standard_normal((num_outputs, num_blocks), np.float32)
    if halves:
        scale[::7] *= np.float32(2.0**-20)
        scale = scale.astype(np.float16).astype(np.float32)
    biases = rng.standard_normal(num_outputs, np.float32) if bias else None
    zeros = minimum = None
    if numbers == "zeros":
        zeros = rng.integers(0, 256, (num_outputs, -(-num_blocks // 2))).astype(np.uint8)
    elif numbers == "multiples":
        groups = -(-num_blocks // 8)
        steps = rng.standard_normal((2, num_outputs, groups, 1)).astype(np.float16)
        times = rng.integers(0, 64, (2, num_outputs, groups, 8)).astype(np.float32)
        times[:, ::3] = 0
        both = (steps.astype(np.float32) * times).reshape(2, num_outputs, -1)[..., :num_blocks]
        scale, minimum = both[0].copy(), both[1].T.copy()
    elif numbers == "minima":
        minimum = rng.standard_normal(scale.T.shape, np.float32)
        if halves:
            minimum = minimum.astype(np.float16).astype(np.float32)
    return weight, scale, biases, zeros, minimum


def rows(rng: np.random.Generator, num_rows: int, num_inputs: int) -> NDArray[np.float32]:
    """Normal rows, and some of zeros, of one value, of denormals and of large values."""
    x = rng.standard_normal((num_rows, num_inputs), np.float32)
    x[1::8] = 0
    x[2::8] = -3
    x[3::8] *= TINY
    x[4::8] *= np.float32(1e30)
    x[5::8, 0] = 50
    x[6::8, : num_inputs // 2] *= np.float32(1e-30)
    return x


@pytest.fixture
def linear4(linear: Open) -> Open:
    """A session of one ``Linear4`` from the tuples that `drawn` returns."""

    def opened(num_inputs: int, *weights: Drawn, **options: Any) -> ort.InferenceSession:
        arrays = dict(zip(NAMES, (array for each in weights for array in each), strict=False))
        return linear(num_inputs, arrays, op_type="Linear4", num_inputs=num_inputs, **options)

    return opened


@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs", "block_size"),
    [
        (1, 1, 1, 32),
        (1, 64, 32, 32),
        (1, 576, 100, 128),
        (2, 3, 33, 128),
        (3, 1536, 7, 128),
        (4, 127, 16, 64),
        (5, 128, 31, 128),
        (6, 129, 64, 128),
        (12, 63, 16, 32),
        (13, 66, 65, 64),
        (14, 513, 70, 32),
        (17, 257, 1, 256),
        (25, 127, 47, 128),
        (38, 289, 70, 32),
        (40, 577, 100, 128),
    ],
)
def test_products_are_numpys_to_the_last_bit(
    linear4: Open, num_rows: int, num_inputs: int, num_outputs: int, block_size: int
) -> None:
    rng = np.random.default_rng(num_rows * num_inputs)
    x = rows(rng, num_rows, num_inputs)
    cases: list[tuple[bool, bool, Numbers]] = [
        (False, False, "middle"),
        (True, True, "middle"),
        (False, True, "zeros"),
        (True, False, "zeros"),
        (True, False, "minima"),
        (False, True, "minima"),
        (True, False, "multiples"),
    ]
    for bias, halves, numbers in cases:
        weights = drawn(
            rng,
            num_inputs,
            num_outputs,
            bias=bias,
            block_size=block_size,
            numbers=numbers,
            halves=halves,
        )
        (result,) = linear4(num_inputs, weights).run(None, {"x": x})
        np.testing.assert_array_equal(result, product(x, *weights))


@pytest.mark.parametrize("block_size", [32, 128, 4096])
@pytest.mark.parametrize("packed", [0x00, 0xFF, 0xF0])
@pytest.mark.parametrize("value", [-1000, 1000])
def test_largest_products_do_not_saturate(
    linear4: Open, packed: int, value: float, block_size: int
) -> None:
    num_blocks = 4096 // block_size
    weight = np.full((40, num_blocks, block_size // 2), packed, np.uint8)
    scale = np.full((40, num_blocks), 127, np.float32)
    x = np.full((3, 4096), value, np.float32)
    (result,) = linear4(4096, (weight, scale)).run(None, {"x": x})
    mean = ((packed & 15) + (packed >> 4)) / 2 - 8
    np.testing.assert_array_equal(result, np.float32(127 * value * mean * 4096))


@pytest.mark.parametrize("num_rows", [1, 14, 30])
def test_gated_products_are_silu_times_up(linear4: Open, num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    # ONNX Runtime's Sigmoid, which this repeats, is exact to a few bits between -18 and 18.
    x = rng.standard_normal((num_rows, 170), np.float32) * np.float32(0.01)
    gate = drawn(rng, 170, 45, bias=True, block_size=32, numbers="zeros", halves=True)
    up = drawn(rng, 170, 45, block_size=32, numbers="minima")
    (result,) = linear4(170, gate, up).run(None, {"x": x})
    first = product(x, *gate).astype(np.float64)
    second = product(x, *up).astype(np.float64)
    expected = first / (1 + np.exp(-first)) * second
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_the_gelu_of_a_product_is_that_of_the_error_function(linear4: Open) -> None:
    rng = np.random.default_rng(0)
    weights = drawn(rng, 50, 77, bias=True)
    x = rng.standard_normal((20, 50), np.float32)
    x *= np.logspace(-6, -1, 20, dtype=np.float32)[:, None]
    (result,) = linear4(50, weights, gelu=1).run(None, {"x": x})
    exact = product(x, *weights).astype(np.float64)
    expected = exact / 2 * (1 + np.vectorize(math.erf)(exact / math.sqrt(2)))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("block_size", [32, 128])
def test_a_row_does_not_depend_on_its_company_or_on_the_threads(
    linear4: Open, block_size: int
) -> None:
    rng = np.random.default_rng(0)
    x = rows(rng, 300, 200)
    gate, up = (drawn(rng, 200, 301, bias=True, block_size=block_size) for _ in range(2))
    weights = gate, up
    one, two = (linear4(200, *weights, threads=threads) for threads in (1, 2))
    (together,) = one.run(None, {"x": x})
    (threaded,) = two.run(None, {"x": x})
    np.testing.assert_array_equal(threaded, together)
    for start, stop in ((0, 1), (7, 8), (20, 22), (40, 53), (100, 300)):
        (alone,) = two.run(None, {"x": x[start:stop]})
        np.testing.assert_array_equal(alone, together[start:stop])


def test_what_is_not_a_number_stays_in_its_row(linear4: Open) -> None:
    rng = np.random.default_rng(0)
    session = linear4(200, drawn(rng, 200, 40))
    x = rng.standard_normal((5, 200), np.float32)
    (clean,) = session.run(None, {"x": x})
    x[1, 3], x[2, 5], x[3] = np.nan, np.inf, np.nan
    (result,) = session.run(None, {"x": x})
    np.testing.assert_array_equal(result[[0, 4]], clean[[0, 4]])
    assert not np.isfinite(result[2]).any()


def test_errors_are_those_of_rounding(linear4: Open) -> None:
    """Against the product of the same weights with exact inputs."""
    rng = np.random.default_rng(0)
    packed, scale, *_ = drawn(rng, 640, 50)
    x = rng.standard_normal((20, 640), np.float32)
    (result,) = linear4(640, (packed, scale)).run(None, {"x": x})
    weights = np.stack([packed & 15, packed >> 4], axis=-1).reshape(50, 5, 128).astype(np.float64)
    exact = x @ ((weights - 8) * scale[..., None]).reshape(50, 640).T
    assert (result - exact).std() < 0.01 * exact.std()


def test_no_rows(linear4: Open) -> None:
    session = linear4(6, drawn(np.random.default_rng(0), 6, 10))
    (result,) = session.run(None, {"x": np.zeros((0, 6), np.float32)})
    assert result.shape == (0, 10)


WEIGHT, SCALE = np.zeros((4, 2, 16), np.uint8), np.ones((4, 2), np.float32)
BIAS, ZEROS = np.ones(4, np.float32), np.zeros((4, 1), np.uint8)


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ((np.zeros((4, 32), np.uint8), SCALE), {}, "matrix in blocks"),
        ((np.zeros((0, 2, 16), np.uint8), SCALE), {}, "matrix in blocks"),
        ((np.zeros((4, 2, 24), np.uint8), SCALE), {}, "multiple of 32"),
        ((np.zeros((4, 2, 8), np.uint8), SCALE), {}, "multiple of 32"),
        ((np.zeros((4, 2, 32784), np.uint8), SCALE), {}, "more than 65,536"),
        ((np.zeros((4, 1, 16), np.uint8), SCALE[:, :1]), {}, "number of inputs"),
        ((np.zeros((4, 3, 16), np.uint8), SCALE), {}, "number of inputs"),
        ((WEIGHT, SCALE[:3]), {}, "scale of Linear4 does not fit"),
        ((WEIGHT, SCALE, BIAS[:3]), {}, "bias of Linear4 does not fit"),
        ((WEIGHT, SCALE, BIAS, ZEROS[:3]), {}, "zeros of Linear4 do not fit"),
        ((WEIGHT, SCALE, BIAS, None, SCALE[:3]), {}, "minima of Linear4 do not fit"),
        ((WEIGHT, SCALE, BIAS, ZEROS, SCALE), {}, "zeros or minima, not both"),
        ((WEIGHT, SCALE, None, None, None, WEIGHT[:3], SCALE[:3]), {}, "outputs"),
        ((WEIGHT, SCALE, None, None, None, WEIGHT, SCALE), {"gelu": 1}, "no GELU"),
        ((WEIGHT, SCALE), {"constant": False}, "must be constant"),
    ],
)
def test_wrong_weights_are_errors(
    linear4: Open, weights: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        linear4(40, weights, **options)


@pytest.mark.parametrize("num_inputs", [0, -1])
def test_a_number_of_inputs_must_be_positive(linear: Open, num_inputs: int) -> None:
    weights = {"w": WEIGHT, "s": SCALE}
    with pytest.raises(Exception, match="matrix in blocks"):
        linear(40, weights, op_type="Linear4", num_inputs=num_inputs)


@pytest.mark.parametrize("num_columns", [0, 1, 39, 41, 64])
def test_rows_of_a_wrong_size_are_errors(linear: Open, num_columns: int) -> None:
    session = linear("n", {"w": WEIGHT, "s": SCALE}, op_type="Linear4", num_inputs=40)
    with pytest.raises(Exception, match="as many columns"):
        session.run(None, {"x": np.zeros((2, num_columns), np.float32)})
