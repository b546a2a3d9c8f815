"""Lets the last layer compute only those tokens that the head reads.

A causal graph's head reads the tokens ``rows``, a masked one's the masked tokens or each text's
first one. Whatever comes after the last attention computes each token by itself, so it computes
these alone, and attention has their queries only. Keys and values are computed for all tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper

from maskdial.kernels.graph import (
    ATTENTION,
    ATTENTION_OVER,
    DOMAIN,
    QUANTIZED,
    Values,
    attributes_of,
)

# Products that may give a row other bits in other company; `QUANTIZED` ones do not.
_INEXACT = frozenset({"MatMul", "MatMulNBits"})
_ATTENTIONS = frozenset({ATTENTION, *ATTENTION_OVER.values(), "MaskedAttention"})
_NUM_CAUSAL_INPUTS = 10  # the last one counts the new tokens of each row
# What may compute the head's rows from the graph's inputs.
_INDEXING = frozenset({"Cast", "Reshape", "Squeeze", "Unsqueeze"})
_ROWS, _AXIS = "rows.read", "axis.rows"


@dataclass(frozen=True, slots=True)
class _Selection:
    """Where a head takes its tokens from.

    Attributes:
        hidden: the value that has all of them, as the last layer computes it.
        nodes: between this value and the head.
        result: what the head reads, (num_rows, columns).
        rows: the tokens' places among all, padding included; empty for each text's first one.
    """

    hidden: str
    nodes: list[NodeProto]
    result: str
    rows: str


def narrow_last_layer(graph: GraphProto) -> None:
    """Rewrites a graph in place whose attentions are the kernels', unless its last layer has other
    readers or operators.

    Texts must be packed. It does not know all operators that `maskdial.kernels.fuse` makes, so it
    comes before the last of them.
    """
    if any(each.type == AttributeProto.GRAPH for node in graph.node for each in node.attribute):
        return  # graphs within nodes may read any value
    narrowing = _Narrowing(graph)
    selections = [found for node in graph.node if (found := narrowing.selection(node))]
    if len(selections) == 1:
        narrowing.run(selections[0])


class _Narrowing(Values):
    def __init__(self, graph: GraphProto) -> None:
        super().__init__(graph)
        self._inputs = {each.name for each in graph.input}
        self._outputs = {each.name for each in graph.output}
        self._users: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self._users.setdefault(name, []).append(node)

    def selection(self, node: NodeProto) -> _Selection | None:
        """The selection that a ``Gather`` makes among the last layer's tokens, or None."""
        if node.op_type != "Gather":
            return None
        source, index = node.input
        axis, nodes = attributes_of(node).get("axis", 0), [node]
        if axis == 0:
            reshape = self._only_used_here(source, "Reshape")
            if reshape is None or not self._flattens(reshape.input[1]):
                return None
            nodes.append(reshape)
            source = reshape.input[0]
        elif axis != 1 or self.numbers(index) != [0] or self.dims(index):
            return None
        unpack = self._only_used_here(source, "Unpack")
        if unpack is not None:
            nodes.append(unpack)
            source = unpack.input[0]
        elif axis == 1:  # the texts of a causal model follow one another
            return None
        if not self._only_used_by(nodes, source):
            return None
        return _Selection(source, nodes, node.output[0], index if axis == 0 else "")

    def _flattens(self, shape: str) -> bool:
        """Whether a shape is (-1, columns)."""
        numbers = self.numbers(shape)
        return len(numbers) == 2 and numbers[0] == -1

    def _only_used_here(self, name: str, kind: str) -> NodeProto | None:
        """The node that computes a value, if it is of a kind and the value has one use."""
        node = self.producers.get(name)
        if node is None or node.op_type != kind or name in self._outputs:
            return None
        return node if len(self._users[name]) == 1 else None

    def _only_used_by(self, nodes: Iterable[NodeProto], *names: str) -> bool:
        ids = {id(node) for node in nodes}
        users = {id(user) for name in names for user in self._users.get(name, [])}
        return self._outputs.isdisjoint(names) and users <= ids

    def run(self, selection: _Selection) -> None:
        """Narrows what computes a selection, unless something stands in the way."""
        tail, entries = self._tail(selection)
        attentions = [self.producers[name] for name in entries if self._is_attention(name)]
        others = [name for name in entries if not self._is_attention(name)]
        kinds = {node.op_type for node in tail}
        if len(attentions) != 1 or not kinds & QUANTIZED or kinds & _INEXACT:
            return
        (attention,) = attentions
        masked = attention.op_type == "MaskedAttention"
        unpacked = any(node.op_type == "Unpack" for node in selection.nodes)
        if (
            masked != unpacked
            or not (masked or attention.input[_NUM_CAUSAL_INPUTS - 1 :])
            or not self._only_used_by(tail, attention.output[0])
            or not self._by_token().issuperset(others)
        ):
            return
        indexing = self._indexing(selection.rows)
        if indexing is None:
            return
        rows, axis = (_ROWS, 0) if masked else (selection.rows, 1)
        if masked:
            indexing.append(self._number_rows(selection, attention.input[4]))
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
        attention.input.append(rows)
        self._write(selection, indexing, gathers, axis=1 - axis)

    def _tail(self, selection: _Selection) -> tuple[list[NodeProto], set[str]]:
        """What only the selection needs, and computes each token by itself; and what it reads."""
        wanted: set[str] = {selection.hidden}
        tail: list[NodeProto] = []
        for node in reversed(self.graph.node):
            carried = self.carried(node)
            if wanted.isdisjoint(node.output) or not carried:
                continue
            if self._only_used_by([*selection.nodes, *tail], *filter(None, node.output)):
                tail.append(node)
                wanted.update(carried)
        computed = {name for node in tail for name in node.output}
        return tail, wanted - computed

    def _is_attention(self, name: str) -> bool:
        node = self.producers.get(name)
        return node is not None and node.op_type in _ATTENTIONS and node.output[0] == name

    def _by_token(self) -> set[str]:
        """Values that surely have a row for each token."""
        found: set[str] = set()
        for node in self.graph.node:
            carried = self.carried(node)
            if (
                node.op_type in {"Pack", *_ATTENTIONS}
                or (carried and found.issuperset(carried))
                or (node.op_type == "Gather" and node.input[1] == "input_ids")
            ):
                found.update(node.output)
        return found

    def _indexing(self, name: str) -> list[NodeProto] | None:
        """What computes rows from the graph's inputs, in order; None if it is something else."""
        if not name or name in self._inputs or self.is_constant(name):
            return []
        node = self.producers.get(name)
        if node is None or node.op_type not in _INDEXING:
            return None
        nodes: list[NodeProto] = []
        for source in node.input:
            before = self._indexing(source)
            if before is None:
                return None
            nodes += before
        return [*nodes, node]

    def _number_rows(self, selection: _Selection, lengths: str) -> NodeProto:
        """What tells which of the packed tokens are read."""
        if not selection.rows:
            return helper.make_node("FirstRows", [lengths], [_ROWS], domain=DOMAIN)
        inputs = [selection.rows, lengths, "input_ids"]
        return helper.make_node("PackedRows", inputs, [_ROWS], domain=DOMAIN)

    def _write(
        self,
        selection: _Selection,
        indexing: list[NodeProto],
        gathers: dict[str, NodeProto],
        *,
        axis: int,
    ) -> None:
        """Writes the nodes back: the rows are known first, and read as soon as they are computed.

        ``axis``: of the last layer's result, the one that has a single element.
        """
        moved = {id(node) for node in (*indexing, *selection.nodes)}
        nodes = list(indexing)
        for node in self.graph.node:
            if id(node) == id(selection.nodes[0]):
                inputs = [selection.hidden, _AXIS]
                nodes.append(helper.make_node("Squeeze", inputs, [selection.result]))
            elif id(node) not in moved:
                nodes.append(node)
            nodes += [gathers[name] for name in node.output if name in gathers]
        del self.graph.node[:]
        self.graph.node.extend(nodes)
        self.graph.initializer.append(helper.make_tensor(_AXIS, TensorProto.INT64, [1], [axis]))
