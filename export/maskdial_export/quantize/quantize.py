"""Quantized projections: integer matrix products instead of ``MatMul``.

* ``int8`` is W8A8 in blocks of 32: weights are 8-bit integers with a scale of 16 bits for each
  block, and so is each block of a row, which ``MatMulNBits`` rounds itself.
* ``int8`` with a scale for each row (``by_row``), for masked models that lose nothing by it: each
  output's weights have one scale, and so has each row of activations, computed at run time.
  Projections of one input share its rows. It multiplies many rows at 1.6 times the speed.
* ``int4`` stores weights as 4-bit integers in blocks of 32 with a scale and a zero each
  (`maskdial_export.quantize.int4`), and some layers as int8 in blocks.
* Integers of a GGUF file are kept, with int4 and int8: those of 4 bits in blocks of 32, others as
  8-bit integers in blocks of 16 or 32 (`maskdial_export.quantize.stored`).
* ``int4-fp16`` is W4A16, for CUDA: 4-bit integers in blocks of 64 in a float16 graph. The rows of
  some models, such as a 135M Llama's 576 columns, are no multiple of 128, and CUDA's product of
  several rows (``ep.cuda.fpa_intb_gemm``) needs whole blocks.

Integer products are exact and every other operator works row by row. ONNX Runtime has a separate
kernel for one row of a product in blocks, which on some processors gives other last bits; the
server's own kernels do not. The operators are those of `maskdial_export.quantize.products`.

The embedding table is int8 with int8 and int4 (`maskdial_export.quantize.table`), float16 with
int4-fp16.
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

from maskdial_export.quantize.blocks import Blocks, to_bytes
from maskdial_export.quantize.int4 import INT4, Int4, to_blocks
from maskdial_export.quantize.products import RowProducts, project_blocks
from maskdial_export.quantize.table import (
    LARGEST,
    quantize_table,
    quantize_tied,
    round_tied,
    table_of,
)
from maskdial_export.tracing.rewrite import (
    PRODUCTS,
    add_initializer,
    constant,
    modules_of,
    replace_value,
)

IntegerPrecision = Literal["int8", "int4", "int4-fp16"]

HALF = frozenset({"fp16", "int4-fp16"})
"""Precisions whose activations and KV cache are float16."""

Find = Callable[[Sequence[str], NDArray[np.float32]], Blocks | None]

_REDUCED = 63
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
    precision: IntegerPrecision,
    keep: Collection[str] = (),
    *,
    embedding: str | None = None,
    by_row: bool = False,
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
        embedding: the module that looks up tokens; None to leave its table unchanged.
        by_row: for int8, whether each row has one scale, and each output's weights.
        reduce_range: whether int8 weights with one scale for an output have 7 bits, so that a pair
            of products fits in 16 bits and sums are exact on CPUs without VNNI, too.
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
    rows = RowProducts(largest) if by_row else None
    kind = INT4["int4" if precision == "int8" else precision]
    int4 = None if precision == "int8" or stored is not None else _Int4(kind, moments, made)
    table = None if embedding is None or embedding in keep else table_of(graph, embedding)
    words, tied = constant(table), None
    for node in list(graph):
        weight = _weight(node)
        modules = modules_of(node)
        if weight is None or not modules or weight.shape[1] < _MIN_OUTPUTS:
            continue
        if any(module in keep for module in modules):
            continue
        _part_bias(graph, node)
        _part_factor(graph, node)
        blocks = None if stored is None else stored(modules, weight)
        if blocks is None and int4 is not None and not any(each in raised for each in modules):
            blocks = int4.blocks(node, weight)
        if blocks is None and rows is None:
            blocks = to_bytes(weight)
        if blocks is not None and words is not None and np.array_equal(weight.T, words):
            tied = ",".join(modules), blocks
        if weights_only and blocks is not None:
            _multiply_rounded(graph, node, blocks.weight())
            continue
        if rows is not None and blocks is None:
            output = rows.project(graph, node, weight)
        elif blocks is not None:
            output = project_blocks(graph, node, blocks, kind)
        replace_value(node.outputs[0], output)
        graph.remove(node, safe=True)
    if embedding is not None and table is not None:
        if tied is None:
            shares = False
        elif weights_only:
            shares = round_tied(graph, embedding, tied[1])
        else:
            shares = quantize_tied(graph, embedding, *tied)
        if not shares:
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
    if node.outputs[0].name is None:  # the graph's output is called by it
        node.outputs[0].name = f"{after.outputs[0].name}.part"
    after.replace_input_with(0, node.outputs[0])
    graph.insert_after(node, [after])


def _multiply_rounded(graph: ir.Graph, node: ir.Node, weight: NDArray[np.float32]) -> None:
    """Gives a product another matrix, (inputs, outputs)."""
    rounded = weight.T if node.attributes.get_int("transB", False) else weight
    name = f"{','.join(modules_of(node))}.rounded"
    node.replace_input_with(1, add_initializer(graph, name, np.ascontiguousarray(rounded)))


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
