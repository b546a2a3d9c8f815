"""The operators of quantized products.

``MatMulNBits`` multiplies by a matrix in blocks, and rounds each block of a row to 8 bits itself.
``MatMulIntegerToFloat`` multiplies rows that have one scale each, rounded by operators before it.
Both are specified in onnxruntime's docs/ContribOperators.md.
"""

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from maskdial.bundle.manifest import BLOCK_SUMS
from maskdial_export.quantize.blocks import BYTE_ZERO, NIBBLE_CENTER, Blocks
from maskdial_export.quantize.int4 import Int4
from maskdial_export.quantize.table import LARGEST, to_int8
from maskdial_export.tracing.rewrite import add_initializer, modules_of

_ZERO_POINT = 128


class RowProducts:
    """Builds products of rows with one scale each; projections of one input share its rows."""

    def __init__(self, largest_weight: int) -> None:
        self._largest_weight = largest_weight
        self._rows: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}

    def project(self, graph: ir.Graph, node: ir.Node, weight: NDArray[np.float32]) -> ir.Value:
        """Inserts the quantized product before ``node``; returns its result."""
        source = node.inputs[0]
        assert source is not None
        if source not in self._rows:
            self._rows[source] = self._quantize_rows(graph, node, source)
        quantized, peak = self._rows[source]
        name = ",".join(modules_of(node))
        integers, scale = to_int8(weight, 0, self._largest_weight)
        inputs = [
            quantized,
            add_initializer(graph, f"{name}.int8", integers),
            self._step(graph),
            add_initializer(graph, f"{name}.scale", scale[0]),
            self._zero_point(graph),
        ]
        product = ir.node("MatMulIntegerToFloat", inputs, domain="com.microsoft")
        scaled = ir.node("Mul", [product.outputs[0], peak])
        graph.insert_before(node, [product, scaled])
        return scaled.outputs[0]

    def _quantize_rows(
        self, graph: ir.Graph, node: ir.Node, source: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """A value as uint8 rows, divided by each row's largest magnitude, and that magnitude.

        A row of zeros becomes 0/0, which quantizes to an arbitrary integer; the product is then
        multiplied by a magnitude of 0, which gives the right result.
        """
        # For no rows at all, ONNX Runtime 1.31 reduces nothing along an axis of -1. Experts that no
        # token has chosen have none.
        name, axis = "int8.axes", -1
        if source.shape is not None and source.shape.rank() == 2:
            name, axis = "int8.axes_of_matrices", 1
        axes = add_initializer(graph, name, np.array([axis]))
        magnitude = ir.node("Abs", [source])
        magnitude.outputs[0].shape, magnitude.outputs[0].type = source.shape, source.type
        peak = ir.node("ReduceMax", [magnitude.outputs[0], axes], {"keepdims": 1})
        unit = ir.node("Div", [source, peak.outputs[0]])
        rows = ir.node(
            "QuantizeLinear", [unit.outputs[0], self._step(graph), self._zero_point(graph)]
        )
        graph.insert_before(node, [magnitude, peak, unit, rows])
        return rows.outputs[0], peak.outputs[0]

    @staticmethod
    def _step(graph: ir.Graph) -> ir.Value:
        return add_initializer(graph, "int8.step", np.array(1 / LARGEST, np.float32))

    @staticmethod
    def _zero_point(graph: ir.Graph) -> ir.Value:
        return add_initializer(graph, "int8.zero_point", np.array(_ZERO_POINT, np.uint8))


def project_blocks(graph: ir.Graph, node: ir.Node, blocks: Blocks, kind: Int4) -> ir.Value:
    """Inserts the product with a matrix in blocks before ``node``; returns its result."""
    name = ",".join(modules_of(node))
    num_outputs, num_blocks, size = blocks.integers.shape
    nibbles = blocks.bits == 4
    integers = _pairs(blocks.integers) if nibbles else blocks.integers
    scale = add_initializer(graph, f"{name}.scale", blocks.scale.astype(kind.dtype))
    inputs = [node.inputs[0], add_initializer(graph, f"{name}.int{blocks.bits}", integers), scale]
    less = None
    if blocks.minimum is not None:
        less, zeros = _centered(graph, node, name, blocks, scale)
        inputs += filter(None, [zeros])
    elif nibbles and kind.zeros:
        inputs.append(add_initializer(graph, f"{name}.zero", _pairs(blocks.zero)))
    attributes = {
        "K": blocks.num_inputs,
        "N": num_outputs,
        "bits": blocks.bits,
        "block_size": size,
        "accuracy_level": kind.accuracy_level,
    }
    product = ir.node("MatMulNBits", inputs, attributes, domain="com.microsoft")
    graph.insert_before(node, [product])
    if less is None:
        return product.outputs[0]
    # Less the sum of each block's inputs times its minimum
    members = np.repeat(np.eye(num_blocks, dtype=np.float32), size, axis=0)[: blocks.num_inputs]
    of_sums = add_initializer(graph, f"{BLOCK_SUMS}{size}.{blocks.num_inputs}", members)
    sums = ir.node("MatMul", [node.inputs[0], of_sums])
    least = ir.node("MatMul", [sums.outputs[0], less])
    difference = ir.node("Sub", [product.outputs[0], least.outputs[0]])
    graph.insert_before(node, [sums, least, difference])
    return difference.outputs[0]


def _centered(
    graph: ir.Graph, node: ir.Node, name: str, blocks: Blocks, scale: ir.Value
) -> tuple[ir.Value, ir.Value | None]:
    """What is subtracted of a matrix with minima whose integers are centered, and their zeros.

    ONNX Runtime multiplies the integers by rounded inputs and the minima by the sums of inputs as
    they are. An input's rounding error then counts as often as its integer less the zero: from 0
    on, that is five times the error of the product; around the middle, about the product's own.
    The file's minima are stored. ONNX Runtime takes the zeros' share off when it loads the graph;
    the server's kernels need not, which round the sums as well.

    Returns:
        float32 (num_blocks, outputs), and uint8 (outputs, num_blocks), None for nibbles, which have
        a zero of 8 by themselves.
    """
    assert blocks.minimum is not None, "a matrix with minima"
    minima = add_initializer(graph, f"{name}.minimum", blocks.minimum.T.copy())
    zeros = None
    if blocks.bits == 4:
        center = add_initializer(graph, "int4.center", np.array(NIBBLE_CENTER, np.float32))
    else:
        assert blocks.center is not None, "integers of 8 bits have a center beside minima"
        center = add_initializer(graph, f"{name}.center", blocks.center.astype(np.float32)[None])
        row = add_initializer(graph, f"{name}.zero", (blocks.center + BYTE_ZERO)[:, None])
        sizes = np.array(blocks.scale.shape)
        shape = add_initializer(graph, f"int8.shape.{sizes[0]}.{sizes[1]}", sizes)
        expanded = ir.node("Expand", [row, shape])
        graph.insert_before(node, [expanded])
        zeros = expanded.outputs[0]
    transposed = ir.node("Transpose", [scale], {"perm": [1, 0]})
    share = ir.node("Mul", [transposed.outputs[0], center])
    less = ir.node("Sub", [minima, share.outputs[0]])
    graph.insert_before(node, [transposed, share, less])
    return less.outputs[0], zeros


def _pairs(integers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Integers of 4 bits (..., size) as bytes (..., ceil(size / 2)), the first one low."""
    odd = [(0, 0)] * (integers.ndim - 1) + [(0, integers.shape[-1] % 2)]
    padded = np.pad(integers, odd)
    return (padded[..., 0::2] | padded[..., 1::2] << 4).astype(np.uint8)
