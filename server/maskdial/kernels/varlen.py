"""Rewrites the attention of masked graphs, and lets everything between embeddings and heads run on
texts without padding.

``MaskedAttention`` (``src/masked_attention.cpp``) takes the place of a ``MultiHeadAttention`` that
masks padding only. If that is all attention of the graph, and nothing in between needs to know
which text a token is of, ``Pack`` (``src/packing.cpp``) puts the texts one after the other, from
(batch, length, ...) to (tokens, 1, ...), once, and ``Unpack`` puts what heads need back into padded
rows, which end with zeros.
"""

from dataclasses import dataclass, field

from onnx import GraphProto, NodeProto, TensorProto, helper

from maskdial.kernels.fuse import join_norms
from maskdial.kernels.graph import DOMAIN, QUANTIZED, RESIDUAL_NORMS, Values, attributes_of

_LENGTHS = "lengths"
_MASKED = -10_000  # scores this low have no weight
_TOKENS = frozenset({"input_ids", "token_type_ids"})
_ATTENTION_DEFAULTS: dict[str, float] = {"mask_filter_value": -10_000.0, "unidirectional": 0}

_NORMS = RESIDUAL_NORMS | {"LayerNormalization", "SimplifiedLayerNormalization"}
# What is worth packing its inputs for; other operators are packed if an input is.
_HEAVY = _NORMS | {
    "Linear",
    "Linear4",
    "MatMul",
    "MatMulNBits",
    "MultiHeadAttention",
    "RotaryEmbedding",
}


def rewrite_masked_attention(graph: GraphProto) -> int:
    """Rewrites a graph in place, unless it is not a masked model's; returns how many attentions it
    replaced.
    """
    if _keeps_padding(graph):
        return 0
    analysis = _Analysis(graph)
    attentions = [node for node in graph.node if analysis.masks_padding_only(node)]
    if not attentions:
        return 0
    num_attentions = sum(node.op_type == "MultiHeadAttention" for node in graph.node)
    plan = analysis.plan()
    if len(attentions) == num_attentions and len(plan.entries) == 1:
        _pack(graph, plan, analysis)
        join_norms(graph, {_packed(name) for name in plan.values})
    else:
        for node in attentions:
            _replace_attention(node, analysis, packed=False)
    return len(attentions)


def _keeps_padding(graph: GraphProto) -> bool:
    """Whether the graph may return vectors of tokens beyond ``lengths``, as ColBERT's queries have.

    Such graphs do not clear the token ids of padding (``Where``), and return vectors.
    """
    readers = {node.op_type for node in graph.node if "input_ids" in node.input}
    embeds = {value.name for value in graph.output} == {"embeddings"}
    return embeds and not readers <= {"Shape", "Where"}


@dataclass(slots=True)
class _Plan:
    """What runs on packed texts.

    Attributes:
        nodes: by id.
        values: their results and what they read, by name; all have a row for each token.
        entries: the values that are packed first.
    """

    nodes: set[int]
    values: set[str]
    entries: set[str] = field(default_factory=set)


class _Analysis(Values):
    """Which values of a graph have a row for each token, (batch, length, ...).

    Attributes:
        is_quantized: whether the graph has products of int8 or int4.
    """

    def __init__(self, graph: GraphProto) -> None:
        super().__init__(graph)
        self.is_quantized = any(node.op_type in QUANTIZED for node in graph.node)
        self._inputs = {each.name for each in graph.input}

    def masks_padding_only(self, node: NodeProto) -> bool:
        """Whether a node is attention of texts within their lengths, perhaps through a window."""
        if node.op_type != "MultiHeadAttention":
            return False
        query, key, value, bias, lengths, scores, *rest = [*node.input, "", "", "", "", ""][:10]
        if not (query and key and value) or any(rest) or any(node.output[1:]):
            return False
        if scores and not self.window(node):
            return False
        if lengths != _LENGTHS or lengths not in self._inputs or not self.is_constant(bias, True):
            return False
        attributes = attributes_of(node)
        return all(
            name in ("num_heads", "scale") or value == _ATTENTION_DEFAULTS.get(name)
            for name, value in attributes.items()
        )

    def window(self, node: NodeProto) -> int:
        """How far away tokens are not seen any more, if that is all that the bias says; else 0."""
        name, chain = node.input[5] if len(node.input) > 5 else "", []
        for kind in ("Mul", "Unsqueeze", "Cast", "GreaterOrEqual", "Abs", "Sub"):
            producer = self.producers.get(name)
            if producer is None or producer.op_type != kind:
                return 0
            chain.append(producer)
            name = producer.input[0]
        mul, unsqueeze, _, compare, _, difference = chain
        masked, size = self.numbers(mul.input[1]), self.numbers(compare.input[1])
        if len(masked) != 1 or masked[0] > _MASKED or self.numbers(unsqueeze.input[1]) != [0, 1]:
            return 0
        places = [self.producers.get(each) for each in difference.input]
        if [self._axis_of_places(each) for each in places] != [1, 0] or len(size) != 1:
            return 0
        return max(size[0], 0)

    def _axis_of_places(self, node: NodeProto | None) -> int:
        """The axis that was added to the places 0, 1, ... of tokens; -1 if it is something else."""
        if node is None or node.op_type != "Unsqueeze":
            return -1
        places = self.producers.get(node.input[0])
        if places is None or places.op_type != "Range":
            return -1
        first, count, step = places.input
        squeeze = self.producers.get(count)
        is_length = squeeze is not None and squeeze.op_type == "Squeeze"
        if squeeze is None or not is_length or not self._is_dim(squeeze.input[0], 1):
            return -1
        if self.numbers(first) != [0] or self.numbers(step) != [1]:
            return -1
        axes = self.numbers(node.input[1])
        return axes[0] if len(axes) == 1 else -1

    def plan(self) -> _Plan:
        """What to pack."""
        by_token = self._values_by_token()
        plan = _Plan(set(), set())
        for node in self.graph.node:
            carried = self.carried(node)
            results = [name for name in node.output if name]
            if not carried or not {*carried, *results} <= by_token:
                continue
            if node.op_type in _HEAVY or not plan.values.isdisjoint(carried):
                plan.entries |= set(carried) - plan.values
                plan.nodes.add(id(node))
                plan.values |= {*carried, *results}
        return plan

    def _values_by_token(self) -> set[str]:
        """Grows from token ids and attention, forwards and backwards, until nothing is added."""
        found: set[str] = set()
        size = -1
        while len(found) > size:
            size = len(found)
            for node in self.graph.node:
                carried = self.carried(node)
                results = {name for name in node.output if name}
                if self._looks_tokens_up(node) or self.masks_padding_only(node):
                    found |= {*carried, *results}
                elif carried and found >= set(carried):
                    found |= results
                elif len(carried) == 1 and node.op_type != "Reshape" and results & found:
                    found |= {*carried, *results}
        return found

    def _looks_tokens_up(self, node: NodeProto) -> bool:
        """Whether a node is a lookup of each token's row in a table."""
        if node.op_type != "Gather" or attributes_of(node).get("axis", 0) != 0:
            return False
        table, index = node.input
        if len(self.dims(table)) != 2:
            return False
        where = self.producers.get(index)
        if where is not None and where.op_type == "Where":
            index = where.input[1]
        return index in _TOKENS and index in self._inputs

    def carried(self, node: NodeProto) -> list[str]:
        """As for any graph, and through what keeps batch and length apart."""
        kind, inputs = node.op_type, list(node.input)
        if kind == "MultiHeadAttention":
            return inputs[:3] if self.masks_padding_only(node) else []
        if kind == "Reshape":
            return inputs[:1] if self._keeps_tokens(inputs[1]) else []
        if kind == "Unsqueeze":
            axes = self.numbers(inputs[1])
            return inputs[:1] if axes and min(axes) >= 2 else []
        if kind in ("Slice", "Squeeze"):
            axes = self.numbers(inputs[-1]) if len(inputs) in (2, 4) else []
            rank = self._rank(inputs[0])
            inner = [axis >= 2 or 2 - rank <= axis < 0 for axis in axes]
            return inputs[:1] if axes and all(inner) and self.all_constant(inputs[1:]) else []
        if kind == "Expand":
            return inputs[:1] if self.numbers(inputs[1])[:2] == [1, 1] else []
        if kind == "RotaryEmbedding":
            from_zero = self.numbers(inputs[1]) == [0] and self.all_constant(inputs[2:])
            batched = attributes_of(node).get("is_packed_batching", 0) == 0
            return inputs[:1] if from_zero and batched else []
        return super().carried(node)

    def _keeps_tokens(self, shape: str) -> bool:
        """Whether a shape is (batch, length, ...), with constants after the batch's dimensions."""
        node = self.producers.get(shape)
        if node is None or node.op_type != "Concat" or len(node.input) < 3:
            return False
        batch, length, *rest = node.input
        sizes = [number for name in rest for number in self.numbers(name) or [0]]
        return self._is_dim(batch, 0) and self._is_dim(length, 1) and 0 not in sizes

    def _rank(self, name: str) -> int:
        """How many dimensions a value has, if it was reshaped just before; else 0."""
        node = self.producers.get(name)
        if node is not None and node.op_type == "Slice":
            return self._rank(node.input[0])
        if node is None or node.op_type != "Reshape" or not self._keeps_tokens(node.input[1]):
            return 0
        return 2 + len(self.columns(node.input[1]))

    def columns(self, shape: str) -> list[int]:
        """The dimensions after batch and length, of a shape for which `_keeps_tokens` holds."""
        rest = self.producers[shape].input[2:]
        return [number for name in rest for number in self.numbers(name)]

    def _is_dim(self, name: str, index: int) -> bool:
        node = self.producers.get(name)
        if node is None or node.op_type != "Shape":
            return False
        attributes = attributes_of(node)
        bounds = attributes.get("start", 0), attributes.get("end", 0)
        source = node.input[0]
        known = source in _TOKENS or (source == _LENGTHS and index == 0)
        return known and source in self._inputs and bounds == (index, index + 1)


def _pack(graph: GraphProto, plan: _Plan, analysis: _Analysis) -> None:
    """Rewrites a graph as planned."""
    packed = {name: _packed(name) for name in plan.values}
    outputs = {value.name for value in graph.output}
    needed = {
        name
        for node in graph.node
        if id(node) not in plan.nodes
        for name in node.input
        if name in plan.values
    } | (outputs & plan.values)
    nodes: list[NodeProto] = []
    constants: dict[str, TensorProto] = {}
    if any(node.op_type == "RotaryEmbedding" for node in graph.node if id(node) in plan.nodes):
        nodes.append(_node("TokenPositions", [_LENGTHS], "positions.packed"))
    for node in graph.node:
        results = list(node.output)
        if id(node) in plan.nodes:
            if node.op_type == "Reshape":
                shape = [0, 0, *analysis.columns(node.input[1])]
                name = "shape.packed." + ".".join(map(str, shape))
                constants[name] = helper.make_tensor(name, TensorProto.INT64, [len(shape)], shape)
                node.input[1] = name
                _set_attribute(node, "allowzero", 0)
            elif node.op_type == "RotaryEmbedding":
                node.input[1] = "positions.packed"
            elif node.op_type == "MultiHeadAttention":
                _replace_attention(node, analysis, packed=True)
            _rename(node, packed)
        nodes.append(node)
        for name in results:
            if name in plan.entries:
                nodes.append(_node("Pack", [name, _LENGTHS], packed[name]))
            elif id(node) in plan.nodes and name in needed:
                nodes.append(_node("Unpack", [packed[name], _LENGTHS, "input_ids"], name))
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(constants.values())


def _packed(name: str) -> str:
    return f"{name}.packed"


def _replace_attention(node: NodeProto, analysis: _Analysis, *, packed: bool) -> None:
    attributes = attributes_of(node)
    replacement = helper.make_node(
        "MaskedAttention",
        list(node.input[:5]),
        list(node.output[:1]),
        domain=DOMAIN,
        num_heads=attributes["num_heads"],
        scale=attributes.get("scale", 0.0),
        window=analysis.window(node),
        packed=int(packed),
        integers=int(analysis.is_quantized),
    )
    node.CopyFrom(replacement)


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
