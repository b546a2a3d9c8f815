"""Prunes the last layer to the rows the head reads.

A causal graph's head reads the tokens ``rows``, a masked one's the masked tokens or each text's
first one. The operators after the last attention compute each token by itself, so they compute
these alone, and attention has their queries only. Keys and values are computed for all tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from onnx import AttributeProto, NodeProto, TensorProto, helper

from maskdial.kernels.graph import (
    ATTENTION,
    ATTENTION_OVER,
    DOMAIN,
    NEW_TOKENS_INPUT,
    QUANTIZED,
    Graph,
    attributes_of,
    restores_rows,
    rowwise_inputs,
)

# Products that are not batch-invariant; `QUANTIZED` ones are.
_INEXACT = frozenset({"MatMul", "MatMulNBits"})
_ATTENTIONS = frozenset({ATTENTION, *ATTENTION_OVER.values(), "MaskedAttention"})
# Operators that may compute the head's rows from the graph's inputs.
_INDEXING = frozenset({"Cast", "Reshape", "Squeeze", "Unsqueeze"})
_ROWS, _AXIS = "rows.read", "axis.rows"
_ROWS_INPUT = 5
"""Of ``MaskedAttention``."""


@dataclass(frozen=True, slots=True)
class _Selection:
    """The rows that a head reads.

    Attributes:
        hidden: the last layer's result, for all tokens.
        nodes: between this value and the head.
        result: the head's input, (num_rows, columns).
        rows: the tokens' indices among all, padding included; empty for each text's first one.
    """

    hidden: str
    nodes: list[NodeProto]
    result: str
    rows: str


def prune_last_layer(graph: Graph) -> str:
    """Prunes a graph whose attentions are the kernels', unless its last layer has other readers or
    operators; returns the name of the rows that it computes now, empty if those are all.

    Texts must be packed. The last of `maskdial.kernels.fuse` makes operators that this rewrite does
    not know, and comes after it.
    """
    if any(each.type == AttributeProto.GRAPH for node in graph.nodes for each in node.attribute):
        return ""  # graphs within nodes may read any value
    selections = [found for node in graph.nodes if (found := _selection(graph, node))]
    return _prune(graph, selections[0]) if len(selections) == 1 else ""


def _selection(graph: Graph, node: NodeProto) -> _Selection | None:
    """The selection that a ``Gather`` makes among the last layer's tokens, or None."""
    if node.op_type != "Gather":
        return None
    source, index = node.input
    axis, nodes = attributes_of(node).get("axis", 0), [node]
    if axis == 0:
        reshape = _only_used_here(graph, source, "Reshape")
        if reshape is None or not _flattens(graph, reshape.input[1]):
            return None
        nodes.append(reshape)
        source = reshape.input[0]
    elif axis != 1 or graph.integers(index) != [0] or graph.dims(index):
        return None
    unpack = _only_used_here(graph, source, "Unpack")
    if unpack is not None:
        nodes.append(unpack)
        source = unpack.input[0]
    elif axis == 1:  # the texts of a causal model follow one another
        return None
    if not _only_used_by(graph, nodes, source):
        return None
    return _Selection(source, nodes, node.output[0], index if axis == 0 else "")


def _flattens(graph: Graph, shape: str) -> bool:
    """Whether a shape is (-1, columns)."""
    numbers = graph.integers(shape)
    return len(numbers) == 2 and numbers[0] == -1


def _only_used_here(graph: Graph, name: str, kind: str) -> NodeProto | None:
    """The node that computes a value, if it is of an operator and the value has one use."""
    return graph.producer(name, kind) if graph.num_uses(name) == 1 else None


def _only_used_by(graph: Graph, nodes: Iterable[NodeProto], *names: str) -> bool:
    ids = {id(node) for node in nodes}
    users = {id(user) for name in names for user in graph.users(name)}
    return graph.outputs.isdisjoint(names) and users <= ids


def _prune(graph: Graph, selection: _Selection) -> str:
    """Prunes the operators that compute a selection, if all of them allow it; returns its rows."""
    tail, entries = _tail(graph, selection)
    attentions = [graph.producers[name] for name in entries if _is_attention(graph, name)]
    others = [name for name in entries if not _is_attention(graph, name)]
    kinds = {node.op_type for node in tail}
    if len(attentions) != 1 or not kinds & QUANTIZED or kinds & _INEXACT:
        return ""
    (attention,) = attentions
    masked = attention.op_type == "MaskedAttention"
    unpacked = any(node.op_type == "Unpack" for node in selection.nodes)
    if (
        masked != unpacked
        or not (masked or attention.input[NEW_TOKENS_INPUT:])
        or not _only_used_by(graph, tail, attention.output[0])
        or not _values_by_token(graph).issuperset(others)
    ):
        return ""
    indexing = _indexing(graph, selection.rows)
    if indexing is None:
        return ""
    rows, axis = (_ROWS, 0) if masked else (selection.rows, 1)
    if masked:
        indexing.append(_packed_rows(selection, attention.input[4]))
        others.append(attention.input[0])
    gathers = {
        name: helper.make_node("Gather", [name, rows], [f"{name}.read"], axis=axis)
        for name in others
    }
    for node in tail:
        for index, name in enumerate(node.input):
            if name in gathers:
                node.input[index] = gathers[name].output[0]
    if masked:
        attention.input[0] = gathers[attention.input[0]].output[0]
    if masked and len(attention.input) > _ROWS_INPUT:  # positions follow
        attention.input[_ROWS_INPUT] = rows
    else:
        attention.input.append(rows)
    _write(graph, selection, indexing, gathers, axis=1 - axis)
    return rows


def _tail(graph: Graph, selection: _Selection) -> tuple[list[NodeProto], set[str]]:
    """The operators that only the selection needs, and that compute each token by itself; and
    their inputs from other operators.
    """
    wanted: set[str] = {selection.hidden}
    tail: list[NodeProto] = []
    for node in reversed(graph.nodes):
        sources = rowwise_inputs(graph, node)
        if wanted.isdisjoint(node.output) or not sources:
            continue
        if _only_used_by(graph, [*selection.nodes, *tail], *filter(None, node.output)):
            tail.append(node)
            wanted.update(sources)
    computed = {name for node in tail for name in node.output}
    return tail, wanted - computed


def _is_attention(graph: Graph, name: str) -> bool:
    node = graph.producers.get(name)
    return node is not None and node.op_type in _ATTENTIONS and node.output[0] == name


def _values_by_token(graph: Graph) -> set[str]:
    """Values that surely have a row for each token."""
    found: set[str] = set()
    for node in graph.nodes:
        sources = rowwise_inputs(graph, node)
        if (
            node.op_type in {"Pack", *_ATTENTIONS}
            or (sources and found.issuperset(sources))
            or (node.op_type == "Gather" and node.input[1] == "input_ids")
            or restores_rows(node)
        ):
            found.update(node.output)
    return found


def _indexing(graph: Graph, name: str) -> list[NodeProto] | None:
    """The nodes that compute rows from the graph's inputs, in order; None if one is of another
    operator.
    """
    if not name or name in graph.inputs or graph.is_constant(name):
        return []
    node = graph.producers.get(name)
    if node is None or node.op_type not in _INDEXING:
        return None
    nodes: list[NodeProto] = []
    for source in node.input:
        before = _indexing(graph, source)
        if before is None:
            return None
        nodes += before
    return [*nodes, node]


def _packed_rows(selection: _Selection, lengths: str) -> NodeProto:
    """The node that computes the selected tokens' indices among the packed ones."""
    if not selection.rows:
        return helper.make_node("FirstRows", [lengths], [_ROWS], domain=DOMAIN)
    inputs = [selection.rows, lengths, "input_ids"]
    return helper.make_node("PackedRows", inputs, [_ROWS], domain=DOMAIN)


def _write(
    graph: Graph,
    selection: _Selection,
    indexing: list[NodeProto],
    gathers: dict[str, NodeProto],
    *,
    axis: int,
) -> None:
    """Writes the nodes back: ``indexing`` comes first, each gather right after its value.

    ``axis``: of the last layer's result, the one that has a single element.
    """
    moved = {id(node) for node in (*indexing, *selection.nodes)}
    nodes = list(indexing)
    for node in graph.nodes:
        if id(node) == id(selection.nodes[0]):
            inputs = [selection.hidden, _AXIS]
            nodes.append(helper.make_node("Squeeze", inputs, [selection.result]))
        elif id(node) not in moved:
            nodes.append(node)
        nodes += [gathers[name] for name in node.output if name in gathers]
    graph.set_nodes(nodes, [helper.make_tensor(_AXIS, TensorProto.INT64, [1], [axis])])
