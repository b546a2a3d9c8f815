"""The embedding table: int8 rows with one scale each, shared with a tied output layer.

``Gather`` fetches integers and scales, ``Cast`` and ``Mul`` restore the rows. For 576 columns that
takes within a microsecond of fetching float32 rows. (``DequantizeLinear`` before the ``Gather``
would restore all rows in every pass.)
"""

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from maskdial_export.tracing.rewrite import add_initializer, constant, modules_of, replace_value

LARGEST = 127
_TINY = np.finfo(np.float32).tiny


def word_embedding(model: PreTrainedModel) -> str | None:
    """The name of the module that looks up tokens; None if it is not a plain table.

    Position and token-type tables stay float32: they have few rows, and every token uses them.
    """
    embedding = model.get_input_embeddings()
    names = (name for name, module in model.named_modules() if module is embedding)
    return next(names, None) if isinstance(embedding, nn.Embedding) else None


def sharing(model: PreTrainedModel, name: str) -> list[str]:
    """The modules that look up the table of the module ``name``, such as an encoder's own."""
    table = model.get_submodule(name).weight
    modules = model.named_modules(remove_duplicate=False)
    return [
        each
        for each, module in modules
        if isinstance(module, nn.Embedding) and module.weight is table
    ]


def tied_head(model: PreTrainedModel) -> tuple[str, str] | None:
    """The output layer whose weight is the embedding table, and the table's module."""
    name, head = word_embedding(model), model.get_output_embeddings()
    if name is None or not isinstance(head, nn.Linear):
        return None
    if head.weight is not model.get_submodule(name).weight:
        return None
    return next(each for each, module in model.named_modules() if module is head), name


def to_int8(
    weight: NDArray[np.float32], axis: int, largest: int = LARGEST
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Integers up to ``largest`` in magnitude, and float32 scales; ``axis`` is 1 in the scales."""
    scale = np.maximum(np.abs(weight).max(axis=axis, keepdims=True) / np.float32(largest), _TINY)
    return np.rint(weight / scale).astype(np.int8), scale


def quantize_table(graph: ir.Graph, module: str, largest: int) -> None:
    """Stores the table of ``module`` as int8. Call it after the products are quantized.

    A table with another reader, such as a tied output layer kept in float32, is left unchanged,
    or it would be stored twice. An int8 product with the same weights (up to ``largest``) then
    reads the table's integers through a ``Transpose``, which ONNX Runtime folds at load time.
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
    """The constant table, (num_tokens, columns), that a module looks up."""
    for node in graph:
        if node.op_type == "Gather" and module in modules_of(node):
            weight = constant(node.inputs[0])
            if weight is not None and weight.ndim == 2 and weight.dtype == np.float32:
                return node.inputs[0]
    return None


def _products(graph: ir.Graph, weight: NDArray[np.int8]) -> list[ir.Node]:
    """The products with exactly these integers, (inputs, outputs)."""
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
