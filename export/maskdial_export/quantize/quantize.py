"""Quantized projections: integer matrix products instead of ``MatMul``.

* ``int8`` is W8A8: weights int8 with one scale per output channel, activations uint8 with one scale
  per row, computed at run time, or a fixed scale from calibration. Projections of one input share
  its quantization. Integer products are exact and every other operator works row by row, so a
  row's result is batch-invariant.
* ``int4`` stores weights as 4-bit integers in blocks of 32 with a scale and a zero each
  (``MatMulNBits``, which quantizes activations itself; `maskdial_export.quantize.int4`), and some
  layers as int8. ONNX Runtime has a separate kernel for one row, which on some processors gives
  other last bits; the server's own kernels do not.
* Integers of a GGUF file are kept, with int4 and int8: those of 4 bits in blocks of 32, others as
  8-bit integers in blocks of 16 or 32 (`maskdial_export.quantize.stored`).
* ``int4-fp16`` is W4A16, for CUDA: 4-bit integers in blocks of 64 in a float16 graph. The rows of
  some models, such as a 135M Llama's 576 columns, are no multiple of 128, and CUDA's product of
  several rows (``ep.cuda.fpa_intb_gemm``) needs whole blocks.

The embedding table is int8 with int8 and int4 (`maskdial_export.quantize.table`), float16 with
int4-fp16.

Both operators are specified in onnxruntime's docs/ContribOperators.md.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common as passes
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from maskdial.bundle.manifest import BLOCK_SUMS
from maskdial_export.quantize.int4 import (
    BYTE_ZERO,
    INT4,
    NIBBLE_CENTER,
    Blocks,
    Int4,
    to_blocks,
)
from maskdial_export.quantize.table import LARGEST, quantize_table, to_int8
from maskdial_export.tracing.rewrite import (
    PRODUCTS,
    add_initializer,
    constant,
    modules_of,
    replace_value,
)

Precision = Literal["int8", "int4", "int4-fp16"]

HALF = frozenset({"fp16", "int4-fp16"})
"""Precisions whose activations and KV cache are float16."""

Find = Callable[[Sequence[str], NDArray[np.float32]], Blocks | None]

_REDUCED = 63
_ZERO_POINT = 128
# A head with few labels takes no time, and its error matters most.
_MIN_OUTPUTS = 16


def projections(model: PreTrainedModel) -> list[str]:
    """The names of modules whose products can be quantized, in the model's order."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and _num_outputs(module) >= _MIN_OUTPUTS
    ]


def _num_outputs(module: nn.Module) -> int:
    weight = module.get_parameter("weight")
    return weight.shape[1 if isinstance(module, Conv1D) else 0]


def quantize(
    model: ir.Model,
    precision: Precision,
    keep: Collection[str] = (),
    ranges: Mapping[str, float] = MappingProxyType({}),
    *,
    embedding: str | None = None,
    reduce_range: bool = False,
    raised: Collection[str] = (),
    moments: Mapping[str, Tensor] = MappingProxyType({}),
    made: dict[str, Blocks] | None = None,
    stored: Find | None = None,
    weights_only: bool = False,
) -> ir.Model:
    """Quantizes the projections and the embedding table of a graph in place; returns the graph.

    Args:
        model: from `maskdial_export.tracing.graph.optimize`; a float16 model for int4-fp16.
        precision: the precision to quantize to.
        keep: modules to leave unchanged, along with those packed with one of them.
        ranges: for int8, modules whose input has a fixed scale, with the largest magnitude it
            represents.
        embedding: the module that looks up tokens; None to leave its table unchanged.
        reduce_range: whether int8 weights have 7 bits, so that a pair of products fits in 16 bits
            and sums are exact on CPUs without VNNI, too.
        raised: for int4, modules that are int8, along with those packed with one of them.
        moments: for int4, the mean products of modules' inputs with each other, float32 (inputs,
            inputs), by which their integers are chosen.
        made: for int4, matrices that were rounded before, by their modules' names; others are
            added.
        stored: for int8 and int4, returns the blocks of a file that are exactly some modules'
            weight; where it has none, they are int8.
        weights_only: whether products stay those of floats, by the weights that the integers stand
            for, so that activations are not rounded: to tell the two losses apart.
    """
    graph = model.graph
    largest = _REDUCED if reduce_range else LARGEST
    int8 = _Int8(ranges, largest)
    kind = INT4["int4" if precision == "int8" else precision]
    int4 = None if precision == "int8" else _Int4(kind, moments, made)
    for node in list(graph):
        weight = _weight(node)
        modules = modules_of(node)
        if weight is None or not modules or weight.shape[1] < _MIN_OUTPUTS:
            continue
        if any(module in keep for module in modules):
            continue
        _part_bias(graph, node)
        _part_factor(graph, node)
        is_raised = any(module in raised for module in modules)
        blocks = None if is_raised or stored is None else stored(modules, weight)
        if int4 is not None and not is_raised and stored is None:
            blocks = int4.blocks(node, weight)
        if weights_only:
            _multiply_rounded(
                graph, node, int8.rounded(weight) if blocks is None else blocks.weight()
            )
            continue
        if blocks is None:
            output = int8.project(graph, node, weight)
        else:
            output = _project_blocks(graph, node, blocks, kind)
        replace_value(node.outputs[0], output)
        graph.remove(node, safe=True)
    if embedding is not None and embedding not in keep:
        quantize_table(graph, embedding, largest)
    passes.RemoveUnusedNodesPass()(model)
    return model


def _weight(node: ir.Node) -> NDArray[np.float32] | None:
    """The constant matrix a node multiplies by, float32 (inputs, outputs).

    None if the node does more than multiply, scale by alpha, and add a bias.
    """
    if node.op_type not in PRODUCTS:
        return None
    weight = constant(node.inputs[1])
    transposed = node.attributes.get_int("transB", False)
    others = set(node.attributes) - {"transB", "alpha"}
    plain = all(node.attributes[name].value == (name == "beta") for name in others)
    if weight is None or weight.ndim != 2 or not plain:
        return None
    return (weight.T if transposed else weight).astype(np.float32, copy=False)


def _part_bias(graph: ir.Graph, node: ir.Node) -> None:
    """Moves a Gemm's bias to an ``Add`` after it."""
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return
    _insert_after(graph, node, "Add", node.inputs[2])
    node.resize_inputs(2)


def _part_factor(graph: ir.Graph, node: ir.Node) -> None:
    """Moves a product's alpha, which Gemma's output layer has, to a ``Mul`` after it."""
    alpha, weight = node.attributes.get_float("alpha", 1.0), constant(node.inputs[1])
    if alpha != 1.0 and weight is not None:
        name = f"{node.outputs[0].name}.alpha"
        factor = add_initializer(graph, name, np.array(alpha, weight.dtype))
        _insert_after(graph, node, "Mul", factor)


def _insert_after(graph: ir.Graph, node: ir.Node, op_type: str, operand: ir.Value) -> None:
    after = ir.node(op_type, [node.outputs[0], operand])
    replace_value(node.outputs[0], after.outputs[0])
    after.replace_input_with(0, node.outputs[0])
    graph.insert_after(node, [after])


def _multiply_rounded(graph: ir.Graph, node: ir.Node, weight: NDArray[np.float32]) -> None:
    """Gives a product another matrix, (inputs, outputs)."""
    rounded = weight.T if node.attributes.get_int("transB", False) else weight
    name = f"{','.join(modules_of(node))}.rounded"
    node.replace_input_with(1, add_initializer(graph, name, np.ascontiguousarray(rounded)))


class _Int8:
    """Builds int8 products; projections of one input share its quantized rows."""

    def __init__(self, ranges: Mapping[str, float], largest_weight: int) -> None:
        self._ranges = ranges
        self._largest_weight = largest_weight
        self._rows: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self._fixed: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}

    def project(self, graph: ir.Graph, node: ir.Node, weight: NDArray[np.float32]) -> ir.Value:
        """Inserts the quantized product before ``node``; returns its result."""
        source = node.inputs[0]
        assert source is not None
        modules = modules_of(node)
        largest = max(self._ranges.get(module, np.inf) for module in modules)
        peak = bias = None
        if np.isfinite(largest):
            if source not in self._fixed:
                self._fixed[source] = self._quantize_all(graph, node, source, largest)
            quantized, step = self._fixed[source]
            bias = _take_bias(graph, node)
        else:
            if source not in self._rows:
                self._rows[source] = self._quantize_rows(graph, node, source)
            quantized, peak = self._rows[source]
            step = self._step(graph)
        name = ",".join(modules)
        integers, scale = to_int8(weight, 0, self._largest_weight)
        inputs: list[ir.Value | None] = [
            quantized,
            add_initializer(graph, f"{name}.int8", integers),
            step,
            add_initializer(graph, f"{name}.scale", scale[0]),
            self._zero_point(graph),
        ]
        if bias is not None:
            inputs += [None, bias]
        product = ir.node("MatMulIntegerToFloat", inputs, domain="com.microsoft")
        graph.insert_before(node, [product])
        if peak is None:
            return product.outputs[0]
        scaled = ir.node("Mul", [product.outputs[0], peak])
        graph.insert_before(node, [scaled])
        return scaled.outputs[0]

    def _quantize_all(
        self, graph: ir.Graph, node: ir.Node, source: ir.Value, largest: float
    ) -> tuple[ir.Value, ir.Value]:
        """A value as uint8 with a fixed step between integers; larger values are clipped."""
        step = add_initializer(
            graph, f"{source.name}.step", np.array(largest / LARGEST, np.float32)
        )
        rows = ir.node("QuantizeLinear", [source, step, self._zero_point(graph)])
        graph.insert_before(node, [rows])
        return rows.outputs[0], step

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

    def rounded(self, weight: NDArray[np.float32]) -> NDArray[np.float32]:
        """The matrix that the integers of a product stand for."""
        integers, scale = to_int8(weight, 0, self._largest_weight)
        return integers * scale

    @staticmethod
    def _step(graph: ir.Graph) -> ir.Value:
        return add_initializer(graph, "int8.step", np.array(1 / LARGEST, np.float32))

    @staticmethod
    def _zero_point(graph: ir.Graph) -> ir.Value:
        return add_initializer(graph, "int8.zero_point", np.array(_ZERO_POINT, np.uint8))


def _take_bias(graph: ir.Graph, node: ir.Node) -> ir.Value | None:
    """Removes the ``Add`` of a bias after a product, if it is the only user; returns the bias."""
    uses = list(node.outputs[0].uses())
    if len(uses) != 1 or uses[0].node.op_type != "Add":
        return None
    add = uses[0].node
    bias = add.inputs[1 - uses[0].idx]
    array = constant(bias)
    if array is None or array.ndim != 1:
        return None
    replace_value(add.outputs[0], node.outputs[0])
    graph.remove(add, safe=True)
    return bias


class _Int4:
    """Rounds weights to 4 bits, each once."""

    def __init__(
        self,
        kind: Int4,
        moments: Mapping[str, Tensor],
        made: dict[str, Blocks] | None,
    ) -> None:
        self._kind = kind
        self._moments = moments
        self._made = {} if made is None else made

    def blocks(self, node: ir.Node, weight: NDArray[np.float32]) -> Blocks:
        """The matrix that a node multiplies by, rounded."""
        modules = modules_of(node)
        name = ",".join(modules)
        if name not in self._made:
            self._made[name] = to_blocks(weight, self._kind, self._moments.get(modules[0]))
        return self._made[name]


def _project_blocks(graph: ir.Graph, node: ir.Node, blocks: Blocks, kind: Int4) -> ir.Value:
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
        shape = add_initializer(graph, f"int8.shape.{scale.shape}", np.array(blocks.scale.shape))
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
