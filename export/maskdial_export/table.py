"""The embedding table: rows of int8 with a scale each, which a tied output layer may share.

``Gather`` fetches integers and scales, ``Cast`` and ``Mul`` make the rows: for a table of 576
columns as fast as fetching them in float32, within a microsecond. (``DequantizeLinear`` before the
``Gather`` would make all rows in every pass.)
"""

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from maskdial_export.rewrite import add_initializer, constant, modules_of, replace_value

LARGEST = 127
_TINY = np.finfo(np.float32).tiny


def word_embedding(model: PreTrainedModel) -> str | None:
    """The module that looks up tokens, by its name; None where that is no table.

    Tables of positions and of token types have few rows, and their rows are added to all of a
    text: not worth an error.
    """
    embedding = model.get_input_embeddings()
    names = (name for name, module in model.named_modules() if module is embedding)
    return next(names, None) if isinstance(embedding, nn.Embedding) else None


def to_int8(
    weight: NDArray[np.float32], axis: int, largest: int = LARGEST
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Integers up to ``largest``, and the scales along ``axis``, which becomes 1."""
    scale = np.maximum(np.abs(weight).max(axis=axis, keepdims=True) / np.float32(largest), _TINY)
    return np.rint(weight / scale).astype(np.int8), scale


def quantise_table(graph: ir.Graph, module: str, largest: int) -> None:
    """Stores the rows that ``module`` looks up as int8, after the products were quantised.

    A table that something else reads, too, stays as it is, or it would be stored twice: that of a
    tied output layer in float32. A product with the same weights, int8 up to ``largest``, reads
    the same integers from then on. Its ``Transpose`` is of a constant, so ONNX Runtime computes it
    once, when it loads the graph.
    """
    table = _table(graph, module)
    weight = constant(table)
    if table is None or weight is None:
        return
    lookups = [use.node for use in table.uses()]
    if any(node.op_type != "Gather" or node.attributes.get_int("axis", 0) for node in lookups):
        return
    integers, scale = to_int8(weight, 1, largest)
    products = _products(graph, integers.T)
    if not products:
        integers, scale = to_int8(weight, 1)
    rows = add_initializer(graph, f"{module}.int8", integers)
    scales = add_initializer(graph, f"{module}.scale", scale)
    for lookup in lookups:
        _look_up(graph, lookup, rows, scales)
    for product in products:
        transposed = ir.node("Transpose", [rows], {"perm": [1, 0]})
        graph.insert_before(product, [transposed])
        product.replace_input_with(1, transposed.outputs[0])


def _table(graph: ir.Graph, module: str) -> ir.Value | None:
    """The constant, (num_tokens, columns), of which a module takes rows."""
    for node in graph:
        if node.op_type == "Gather" and module in modules_of(node):
            weight = constant(node.inputs[0])
            if weight is not None and weight.ndim == 2 and weight.dtype == np.float32:
                return node.inputs[0]
    return None


def _products(graph: ir.Graph, weight: NDArray[np.int8]) -> list[ir.Node]:
    """The products with these very integers, (inputs, outputs)."""
    return [
        node
        for node in graph
        if node.op_type == "MatMulIntegerToFloat"
        and (integers := constant(node.inputs[1])) is not None
        and np.array_equal(integers, weight)
    ]


def _look_up(graph: ir.Graph, gather: ir.Node, rows: ir.Value, scales: ir.Value) -> None:
    ids = gather.inputs[1]
    integers, scale = ir.node("Gather", [rows, ids]), ir.node("Gather", [scales, ids])
    floats = ir.node("Cast", [integers.outputs[0]], {"to": ir.DataType.FLOAT})
    scaled = ir.node("Mul", [floats.outputs[0], scale.outputs[0]])
    graph.insert_before(gather, [integers, scale, floats, scaled])
    replace_value(gather.outputs[0], scaled.outputs[0])
    graph.remove(gather, safe=True)
