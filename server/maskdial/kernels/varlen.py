"""Rewrites the attention of masked graphs, and removes the padding of texts between embeddings and
heads.

``MaskedAttention`` (``src/masked_attention.cpp``) takes the place of a ``MultiHeadAttention`` that
masks padding only; `maskdial.kernels.positions` has put it in place of attention by distance. If no
other operator attends, and all operators in between compute each token by itself, ``Pack``
(``src/varlen.cpp``) puts the texts one after the other, from (batch, length, ...) to (tokens, 1,
...), once. ``Unpack`` puts the heads' inputs back into padded rows, which end with zeros.
"""

from dataclasses import dataclass, field

from onnx import NodeProto, TensorProto, helper

from maskdial.kernels.fuse import fuse_norms
from maskdial.kernels.graph import (
    DOMAIN,
    LENGTHS,
    QUANTIZED,
    RESIDUAL_NORMS,
    Graph,
    attributes_of,
    restores_rows,
    rowwise_inputs,
)

_MASKED = -10_000  # scores this low have no weight
_TOKENS = frozenset({"input_ids", "token_type_ids"})
_ATTENTION_DEFAULTS: dict[str, float] = {"mask_filter_value": -10_000.0, "unidirectional": 0}

_OURS = "MaskedAttention"
_ATTENTIONS = frozenset({"MultiHeadAttention", _OURS})
_NORMS = RESIDUAL_NORMS | {"LayerNormalization", "SimplifiedLayerNormalization"}
# Operators that are worth packing their inputs; others are packed if an input is.
_HEAVY = _NORMS | QUANTIZED | _ATTENTIONS | {"MatMul", "MatMulNBits", "RotaryEmbedding"}
# Operators between a comparison of tokens' positions with lengths and a mask.
_MASKING = frozenset({"Cast", "Squeeze", "Unsqueeze"})


def pack_texts(graph: Graph) -> int:
    """Rewrites a graph in place if it is a masked model's; returns the number of attentions that
    the kernels compute now.
    """
    if _keeps_padding(graph):
        return 0
    attentions = [node for node in graph.nodes if _masks_padding_only(graph, node)]
    if not attentions:
        return 0
    num_attentions = sum(node.op_type in _ATTENTIONS for node in graph.nodes)
    plan = _plan(graph)
    if len(attentions) == num_attentions and len(plan.entries) == 1:
        _pack(graph, plan)
        fuse_norms(graph, {_packed(name) for name in plan.values})
    else:
        replaced = {
            id(node): _masked_attention(graph, node, packed=False)
            for node in attentions
            if node.op_type != _OURS
        }
        graph.replace(replaced)
    return len(attentions)


def _keeps_padding(graph: Graph) -> bool:
    """Whether the graph may return vectors of tokens beyond ``lengths``, as ColBERT's queries have.

    Such graphs do not clear the token ids of padding (``Where``), and return vectors.
    """
    readers = {node.op_type for node in graph.users("input_ids")}
    return graph.outputs == {"embeddings"} and not readers <= {"Shape", "Where"}


@dataclass(slots=True)
class _Plan:
    """The operators that run on packed texts.

    Attributes:
        nodes: by id.
        values: their results and inputs, by name; all have a row for each token.
        entries: the values that are packed first.
    """

    nodes: set[int]
    values: set[str]
    entries: set[str] = field(default_factory=set)


def _masks_padding_only(graph: Graph, node: NodeProto) -> bool:
    """Whether a node is attention of texts within their lengths, perhaps through a window."""
    if node.op_type == _OURS:  # `maskdial.kernels.positions` made it
        return True
    if node.op_type != "MultiHeadAttention":
        return False
    query, key, value, bias, lengths, scores, *rest = [*node.input, "", "", "", "", ""][:10]
    if not (query and key and value) or any(rest) or any(node.output[1:]):
        return False
    if scores and not _window(graph, node):
        return False
    if lengths != LENGTHS or lengths not in graph.inputs or not graph.is_constant(bias, True):
        return False
    attributes = attributes_of(node)
    return all(
        name in ("num_heads", "scale") or value == _ATTENTION_DEFAULTS.get(name)
        for name, value in attributes.items()
    )


def _window(graph: Graph, node: NodeProto) -> int:
    """The distance from which tokens are masked, if the bias masks nothing else; else 0."""
    name, chain = node.input[5] if len(node.input) > 5 else "", []
    for kind in ("Mul", "Unsqueeze", "Cast", "GreaterOrEqual", "Abs", "Sub"):
        producer = graph.producers.get(name)
        if producer is None or producer.op_type != kind:
            return 0
        chain.append(producer)
        name = producer.input[0]
    mul, unsqueeze, _, compare, _, difference = chain
    masked, size = graph.integers(mul.input[1]), graph.integers(compare.input[1])
    if len(masked) != 1 or masked[0] > _MASKED or graph.integers(unsqueeze.input[1]) != [0, 1]:
        return 0
    if not is_distance(graph, difference) or len(size) != 1:
        return 0
    return max(size[0], 0)


def is_distance(graph: Graph, node: NodeProto) -> bool:
    """Whether a node computes how far each token, a row, is behind each other, a column."""
    if node.op_type != "Sub":
        return False
    positions = [graph.producers.get(each) for each in node.input]
    return [_axis_of_positions(graph, each) for each in positions] == [1, 0]


def is_token_mask(graph: Graph, name: str) -> bool:
    """Whether a value is 1 for the tokens within the texts' lengths, and 0 for padding."""
    node = graph.producers.get(name)
    while node is not None and node.op_type in _MASKING:
        node = graph.producers.get(node.input[0])
    if node is None or node.op_type != "Less":
        return False
    kinds, ends = set[str](), node.input[1]
    while ends != LENGTHS and (maker := graph.producers.get(ends)) is not None:
        kinds.add(maker.op_type)
        ends = maker.input[0] if maker.op_type in _MASKING else ""
    places = graph.producers.get(node.input[0])
    counts = ends == LENGTHS and "Unsqueeze" in kinds
    return counts and LENGTHS in graph.inputs and _axis_of_positions(graph, places) == 0


def _axis_of_positions(graph: Graph, node: NodeProto | None) -> int:
    """The axis that was added to the positions 0, 1, ... of tokens; -1 for another value."""
    if node is None or node.op_type != "Unsqueeze":
        return -1
    positions = graph.producers.get(node.input[0])
    if positions is None or positions.op_type != "Range":
        return -1
    first, count, step = positions.input
    squeeze = graph.producers.get(count)
    is_length = squeeze is not None and squeeze.op_type == "Squeeze"
    if squeeze is None or not is_length or not _is_dim(graph, squeeze.input[0], 1):
        return -1
    if graph.integers(first) != [0] or graph.integers(step) != [1]:
        return -1
    axes = graph.integers(node.input[1])
    return axes[0] if len(axes) == 1 else -1


def _plan(graph: Graph) -> _Plan:
    """Chooses the operators to pack."""
    by_token = _values_by_token(graph)
    plan = _Plan(set(), set())
    for node in graph.nodes:
        sources = _rowwise_inputs(graph, node)
        results = [name for name in node.output if name]
        if not sources or not {*sources, *results} <= by_token:
            continue
        if node.op_type in _HEAVY or not plan.values.isdisjoint(sources):
            plan.entries |= set(sources) - plan.values
            plan.nodes.add(id(node))
            plan.values |= {*sources, *results}
    return plan


def _values_by_token(graph: Graph) -> set[str]:
    """Values with a row for each token, found from token ids and attention in both directions."""
    found: set[str] = set()
    size = -1
    while len(found) > size:
        size = len(found)
        for node in graph.nodes:
            sources = _rowwise_inputs(graph, node)
            results = {name for name in node.output if name}
            if _looks_tokens_up(graph, node) or _masks_padding_only(graph, node):
                found |= {*sources, *results}
            elif sources and found >= set(sources):
                found |= results
            elif len(sources) == 1 and node.op_type != "Reshape" and results & found:
                found |= {*sources, *results}
    return found


def _looks_tokens_up(graph: Graph, node: NodeProto) -> bool:
    """Whether a node is a lookup of each token's row in a table, or the end of one."""
    if restores_rows(node):
        return True
    if node.op_type != "Gather" or attributes_of(node).get("axis", 0) != 0:
        return False
    table, index = node.input
    if len(graph.dims(table)) != 2:
        return False
    where = graph.producers.get(index)
    if where is not None and where.op_type == "Where":
        index = where.input[1]
    return index in _TOKENS and index in graph.inputs


def _rowwise_inputs(graph: Graph, node: NodeProto) -> list[str]:
    """As `rowwise_inputs`, and through operators that keep batch and length apart."""
    kind, inputs = node.op_type, list(node.input)
    if kind in _ATTENTIONS:
        return inputs[:3] if _masks_padding_only(graph, node) else []
    if kind == "Mul" and _clears_padding(graph, node):
        return inputs[:1]
    if kind == "Reshape":
        return inputs[:1] if _keeps_tokens(graph, inputs[1]) else []
    if kind == "Unsqueeze":
        axes = graph.integers(inputs[1])
        return inputs[:1] if axes and min(axes) >= 2 else []
    if kind in ("Slice", "Squeeze"):
        axes = graph.integers(inputs[-1]) if len(inputs) in (2, 4) else []
        rank = _rank(graph, inputs[0])
        inner = [axis >= 2 or 2 - rank <= axis < 0 for axis in axes]
        return inputs[:1] if axes and all(inner) and graph.all_constant(inputs[1:]) else []
    if kind == "Expand":
        return inputs[:1] if graph.integers(inputs[1])[:2] == [1, 1] else []
    if kind == "RotaryEmbedding":
        from_zero = graph.integers(inputs[1]) == [0] and graph.all_constant(inputs[2:])
        batched = attributes_of(node).get("is_packed_batching", 0) == 0
        return inputs[:1] if from_zero and batched else []
    return rowwise_inputs(graph, node)


def _clears_padding(graph: Graph, node: NodeProto) -> bool:
    """Whether a node multiplies tokens by 1 and padding by 0."""
    return node.op_type == "Mul" and is_token_mask(graph, node.input[1])


def _keeps_tokens(graph: Graph, shape: str) -> bool:
    """Whether a shape is (batch, length, ...), with constants after the batch's dimensions."""
    node = graph.producers.get(shape)
    if node is None or node.op_type != "Concat" or len(node.input) < 3:
        return False
    batch, length, *rest = node.input
    sizes = [number for name in rest for number in graph.integers(name) or [0]]
    return _is_dim(graph, batch, 0) and _is_dim(graph, length, 1) and 0 not in sizes


def _rank(graph: Graph, name: str) -> int:
    """The number of dimensions of a value that was just reshaped; else 0."""
    node = graph.producers.get(name)
    if node is not None and node.op_type == "Slice":
        return _rank(graph, node.input[0])
    if node is None or node.op_type != "Reshape" or not _keeps_tokens(graph, node.input[1]):
        return 0
    return 2 + len(_columns(graph, node.input[1]))


def _columns(graph: Graph, shape: str) -> list[int]:
    """The dimensions after batch and length, of a shape for which `_keeps_tokens` holds."""
    rest = graph.producers[shape].input[2:]
    return [number for name in rest for number in graph.integers(name)]


def _is_dim(graph: Graph, name: str, index: int) -> bool:
    node = graph.producers.get(name)
    if node is None or node.op_type != "Shape":
        return False
    attributes = attributes_of(node)
    bounds = attributes.get("start", 0), attributes.get("end", 0)
    source = node.input[0]
    known = source in _TOKENS or (source == LENGTHS and index == 0)
    return known and source in graph.inputs and bounds == (index, index + 1)


def _pack(graph: Graph, plan: _Plan) -> None:
    """Rewrites a graph as planned."""
    packed = {name: _packed(name) for name in plan.values}
    needed = {
        name
        for node in graph.nodes
        if id(node) not in plan.nodes
        for name in node.input
        if name in plan.values
    } | (graph.outputs & plan.values)
    nodes: list[NodeProto] = []
    constants: dict[str, TensorProto] = {}
    if any(node.op_type == "RotaryEmbedding" for node in graph.nodes if id(node) in plan.nodes):
        nodes.append(_node("TokenPositions", [LENGTHS], "positions.packed"))
    for node in graph.nodes:
        results = list(node.output)
        if id(node) in plan.nodes:
            if node.op_type == "Reshape":
                shape = [0, 0, *_columns(graph, node.input[1])]
                name = "shape.packed." + ".".join(map(str, shape))
                constants[name] = helper.make_tensor(name, TensorProto.INT64, [len(shape)], shape)
                node.input[1] = name
                _set_attribute(node, "allowzero", 0)
            elif node.op_type == "RotaryEmbedding":
                node.input[1] = "positions.packed"
            elif node.op_type == "MultiHeadAttention":
                node.CopyFrom(_masked_attention(graph, node, packed=True))
            elif node.op_type == _OURS:
                _set_attribute(node, "packed", 1)
            elif _clears_padding(graph, node):
                packed[results[0]] = packed[node.input[0]]
                nodes += _unpacked(packed, results, needed)
                continue
            _rename(node, packed)
        nodes.append(node)
        for name in results:
            if name in plan.entries:
                nodes.append(_node("Pack", [name, LENGTHS], packed[name]))
        if id(node) in plan.nodes:
            nodes += _unpacked(packed, results, needed)
    graph.set_nodes(nodes, constants.values())


def _unpacked(packed: dict[str, str], names: list[str], needed: set[str]) -> list[NodeProto]:
    """The operators that put the values back into padded rows that others need so."""
    return [
        _node("Unpack", [packed[name], LENGTHS, "input_ids"], name)
        for name in names
        if name in needed
    ]


def _packed(name: str) -> str:
    return f"{name}.packed"


def _masked_attention(graph: Graph, node: NodeProto, *, packed: bool) -> NodeProto:
    """The kernels' operator for a ``MultiHeadAttention``."""
    attributes = attributes_of(node)
    return helper.make_node(
        "MaskedAttention",
        list(node.input[:5]),
        list(node.output[:1]),
        domain=DOMAIN,
        num_heads=attributes["num_heads"],
        scale=attributes.get("scale", 0.0),
        window=_window(graph, node),
        packed=int(packed),
        integers=int(not QUANTIZED.isdisjoint(graph.kinds)),
    )


def _rename(node: NodeProto, names: dict[str, str]) -> None:
    for values in (node.input, node.output):
        for index, name in enumerate(values):
            values[index] = names.get(name, name)


def _node(kind: str, inputs: list[str], output: str) -> NodeProto:
    return helper.make_node(kind, inputs, [output], domain=DOMAIN)


def _set_attribute(node: NodeProto, name: str, value: int) -> None:
    others = [each for each in node.attribute if each.name != name]
    del node.attribute[:]
    node.attribute.extend([*others, helper.make_attribute(name, value)])
