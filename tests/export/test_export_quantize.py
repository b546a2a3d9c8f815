"""Quantized products: accuracy, batch invariance, and what stays unchanged."""

from collections import Counter
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from maskdial_export.quantize.blocks import to_bytes
from maskdial_export.quantize.int4 import INT4
from maskdial_export.quantize.quantize import quantize
from maskdial_export.quantize.sensitivity import int4_weight

Floats = NDArray[np.float32]
INPUTS = 200  # no multiple of a block
GENERATOR = np.random.default_rng(11)


def draw(*shape: int) -> Floats:
    return GENERATOR.normal(size=shape).astype(np.float32)


def initializer(name: str, array: NDArray[Any]) -> ir.Value:
    return ir.Value(name=name, const_value=ir.tensor(array, name=name))


def product(
    source: ir.Value, name: str, weight: NDArray[Any], op_type: str = "MatMul", **kwargs: Any
) -> tuple[ir.Node, list[ir.Value]]:
    """A node that multiplies by a weight (and adds a ``bias``), as the exporter names it."""
    bias = kwargs.pop("bias", None)
    constants = [initializer(f"{name}.weight", weight)]
    if bias is not None:
        constants.append(initializer(f"{name}.bias", bias))
    node = ir.node(op_type, [source, *constants], kwargs, metadata_props={"maskdial.modules": name})
    return node, constants


class Graph:
    """Products of one input ``x``, (num_rows, 200), each with a named output."""

    def __init__(self, dtype: ir.DataType = ir.DataType.FLOAT) -> None:
        self.dtype = dtype
        self.x = ir.Value(name="x", shape=ir.Shape(["rows", INPUTS]), type=ir.TensorType(dtype))
        self.nodes: list[ir.Node] = []
        self.initializers: list[ir.Value] = []
        self.outputs: list[ir.Value] = []

    def multiply(self, name: str, weight: NDArray[Any], **kwargs: Any) -> ir.Value:
        node, constants = product(self.x, name, weight, **kwargs)
        self.nodes.append(node)
        self.initializers += constants
        return node.outputs[0]

    def add(self, value: ir.Value, bias: Floats) -> ir.Value:
        constant = initializer(f"bias.{len(self.initializers)}", bias)
        node = ir.node("Add", [constant, value])
        self.nodes.append(node)
        self.initializers.append(constant)
        return node.outputs[0]

    def give(self, name: str, value: ir.Value) -> None:
        value.name, value.type = name, ir.TensorType(self.dtype)
        value.shape = ir.Shape(["rows", None])
        self.outputs.append(value)

    def model(self) -> ir.Model:
        graph = ir.Graph(
            [self.x],
            self.outputs,
            nodes=self.nodes,
            initializers=self.initializers,
            opset_imports={"": 20, "com.microsoft": 1},
        )
        return ir.Model(graph, ir_version=10)


def run(model: ir.Model, rows: Floats) -> list[Floats]:
    graph = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    outputs: list[Floats] = session.run(None, {"x": rows})
    return outputs


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def relative_error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def one_product(weight: Floats, **kwargs: Any) -> ir.Model:
    graph = Graph()
    graph.give("y", graph.multiply("layer", weight, **kwargs))
    return graph.model()


@pytest.mark.parametrize(
    ("precision", "least", "most"), [("int8", 1e-3, 0.02), ("int4", 0.02, 0.15)]
)
def test_a_product_keeps_its_value(precision: Any, least: float, most: float) -> None:
    weight, rows = draw(INPUTS, 48), draw(9, INPUTS)
    (actual,) = run(quantize(one_product(weight), precision), rows)
    assert least < relative_error(actual, rows @ weight) < most


def test_int8_has_a_scale_for_each_row_and_32_inputs() -> None:
    """One input a thousand times as large as the others costs those of its block alone."""
    weight, rows = draw(INPUTS, 48), draw(9, INPUTS)
    rows[:, 40] *= 1000
    weight[40] = 0  # the others are what is left
    model = quantize(one_product(weight), "int8")
    assert operators(model) == Counter(MatMulNBits=1)
    (actual,) = run(model, rows)
    (by_row,) = run(quantize(one_product(weight), "int8", by_row=True), rows)
    expected = np.zeros((9, 48))
    for start in range(0, INPUTS, 32):
        row, part = rows[:, start : start + 32], weight[start : start + 32]
        step = np.abs(row).max(axis=1, keepdims=True).astype(np.float64) / 127
        exact = np.abs(part).max(axis=0) / np.float32(127)
        scale = exact.astype(np.float16).astype(np.float64)
        expected += np.rint(row / step) * step @ (np.rint(part / scale).clip(-127, 127) * scale)
    np.testing.assert_allclose(actual, expected, atol=2e-3 * np.abs(expected).max())
    exact = rows @ weight
    assert relative_error(by_row, exact) > 2 * relative_error(actual, exact) > 0.01


def test_scales_of_blocks_are_numbers_of_16_bits_down_to_small_ones() -> None:
    weight = draw(64, 3)
    weight[:32, 0] = 0
    weight[32:, 1] *= 1e-9
    weight[32:, 2] *= 2e-4
    blocks = to_bytes(weight)
    assert blocks.bits == 8
    assert blocks.integers.shape == (3, 2, 32)
    assert ((blocks.integers >= 1) & (blocks.integers <= 255)).all()
    found = np.ones((3, 2), bool)
    found[1, 1] = False
    halves = blocks.scale.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(halves == blocks.scale, found)
    step = np.abs(weight).reshape(2, 32, 3).max(axis=1).repeat(32, axis=0) / 127
    assert (np.abs(blocks.weight() - weight) <= 0.51 * step + 1e-12).all()


def test_small_blocks_keep_their_largest_weights() -> None:
    """Their scales have few of 16 bits, which are rounded up where that would cut a weight."""
    weight = draw(32, 500)
    peaks = np.geomspace(1.3e-4, 0.01, 500).astype(np.float32)
    weight *= peaks / np.abs(weight).max(axis=0)
    blocks = to_bytes(weight)
    np.testing.assert_array_equal(blocks.scale.astype(np.float16), blocks.scale)
    assert (np.abs(blocks.weight() - weight) <= 0.53 * peaks / 127).all()


@pytest.mark.usefixtures("exact_products")
def test_int8_by_row_is_the_integer_product() -> None:
    weight, rows = draw(INPUTS, 48), draw(9, INPUTS) * 10.0 ** np.arange(-4, 5)[:, None]
    rows = rows.astype(np.float32)
    (actual,) = run(quantize(one_product(weight), "int8", by_row=True), rows)
    peaks = np.abs(rows).max(axis=1, keepdims=True).astype(np.float64)
    scale = np.abs(weight).max(axis=0).astype(np.float64) / 127
    integers = np.rint(rows / peaks * 127) @ np.rint(weight / scale)
    # a value that lies between two integers may be rounded to either
    assert actual == pytest.approx(integers * scale * peaks / 127, rel=1e-2, abs=0)


def test_int8_products_by_row_are_batch_invariant() -> None:
    model = quantize(one_product(draw(INPUTS, 48)), "int8", by_row=True)
    rows = draw(33, INPUTS) * np.geomspace(1e-6, 1e6, 33, dtype=np.float32)[:, None]
    (together,) = run(model, rows)
    for index in range(len(rows)):
        (alone,) = run(model, rows[index : index + 1])
        assert np.array_equal(alone[0], together[index])


@pytest.mark.parametrize("by_row", [False, True])
def test_a_row_of_zeros_stays_one(by_row: bool) -> None:
    rows = np.zeros((3, INPUTS), np.float32)
    rows[1] = 1.0
    (actual,) = run(quantize(one_product(draw(INPUTS, 48)), "int8", by_row=by_row), rows)
    assert np.array_equal(actual[[0, 2]], np.zeros((2, 48), np.float32))
    assert np.isfinite(actual).all()
    assert actual[1].any()


def test_projections_of_one_input_share_its_quantization() -> None:
    graph = Graph()
    for name in ("query", "key", "value"):
        graph.give(name, graph.multiply(name, draw(INPUTS, 32)))
    found = operators(quantize(graph.model(), "int8", by_row=True))
    assert found["MatMulIntegerToFloat"] == 3
    assert found["QuantizeLinear"] == found["ReduceMax"] == found["Div"] == 1


@pytest.mark.parametrize(
    ("precision", "by_row"), [("int8", False), ("int8", True), ("int4", False)]
)
def test_biases_are_added(precision: Any, by_row: bool) -> None:
    weight, bias, rows = draw(INPUTS, 48), 100 * draw(48), draw(9, INPUTS)
    graph = Graph()
    graph.give("y", graph.add(graph.multiply("layer", weight), bias))
    gemm = one_product(weight.T.copy(), op_type="Gemm", transB=1, alpha=1.0, beta=1.0, bias=bias)
    expected = rows @ weight + bias
    for model in (graph.model(), gemm):
        (actual,) = run(quantize(model, precision, by_row=by_row), rows)
        assert np.abs(actual - expected).max() < 0.5 * np.abs(rows @ weight).max()
        assert relative_error(actual - bias, rows @ weight) < 0.2


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_factor_of_a_product(precision: Any) -> None:
    weight, bias, rows = draw(INPUTS, 48), draw(48), draw(9, INPUTS)
    scaled = one_product(weight, op_type="Gemm", alpha=0.25, bias=bias)
    (actual,) = run(quantize(scaled, precision), rows)
    (plain,) = run(quantize(one_product(weight), precision), rows)
    assert actual == pytest.approx(0.25 * plain + bias, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_kept_products_are_unchanged(precision: Any) -> None:
    graph = Graph()
    weight = draw(INPUTS, 48)
    graph.give("kept", graph.multiply("kept", weight))
    graph.give("packed", graph.multiply("query,kept,value", weight))
    graph.give("small", graph.multiply("head", draw(INPUTS, 3)))
    scaled = graph.multiply("scaled", weight, op_type="Gemm", beta=0.5, bias=draw(48))
    graph.give("scaled", scaled)
    graph.give("quantized", graph.multiply("other", weight))
    model = quantize(graph.model(), precision, ["kept"])
    assert operators(model)["MatMul"] == 3
    assert operators(model)["Gemm"] == 1
    rows = draw(5, INPUTS)
    kept, packed, _small, _scaled, quantized = run(model, rows)
    assert np.array_equal(kept, packed)
    assert kept == pytest.approx(rows @ weight, rel=1e-4, abs=1e-4)
    assert not np.array_equal(quantized, kept)


def test_int4_in_a_graph_of_float16() -> None:
    """Only the weights are rounded; bias and factor are applied in float16."""
    weight, bias, rows = draw(INPUTS, 48), draw(48).astype(np.float16), draw(9, INPUTS)
    rows = rows.astype(np.float16)
    graph = Graph(ir.DataType.FLOAT16)
    halves = weight.astype(np.float16)
    graph.give("y", graph.multiply("layer", halves, op_type="Gemm", alpha=0.5, bias=bias))
    graph.give("kept", graph.multiply("kept", halves))
    model = quantize(graph.model(), "int4-fp16", ["kept"])
    assert weights(model) == {
        (INPUTS, 48): np.float16,
        (48, 4, 32): np.uint8,  # four blocks of 64, two values a byte
        (48, 4): np.float16,
    }
    actual, kept = run(model, rows)
    assert actual.dtype == np.float16
    assert kept == pytest.approx(rows.astype(np.float32) @ halves.astype(np.float32), abs=0.05)
    rounded = int4_weight(INT4["int4-fp16"], torch.from_numpy(halves.astype(np.float32))).numpy()
    expected = 0.5 * rows.astype(np.float32) @ rounded + bias
    assert actual == pytest.approx(expected, abs=0.02)
    error = relative_error(actual - bias, 0.5 * rows.astype(np.float32) @ weight)
    assert 0.02 < error < 0.15


def test_a_block_too_small_for_a_float16_scale() -> None:
    weight = draw(INPUTS, 48)
    weight[:64] *= 1e-9
    graph = Graph(ir.DataType.FLOAT16)
    graph.give("y", graph.multiply("layer", weight.astype(np.float16)))
    (actual,) = run(quantize(graph.model(), "int4-fp16"), np.ones((2, INPUTS), np.float16))
    assert np.isfinite(actual).all()
    assert relative_error(actual, np.ones((2, INPUTS), np.float32) @ weight) < 0.15


def weights(model: ir.Model) -> dict[tuple[int, ...], np.dtype[Any]]:
    """The types of a graph's constants, by their shapes."""
    tensors = [value.const_value for value in model.graph.initializers.values()]
    arrays = [tensor.numpy() for tensor in tensors if tensor is not None]
    return {array.shape: array.dtype for array in arrays if array.ndim > 1}


def test_weights_shrink() -> None:
    by_row = weights(quantize(one_product(draw(INPUTS, 48)), "int8", by_row=True))
    assert by_row == {(INPUTS, 48): np.int8}
    # seven blocks of 32
    int8 = weights(quantize(one_product(draw(INPUTS, 48)), "int8"))
    assert int8 == {(48, 7, 32): np.uint8, (48, 7): np.float32}
    # seven blocks of 32, two values a byte, and two zeros
    int4 = weights(quantize(one_product(draw(INPUTS, 48)), "int4"))
    assert int4 == {(48, 7, 16): np.uint8, (48, 7): np.float32, (48, 4): np.uint8}
