"""The embedding table: int8 rows with one scale each, or the integers of a tied output layer.

``Gather`` fetches integers and scales, ``Cast`` and ``Mul`` restore the rows. For 576 columns that
takes within a microsecond of fetching float32 rows. (``DequantizeLinear`` before the ``Gather``
would restore all rows in every pass.) Of a table in blocks it fetches each row's blocks.
"""

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from maskdial.bundle.manifest import TABLE_ROWS
from maskdial_export.quantize.blocks import Blocks
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

    A table with another reader, such as an output layer kept in float32, is left unchanged, or it
    would be stored twice. An int8 product with the same weights (up to ``largest``) then
    reads the table's integers through a ``Transpose``, which ONNX Runtime folds at load time.
    """
    table = table_of(graph, module)
    weight, lookups = constant(table), _lookups(table)
    if weight is None or not lookups:
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


def table_of(graph: ir.Graph, module: str) -> ir.Value | None:
    """The constant table, (num_tokens, columns), that a module looks up."""
    for node in graph:
        if node.op_type == "Gather" and module in modules_of(node):
            weight = constant(node.inputs[0])
            if weight is not None and weight.ndim == 2 and weight.dtype == np.float32:
                return node.inputs[0]
    return None


def _lookups(table: ir.Value | None) -> list[ir.Node]:
    """What looks up rows of a table; nothing if it has another reader."""
    lookups = [] if table is None else [use.node for use in table.uses()]
    if any(node.op_type != "Gather" or node.attributes.get_int("axis", 0) for node in lookups):
        return []
    return lookups


def quantize_tied(graph: ir.Graph, module: str, product: str, blocks: Blocks) -> bool:
    """Has the lookups of ``module`` read the integers of the tied output layer, in blocks.

    Args:
        graph: after the products are quantized.
        module: whose table is the product's weight.
        product: the modules of the product, whose initializers the graph has.
        blocks: the product's.

    Returns:
        False if the table has other readers, or blocks that lookups do not restore (zeros of
        nibbles that differ, rows of no whole blocks); nothing is changed then.
    """
    lookups = _lookups_of_blocks(graph, module, blocks)
    for lookup in lookups:
        _look_up_blocks(graph, lookup, module, product, blocks, float(blocks.zero[0, 0]))
    return bool(lookups)


def round_tied(graph: ir.Graph, module: str, blocks: Blocks) -> bool:
    """Has the lookups of ``module`` read the floats that `quantize_tied` would restore.

    Args and what is returned are those of `quantize_tied`.
    """
    lookups = _lookups_of_blocks(graph, module, blocks)
    if lookups:
        table = np.ascontiguousarray(blocks.weight().T)
        rounded = add_initializer(graph, f"{module}.rounded", table)
        for lookup in lookups:
            lookup.replace_input_with(0, rounded)
    return bool(lookups)


def _lookups_of_blocks(graph: ir.Graph, module: str, blocks: Blocks) -> list[ir.Node]:
    """The lookups of a table that blocks can take the place of; see `quantize_tied`."""
    whole = blocks.num_inputs % blocks.block_size == 0
    one_zero = bool((blocks.zero == blocks.zero[0, 0]).all())
    return _lookups(table_of(graph, module)) if whole and one_zero else []


def _look_up_blocks(
    graph: ir.Graph, gather: ir.Node, module: str, product: str, blocks: Blocks, zero: float
) -> None:
    ids, nodes = gather.inputs[1], list[ir.Node]()

    def add(
        op_type: str, inputs: list[ir.Value | None], **attributes: int | str | list[int]
    ) -> ir.Value:
        nodes.append(ir.node(op_type, inputs, attributes))
        return nodes[-1].outputs[0]

    def number(name: str, value: NDArray[Any]) -> ir.Value:
        return add_initializer(graph, f"lookup.{name}", value)

    last = number("last", np.array([3]))
    integers = add("Gather", [graph.initializers[f"{product}.int{blocks.bits}"], ids])
    if blocks.bits == 4:  # the lower half of a byte is the first one
        low = add("BitwiseAnd", [integers, number("mask", np.array(15, np.uint8))])
        four = number("four", np.array(4, np.uint8))
        high = add("BitShift", [integers, four], direction="RIGHT")
        axis = number("pair", np.array([4]))
        both = add("Concat", [add("Unsqueeze", [each, axis]) for each in (low, high)], axis=4)
        integers = add("Reshape", [both, number("block", np.array([0, 0, 0, -1]))])
    rows = add("Cast", [integers], to=ir.DataType.FLOAT)
    if zero:
        rows = add("Sub", [rows, number(f"zero{zero:.0f}", np.array(zero, np.float32))])
    scale = add("Gather", [graph.initializers[f"{product}.scale"], ids])
    rows = add("Mul", [rows, add("Unsqueeze", [scale, last])])
    if blocks.minimum is not None:
        minima = add("Gather", [graph.initializers[f"{product}.minimum"], ids], axis=1)
        minima = add("Transpose", [minima], perm=[1, 2, 0])
        rows = add("Sub", [rows, add("Unsqueeze", [minima, last])])
    rows = add("Reshape", [rows, number("row", np.array([0, 0, blocks.num_inputs]))])
    rows.name = f"{TABLE_ROWS}{module}.{ids.name if ids is not None else 0}"
    graph.insert_before(gather, nodes)
    replace_value(gather.outputs[0], rows)
    graph.remove(gather, safe=True)


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
