"""``AddNorm`` against NumPy, and the fusions to it and to ``Linear``."""

import itertools
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from maskdial.kernels.fuse import fuse_biases, fuse_norms, fuse_products
from maskdial.kernels.graph import Graph
from maskdial.kernels.installed import Kernels
from tests.kernels.conftest import open_operator

Floats = NDArray[np.float32]


def open_norm(kernels: Kernels, *, bias: bool = True, threads: int = 1) -> Any:
    names = dict.fromkeys(("x", "residual", "weight"), np.float32)
    inputs = {**names, "bias": np.float32 if bias else None}
    return open_operator(kernels.path, "AddNorm", inputs, threads=threads, epsilon=1e-5)


def drawn(rows: int, columns: int) -> dict[str, Floats]:
    rng = np.random.default_rng(columns)
    return {
        "x": rng.standard_normal((rows, columns), np.float32) * np.float32(3),
        "residual": rng.standard_normal((rows, columns), np.float32) + np.float32(5),
        "weight": rng.standard_normal(columns, np.float32),
        "bias": rng.standard_normal(columns, np.float32),
    }


@pytest.mark.parametrize("columns", [1, 7, 15, 16, 17, 40, 768])
@pytest.mark.parametrize("bias", [False, True])
def test_norms_are_numpys(kernels: Kernels, processor: str, columns: int, bias: bool) -> None:
    feeds = drawn(37, columns)
    if not bias:
        del feeds["bias"]
    (result,) = open_norm(kernels, bias=bias, threads=2).run(None, feeds)
    total = feeds["x"].astype(np.float64) + feeds["residual"]
    centered = total - total.mean(axis=1, keepdims=True)
    unit = centered / np.sqrt((centered**2).mean(axis=1, keepdims=True) + 1e-5)
    expected = unit * feeds["weight"] + (feeds["bias"] if bias else 0)
    tolerance = 2e-3 if columns == 1 else 1e-5  # a row of one float is its own mean, nearly
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=tolerance)


def test_rows_and_instruction_sets_and_threads_agree_to_the_last_bit(
    kernels: Kernels, instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feeds = drawn(50, 77)
    results = []
    for name, threads in itertools.product(instruction_sets, (1, 2)):
        monkeypatch.setenv("MASKDIAL_KERNELS_ISA", name)
        session = open_norm(kernels, threads=threads)
        results += session.run(None, feeds)
        row = {name: feeds[name][33:34] for name in ("x", "residual")}
        (alone,) = session.run(None, feeds | row)
        np.testing.assert_array_equal(alone, results[-1][33:34])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"residual": np.zeros((3, 15), np.float32)},
        {"residual": np.zeros((1, 16), np.float32)},
        {"x": np.zeros((2, 16), np.float32)},
        {"weight": np.zeros(15, np.float32)},
        {"bias": np.zeros(17, np.float32)},
        {"bias": np.zeros(0, np.float32)},
        {name: np.zeros((3, 0), np.float32) for name in ("x", "residual")},
        {name: np.zeros((), np.float32) for name in ("x", "residual")},
    ],
)
def test_inputs_that_do_not_fit_are_errors(kernels: Kernels, changes: dict[str, Any]) -> None:
    session, good = open_norm(kernels), drawn(3, 16)
    session.run(None, good)
    with pytest.raises(Exception, match="inputs of AddNorm do not fit"):
        session.run(None, good | changes)


def test_no_rows(kernels: Kernels) -> None:
    (result,) = open_norm(kernels).run(None, drawn(0, 16))
    assert result.shape == (0, 16)


def graph_of(nodes: list[onnx.NodeProto], arrays: dict[str, Any], result: str) -> onnx.GraphProto:
    given = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 8])]
    outputs = [helper.make_tensor_value_info(result, onnx.TensorProto.FLOAT, None)]
    initializers = [numpy_helper.from_array(np.asarray(a), name) for name, a in arrays.items()]
    return helper.make_graph(nodes, "fused", given, outputs, initializers)


def linear(output: str, **attributes: int) -> onnx.NodeProto:
    settings = {"by_row": 1, "transposed": 0, "gelu": 0} | attributes
    return helper.make_node(
        "Linear", ["x", "w", "s"], [output], domain="maskdial", step=1 / 127, **settings
    )


ARRAYS = {
    "w": np.random.default_rng(0).integers(-127, 128, (8, 5)).astype(np.int8),
    "s": np.random.default_rng(1).random(5, np.float32),
    "b": np.random.default_rng(2).standard_normal(5, np.float32),
    "one": np.ones(1, np.float32),
}


def outputs(kernels: Kernels, graph: onnx.GraphProto, x: Floats) -> Floats:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("maskdial", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(kernels.path))
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    result: Floats = session.run(None, {"x": x})[0]
    return result


@pytest.mark.parametrize("order", [["h", "b"], ["b", "h"]])
def test_a_fused_bias_gives_the_same_bits(
    kernels: Kernels, processor: str, order: list[str]
) -> None:
    nodes = [linear("h"), helper.make_node("Add", order, ["y"])]
    graph = graph_of(nodes, ARRAYS, "y")
    x = np.random.default_rng(3).standard_normal((20, 8), np.float32)
    before = outputs(kernels, graph, x)
    fuse_biases(Graph(graph))
    assert [node.op_type for node in graph.node] == ["Linear"]
    np.testing.assert_array_equal(outputs(kernels, graph, x), before)


@pytest.mark.parametrize(
    "nodes",
    [
        [linear("h"), helper.make_node("Add", ["h", "one"], ["y"])],
        [linear("h"), helper.make_node("Sub", ["h", "b"], ["y"])],
        [linear("h", gelu=1), helper.make_node("Add", ["h", "b"], ["y"])],
        [
            linear("h"),
            helper.make_node("Add", ["h", "b"], ["a"]),
            helper.make_node("Mul", ["a", "h"], ["y"]),
        ],
        [linear("h"), linear("i"), helper.make_node("Add", ["h", "i"], ["y"])],
    ],
)
def test_other_sums_stay(nodes: list[onnx.NodeProto]) -> None:
    graph = graph_of(nodes, ARRAYS, "y")
    fuse_biases(Graph(graph))
    assert list(graph.node) == nodes


def test_products_of_the_same_value_become_one_node(kernels: Kernels, processor: str) -> None:
    """But a GELU, and one that is quantized otherwise; a fourth one has no place."""
    nodes = [
        linear("q"),
        linear("gelu", gelu=1),
        linear("k"),
        linear("other", by_row=0),
        linear("v"),
        linear("fourth"),
        linear("apart"),
        helper.make_node("Sum", ["q", "k", "v", "fourth", "apart", "other", "gelu"], ["y"]),
    ]
    nodes[2].input.append("b")
    nodes[6].input[0] = "z"
    copy = helper.make_node("Identity", ["x"], ["z"])
    graph = graph_of([copy, *nodes], ARRAYS, "y")
    x = np.random.default_rng(3).standard_normal((20, 8), np.float32)
    before = outputs(kernels, graph, x)
    fuse_products(Graph(graph))
    kinds = [node.op_type for node in graph.node]
    assert kinds == ["Identity", "Linears", *["Linear"] * 4, "Sum"]
    fused = graph.node[1]
    assert list(fused.input) == ["x", "w", "s", "", "w", "s", "b", "w", "s"]
    assert list(fused.output) == ["q", "k", "v"]
    np.testing.assert_array_equal(outputs(kernels, graph, x), before)


NORM = {"weight": np.ones(5, np.float32), "bias": np.zeros(5, np.float32)}


@pytest.mark.parametrize("rows", [{"h", "i"}, {"h"}])
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("used", [False, True])
def test_a_sum_of_rows_is_fused_with_its_norm(rows: set[str], axis: int, used: bool) -> None:
    nodes = [
        linear("h"),
        linear("i"),
        helper.make_node("Add", ["h", "i"], ["sum"]),
        helper.make_node("LayerNormalization", ["sum", "weight", "bias"], ["norm"], axis=axis),
        helper.make_node("Add", ["norm", "sum" if used else "one"], ["y"]),
    ]
    graph = graph_of(nodes, ARRAYS | NORM, "y")
    fuse_norms(Graph(graph), rows)
    fuses = rows == {"h", "i"} and axis == -1 and not used
    assert ("AddNorm" in {node.op_type for node in graph.node}) == fuses


def test_a_column_that_is_added_to_rows_stays() -> None:
    """It broadcasts, as ``AddNorm`` does not."""
    nodes = [
        linear("h"),
        helper.make_node("MatMul", ["x", "narrow"], ["i"]),
        helper.make_node("Add", ["h", "i"], ["sum"]),
        helper.make_node("LayerNormalization", ["sum", "weight", "bias"], ["y"], axis=-1),
    ]
    arrays = ARRAYS | NORM | {"narrow": np.ones((8, 1), np.float32)}
    graph = graph_of(nodes, arrays, "y")
    fuse_norms(Graph(graph), {"h", "i"})
    assert list(graph.node) == nodes
