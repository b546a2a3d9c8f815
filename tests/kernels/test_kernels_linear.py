"""``Linear`` against NumPy: equal to the last bit in any shape, for any values, in any company."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from maskdial.kernels.installed import Kernels
from tests.kernels.conftest import linear_session

Open = Callable[..., ort.InferenceSession]
Weights = dict[str, NDArray[Any] | None]
Drawn = tuple[NDArray[np.int8], NDArray[np.float32], NDArray[np.float32] | None]

STEP = np.float32(1 / 127)
TINY = np.float32(1e-42)  # a denormal


def quantized(x: NDArray[np.float32], step: np.float32) -> NDArray[np.int64]:
    """As QuantizeLinear rounds, without the zero point."""
    with np.errstate(all="ignore"):
        rounded = np.rint(np.nan_to_num(x / step, nan=-128))
    integers: NDArray[np.int64] = np.clip(rounded, -128, 127).astype(np.int64)
    return integers


def product(
    x: NDArray[np.float32],
    weight: NDArray[np.int8],
    scale: NDArray[np.float32],
    bias: NDArray[np.float32] | None,
    step: np.float32,
    by_row: bool,
) -> NDArray[np.float32]:
    """The operator's product in NumPy: exact integers, then float32 in the same order."""
    peak = np.abs(x).max(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        integers = quantized(x / peak if by_row else x, step) @ weight.astype(np.int64)
    result: NDArray[np.float32] = integers.astype(np.float32) * (step * scale)
    if by_row:
        result *= peak
    return result if bias is None else result + bias


def drawn(rng: np.random.Generator, num_inputs: int, num_outputs: int, *, bias: bool) -> Drawn:
    weight = rng.integers(-127, 128, (num_inputs, num_outputs)).astype(np.int8)
    weight[rng.random(weight.shape) < 0.2] = 127
    scale = rng.random(num_outputs, np.float32) + np.float32(0.01)
    return weight, scale, rng.standard_normal(num_outputs, np.float32) if bias else None


def rows(rng: np.random.Generator, num_rows: int, num_inputs: int) -> NDArray[np.float32]:
    """Normal rows, and some of zeros, of one value, of denormals and of large values."""
    x = rng.standard_normal((num_rows, num_inputs), np.float32)
    x[1::7] = 0
    x[2::7] = -3
    x[3::7] *= TINY
    x[4::7] *= np.float32(1e30)
    x[5::7, 0] = 50
    return x


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs"),
    [
        (1, 1, 1),
        (1, 64, 32),
        (2, 3, 33),
        (5, 5, 31),
        (12, 63, 16),
        (13, 66, 65),
        (17, 129, 1),
        (25, 127, 47),
        (40, 577, 100),
        (3, 1536, 7),
        (97, 50, 49),
        (201, 31, 145),
    ],
)
def test_products_are_numpys_to_the_last_bit(
    linear: Open, num_rows: int, num_inputs: int, num_outputs: int, by_row: bool
) -> None:
    rng = np.random.default_rng(num_rows * num_inputs)
    x = rows(rng, num_rows, num_inputs)
    step = STEP if by_row else np.float32(0.03)
    for bias in (False, True):
        weight, scale, biases = drawn(rng, num_inputs, num_outputs, bias=bias)
        expected = product(x, weight, scale, biases, step, by_row)
        for transposed in (False, True):
            stored = np.ascontiguousarray(weight.T) if transposed else weight
            session = linear(
                num_inputs,
                {"w": stored, "s": scale, "b": biases},
                step=float(step),
                by_row=int(by_row),
                transposed=int(transposed),
            )
            (result,) = session.run(None, {"x": x})
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("step", [1 / 127, 1 / 63, 0.0123, 2.0**-61, 1e25])
def test_rows_are_quantized_as_by_division(linear: Open, step: float) -> None:
    """Also where a quotient is nearly halfway between two integers, or two floats."""
    rng, size = np.random.default_rng(0), 64
    x = rng.standard_normal((6000, size), np.float32)
    halves = (rng.integers(-127, 127, x.shape) + 0.5) * np.float32(step)
    x[::3] = halves[::3].astype(np.float32)
    x[1::3] = np.nextafter(halves[1::3].astype(np.float32), np.float32(0))
    peaks = np.ldexp(rng.uniform(1, 2, len(x)), rng.integers(-80, 80, len(x))).astype(np.float32)
    # All bits of every other one's fraction are set.
    peaks[::2] = np.nextafter(np.exp2(np.floor(np.log2(peaks[::2]))), np.float32(0))
    x = np.clip(x, -1, 1) * peaks[:, None]
    x[:, 0] = peaks
    weight, scale = np.eye(size, dtype=np.int8), np.ones(size, np.float32)
    for by_row in (True, False):
        if not by_row:
            x[7, :3] = np.inf, -np.inf, np.nan
        session = linear(size, {"w": weight, "s": scale}, step=step, by_row=int(by_row))
        (result,) = session.run(None, {"x": x})
        expected = product(x, weight, scale, None, np.float32(step), by_row=by_row)
        np.testing.assert_array_equal(result, expected)


def test_largest_products_do_not_saturate(linear: Open) -> None:
    for sign in (1, -1):
        weight = np.full((2048, 40), sign * 127, np.int8)
        scale = np.ones(40, np.float32)
        session = linear(2048, {"w": weight, "s": scale}, step=1.0)
        (result,) = session.run(None, {"x": np.full((3, 2048), -1000, np.float32)})
        np.testing.assert_array_equal(result, np.float32(-128 * 127 * sign * 2048))


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("num_rows", [1, 14, 30])
def test_gated_products_are_silu_times_up(linear: Open, num_rows: int, by_row: bool) -> None:
    rng = np.random.default_rng(num_rows)
    x = rng.standard_normal((num_rows, 70), np.float32)
    # ONNX Runtime's Sigmoid, which this repeats, is exact to a few bits between -18 and 18.
    x *= np.float32(0.002)
    gate, up = drawn(rng, 70, 45, bias=True), drawn(rng, 70, 45, bias=False)
    names = ("w", "s", "b", "up_w", "up_s", "up_b")
    step = STEP if by_row else np.float32(1e-4)
    session = linear(
        70,
        dict(zip(names, (*gate, *up), strict=True)),
        step=float(step),
        by_row=int(by_row),
    )
    (result,) = session.run(None, {"x": x})
    first = product(x, *gate, step, by_row).astype(np.float64)
    second = product(x, *up, step, by_row).astype(np.float64)
    expected = first / (1 + np.exp(-first)) * second
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_the_gelu_of_a_product_is_that_of_the_error_function(linear: Open) -> None:
    rng = np.random.default_rng(0)
    weight, scale, bias = drawn(rng, 50, 77, bias=True)
    x = (
        rng.standard_normal((20, 50), np.float32)
        * np.logspace(-6, 1, 20, dtype=np.float32)[:, None]
    )
    step, scale = STEP, scale * np.float32(0.01)
    session = linear(50, {"w": weight, "s": scale, "b": bias}, step=float(step), by_row=1, gelu=1)
    (result,) = session.run(None, {"x": x})
    exact = product(x, weight, scale, bias, step, by_row=True).astype(np.float64)
    expected = exact / 2 * (1 + np.vectorize(math.erf)(exact / math.sqrt(2)))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=2e-6)


def several(
    rng: np.random.Generator, num_inputs: int, sizes: tuple[int, ...]
) -> tuple[list[Drawn], Weights]:
    """Products of one size each, every other one with a bias, and the operator's inputs."""
    products = [drawn(rng, num_inputs, size, bias=i % 2 == 0) for i, size in enumerate(sizes)]
    names = ("w", "s", "b")
    return products, {
        f"{name}{i}": array
        for i, each in enumerate(products)
        for name, array in zip(names, each, strict=True)
    }


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "sizes"),
    [
        (1, 1, (1, 1)),
        (3, 64, (48, 48, 48)),
        (13, 66, (65, 1, 47)),
        (25, 127, (1, 100)),
        (200, 31, (50, 49, 145)),
    ],
)
def test_several_products_of_the_same_rows_are_numpys(
    linear: Open, num_rows: int, num_inputs: int, sizes: tuple[int, ...], by_row: bool
) -> None:
    rng = np.random.default_rng(num_rows)
    x = rows(rng, num_rows, num_inputs)
    products, weights = several(rng, num_inputs, sizes)
    step = STEP if by_row else np.float32(0.03)
    session = linear(
        num_inputs,
        weights,
        op_type="Linears",
        results=("q", "k", "v")[: len(sizes)],
        threads=2,
        step=float(step),
        by_row=int(by_row),
    )
    results = session.run(None, {"x": x})
    for each, result in zip(products, results, strict=True):
        np.testing.assert_array_equal(result, product(x, *each, step, by_row))
    for start, stop in ((0, 1), (num_rows // 2, num_rows)):
        alone = session.run(None, {"x": x[start:stop]})
        for result, one in zip(results, alone, strict=True):
            np.testing.assert_array_equal(one, result[start:stop])


def test_several_products_of_no_rows(linear: Open) -> None:
    _, weights = several(np.random.default_rng(0), 6, (10, 3))
    session = linear("n", weights, op_type="Linears", results=("q", "k"), step=0.1)
    results = session.run(None, {"x": np.zeros((0, 6), np.float32)})
    assert [each.shape for each in results] == [(0, 10), (0, 3)]


@pytest.mark.parametrize(
    ("change", "gelu", "message"),
    [
        ({"w1": np.ones((5, 3), np.int8)}, 0, "different numbers of inputs"),
        ({"s1": np.ones(2, np.float32)}, 0, "scale of Linear does not fit"),
        ({}, 1, "no GELU"),
    ],
)
def test_several_products_that_do_not_fit_are_errors(
    linear: Open, change: Weights, gelu: int, message: str
) -> None:
    _, weights = several(np.random.default_rng(0), 6, (10, 3))
    with pytest.raises(Exception, match=message):
        linear(6, weights | change, op_type="Linears", results=("q", "k"), step=0.1, gelu=gelu)


def test_weights_larger_than_a_region_of_memory(kernels: Kernels) -> None:
    """Weights of all sizes share regions of 64 MB; larger ones have their own."""
    num_inputs, num_outputs = 65536, 1100
    weight = np.ones((num_inputs, num_outputs), np.int8)
    scale = np.ones(num_outputs, np.float32)
    small: Weights = {"w": WEIGHT, "s": SCALE}
    sessions = [
        linear_session(kernels.path, 8, small, **PLAIN),
        linear_session(kernels.path, num_inputs, {"w": weight, "s": scale}, step=1.0),
        linear_session(kernels.path, 8, small, **PLAIN),
    ]
    (result,) = sessions[1].run(None, {"x": np.full((2, num_inputs), 3, np.float32)})
    np.testing.assert_array_equal(result, np.float32(3 * num_inputs))
    x = np.random.default_rng(0).standard_normal((2, 8), np.float32)
    before, after = (session.run(None, {"x": x})[0] for session in sessions[::2])
    del sessions[:2]
    np.testing.assert_array_equal(after, before)
    np.testing.assert_array_equal(sessions[0].run(None, {"x": x})[0], before)


def test_a_row_does_not_depend_on_its_company_or_on_the_threads(linear: Open) -> None:
    rng = np.random.default_rng(0)
    x = rows(rng, 300, 200)
    gate, up = drawn(rng, 200, 301, bias=True), drawn(rng, 200, 301, bias=True)
    weights = dict(zip(("w", "s", "b", "up_w", "up_s", "up_b"), (*gate, *up), strict=True))
    attributes = {"step": float(STEP), "by_row": 1}
    one = linear(200, weights, threads=1, **attributes)
    two = linear(200, weights, threads=2, **attributes)
    (together,) = one.run(None, {"x": x})
    (threaded,) = two.run(None, {"x": x})
    np.testing.assert_array_equal(threaded, together)
    for start, stop in ((0, 1), (7, 8), (40, 53), (100, 300)):
        (alone,) = two.run(None, {"x": x[start:stop]})
        np.testing.assert_array_equal(alone, together[start:stop])


def test_what_is_not_a_number_stays_in_its_row(linear: Open) -> None:
    rng = np.random.default_rng(0)
    weight, scale, _ = drawn(rng, 20, 40, bias=False)
    session = linear(20, {"w": weight, "s": scale}, step=float(STEP), by_row=1)
    x = rng.standard_normal((4, 20), np.float32)
    (clean,) = session.run(None, {"x": x})
    x[1, 3], x[2, 5] = np.nan, np.inf
    (result,) = session.run(None, {"x": x})
    np.testing.assert_array_equal(result[[0, 3]], clean[[0, 3]])


def test_no_rows_and_more_dimensions(linear: Open) -> None:
    rng = np.random.default_rng(0)
    weight, scale, _ = drawn(rng, 6, 10, bias=False)
    session = linear("n", {"w": weight, "s": scale}, step=0.1)
    (result,) = session.run(None, {"x": np.zeros((0, 6), np.float32)})
    assert result.shape == (0, 10)


WEIGHT, SCALE = np.ones((8, 4), np.int8), np.ones(4, np.float32)
PLAIN: dict[str, Any] = {"step": 0.1}


@pytest.mark.parametrize(
    ("weights", "attributes", "message"),
    [
        ({"w": np.full((8, 4), -128, np.int8), "s": SCALE}, {}, "-128"),
        ({"w": np.ones((8, 0), np.int8), "s": np.ones(0, np.float32)}, {}, "must be a matrix"),
        ({"w": np.ones(8, np.int8), "s": SCALE}, {}, "must be a matrix"),
        ({"w": WEIGHT, "s": SCALE[:3]}, {}, "scale of Linear does not fit"),
        ({"w": WEIGHT, "s": SCALE, "b": SCALE[:3]}, {}, "bias of Linear does not fit"),
        ({"w": WEIGHT, "s": SCALE, "b": None, "u": WEIGHT[:7], "t": SCALE}, {}, "of inputs"),
        ({"w": WEIGHT, "s": SCALE, "b": None, "u": WEIGHT[:, :3], "t": SCALE[:3]}, {}, "outputs"),
        ({"w": WEIGHT, "s": SCALE, "b": None, "u": WEIGHT, "t": SCALE}, {"gelu": 1}, "no GELU"),
        ({"w": WEIGHT, "s": SCALE}, {"step": 0.0}, "step of Linear must be positive"),
        ({"w": WEIGHT, "s": SCALE}, {"step": float("nan")}, "step of Linear must be positive"),
    ],
)
def test_wrong_weights_are_errors(
    linear: Open, weights: Weights, attributes: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        linear(8, weights, **PLAIN | attributes)


def test_weights_must_be_constant(linear: Open) -> None:
    with pytest.raises(Exception, match="must be constant"):
        linear(8, {"w": WEIGHT, "s": SCALE}, constant=False, **PLAIN)


@pytest.mark.parametrize("num_columns", [0, 1, 7, 9, 16])
def test_rows_of_a_wrong_size_are_errors(linear: Open, num_columns: int) -> None:
    session = linear("n", {"w": WEIGHT, "s": SCALE}, **PLAIN)
    with pytest.raises(Exception, match="as many columns"):
        session.run(None, {"x": np.zeros((2, num_columns), np.float32)})
