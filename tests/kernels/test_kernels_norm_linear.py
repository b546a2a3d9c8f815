"""``NormLinear`` and its kin against NumPy: equal to the last bit; and which nodes become one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from maskdial.kernels.fuse import fuse_rms_norms
from maskdial.kernels.graph import Graph, attributes_of
from tests.kernels import test_kernels_linear as int8
from tests.kernels import test_kernels_linear4 as int4
from tests.kernels.conftest import fma

Floats = NDArray[np.float32]
Open = Callable[..., ort.InferenceSession]

ROWS = ("x", "residual", "norm")
EPSILON = np.float32(1e-5)
LANES = 16


def rms_norm(total: Floats, weight: Floats) -> Floats:
    """The norm of each row, float32 in the operator's order: sixteen sums, then their sum."""
    num_rows, size = total.shape
    lanes = np.zeros((num_rows, LANES), np.float32)
    for start in range(0, size, LANES):
        some = total[:, start : start + LANES]
        lanes[:, : some.shape[1]] = fma(some, some, lanes[:, : some.shape[1]])
    squares = np.zeros(num_rows, np.float32)
    for lane in lanes.T:
        squares = squares + lane
    factor = np.float32(1) / np.sqrt(squares / np.float32(size) + EPSILON)
    normed: Floats = total * factor[:, None] * weight
    return normed


def drawn(num_rows: int, size: int) -> dict[str, Floats]:
    rng = np.random.default_rng(size)
    return {
        "x": rng.standard_normal((num_rows, size), np.float32) * np.float32(3),
        "residual": rng.standard_normal((num_rows, size), np.float32) + np.float32(1),
        "norm": rng.standard_normal(size, np.float32),
    }


def opened(linear: Open, kind: str, weights: dict[str, Any], **options: Any) -> Any:
    results = ("sum", "y", "z") if kind == "NormLinears" else ("sum", "y")
    return linear(
        None, weights, op_type=kind, rows=ROWS, results=results, epsilon=float(EPSILON), **options
    )


SHAPES = [(1, 1, 1), (3, 16, 33), (5, 15, 100), (26, 577, 49), (100, 66, 147)]


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), SHAPES)
def test_products_of_norms_are_numpys_to_the_last_bit(
    linear: Open, num_rows: int, num_inputs: int, num_outputs: int, by_row: bool
) -> None:
    feeds = drawn(num_rows, num_inputs)
    rng = np.random.default_rng(num_outputs)
    products, weights = int8.several(rng, num_inputs, (num_outputs, 50))
    step = int8.STEP if by_row else np.float32(0.03)
    total = feeds["x"] + feeds["residual"]
    normed = rms_norm(total, feeds["norm"])
    settings: dict[str, Any] = {"step": float(step), "by_row": int(by_row), "threads": 2}
    several = opened(linear, "NormLinears", weights, **settings)
    first = {name: weights[name] for name in ("w0", "s0", "b0")}
    for session in (several, opened(linear, "NormLinear", first, **settings)):
        found, *results = session.run(None, feeds)
        np.testing.assert_array_equal(found, total)
        for each, result in zip(products, results, strict=False):
            expected = int8.product(normed, *each, step, by_row)
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), SHAPES)
def test_products_of_4_bits_are_numpys_to_the_last_bit(
    linear: Open, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    feeds = drawn(num_rows, num_inputs)
    rng = np.random.default_rng(num_outputs)
    weight = int4.drawn(rng, num_inputs, num_outputs, bias=True, block_size=32, numbers="zeros")
    named = dict(zip(int4.NAMES, weight, strict=False))
    session = opened(linear, "NormLinear4", named, num_inputs=num_inputs, threads=2)
    total, result = session.run(None, feeds)
    np.testing.assert_array_equal(total, feeds["x"] + feeds["residual"])
    np.testing.assert_array_equal(result, int4.product(rms_norm(total, feeds["norm"]), *weight))


def test_a_row_does_not_depend_on_its_company(linear: Open) -> None:
    feeds = drawn(60, 77)
    feeds["x"][33] = np.nan
    weight, scale, _ = int8.drawn(np.random.default_rng(0), 77, 60, bias=False)
    session = opened(linear, "NormLinear", {"w": weight, "s": scale}, step=0.03)
    together = session.run(None, feeds)
    for start, stop in ((0, 1), (32, 33), (34, 60)):
        some = {name: feeds[name][start:stop] for name in ROWS[:2]}
        for alone, result in zip(session.run(None, feeds | some), together, strict=True):
            np.testing.assert_array_equal(alone, result[start:stop])


def test_no_rows(linear: Open) -> None:
    weights = {"w": int8.WEIGHT, "s": int8.SCALE}
    results = opened(linear, "NormLinear", weights, step=0.1).run(None, drawn(0, 8))
    assert [each.shape for each in results] == [(0, 8), (0, 4)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"residual": np.zeros((3, 7), np.float32)}, "residual of NormLinear does not fit"),
        ({"residual": np.zeros((1, 8), np.float32)}, "residual of NormLinear does not fit"),
        ({"norm": np.zeros(7, np.float32)}, "norm of NormLinear does not fit"),
        ({"norm": np.zeros(1, np.float32)}, "norm of NormLinear does not fit"),
        ({"norm": np.zeros(0, np.float32)}, "norm of NormLinear does not fit"),
        ({"x": np.zeros((3, 7), np.float32)}, "as many columns"),
    ],
)
def test_inputs_that_do_not_fit_are_errors(
    linear: Open, change: dict[str, Floats], message: str
) -> None:
    session = opened(linear, "NormLinear", {"w": int8.WEIGHT, "s": int8.SCALE}, step=0.1)
    good = drawn(3, 8)
    session.run(None, good)
    with pytest.raises(Exception, match=message):
        session.run(None, good | change)


ARRAYS = {
    "w": np.ones((8, 8), np.int8),
    "s": np.ones(8, np.float32),
    "norm": np.ones(8, np.float32),
}


def added_norm(inputs: list[str], outputs: list[str]) -> onnx.NodeProto:
    kind = "SkipSimplifiedLayerNormalization"
    return helper.make_node(kind, inputs, outputs, domain="com.microsoft", epsilon=1e-6)


def product(source: str, output: str) -> onnx.NodeProto:
    attributes = {"step": 0.1, "by_row": 0, "transposed": 0, "gelu": 0}
    return helper.make_node("Linear", [source, "w", "s"], [output], domain="maskdial", **attributes)


INPUTS, OUTPUTS = ["h", "x", "norm"], ["normed", "", "", "sum"]


def fused(nodes: list[onnx.NodeProto], *results: str) -> list[onnx.NodeProto]:
    values = [helper.make_tensor_value_info(y, onnx.TensorProto.FLOAT, None) for y in results]
    given = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 8])]
    initializers = [numpy_helper.from_array(array, name) for name, array in ARRAYS.items()]
    graph = helper.make_graph(nodes, "fused", given, values, initializers)
    fuse_rms_norms(Graph(graph))
    return list(graph.node)


@pytest.mark.parametrize("inputs", [INPUTS, ["x", "h", "norm"]])
def test_a_norm_is_fused_with_its_only_product(inputs: list[str]) -> None:
    """At the norm's place, since its sum may be used before the product's."""
    nodes = [
        product("x", "h"),
        added_norm(inputs, OUTPUTS),
        helper.make_node("Relu", ["sum"], ["z"]),
        product("normed", "y"),
    ]
    _, both, relu = fused(nodes, "y", "z")
    assert both.op_type == "NormLinear"
    assert list(both.input) == [*inputs, "w", "s"]
    assert list(both.output) == ["sum", "y"]
    assert attributes_of(both)["epsilon"] == pytest.approx(1e-6)
    assert relu.op_type == "Relu"


@pytest.mark.parametrize(
    ("nodes", "results"),
    [
        ([product("x", "h"), added_norm(INPUTS, OUTPUTS), product("normed", "y")], ["y", "normed"]),
        (
            [
                product("x", "h"),
                added_norm(INPUTS, OUTPUTS),
                product("normed", "y"),
                product("normed", "z"),
            ],
            ["y", "z"],
        ),
        (
            [
                product("x", "h"),
                added_norm(INPUTS, ["normed", "", "statistic", "sum"]),
                product("normed", "y"),
            ],
            ["y", "statistic"],
        ),
        ([product("x", "h"), added_norm(INPUTS, ["normed"]), product("normed", "y")], ["y"]),
        (
            [product("x", "h"), added_norm([*INPUTS, "s"], OUTPUTS), product("normed", "y")],
            ["y"],
        ),
        (
            [
                helper.make_node("Relu", ["x"], ["h"]),
                added_norm(INPUTS, OUTPUTS),
                product("normed", "y"),
            ],
            ["y"],
        ),
        (
            [
                product("x", "h"),
                added_norm(INPUTS, OUTPUTS),
                helper.make_node("Relu", ["normed"], ["y"]),
            ],
            ["y"],
        ),
    ],
    ids=["output", "two", "statistic", "no sum", "bias", "may broadcast", "no product"],
)
def test_other_norms_stay(nodes: list[onnx.NodeProto], results: list[str]) -> None:
    assert fused(nodes, *results) == nodes
