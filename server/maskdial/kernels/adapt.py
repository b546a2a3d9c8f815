"""Adapts a rewritten graph: what low-rank adapters add to its products.

The graph gets an input ``adapters``, int64 (batch,), with each text's adapter (`Adapter.address`),
or 0. ``AdapterRows`` (``src/adapters.cpp``) repeats it for each token. The kernels' products take
these rows and add ``(x A) B`` before their activations, and ``Adapt`` adds it to products of other
operators. A product is adapted if it has one row for each token, or for each token that the head
reads, and is named by its layer; `maskdial.bundle.adapter` knows layers by these names.
``AdaptLookup`` adds ``A[id] B`` to the rows that tokens look up, padding included.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from onnx import NodeProto, TensorProto, helper

from maskdial.bundle.adapter import Projection
from maskdial.bundle.manifest import TABLE_ROWS
from maskdial.kernels.graph import (
    ATTENTION,
    ATTENTION_OVER,
    DOMAIN,
    LENGTHS,
    NEW_TOKENS,
    Graph,
    attributes_of,
    restores_rows,
    rowwise_inputs,
)

ADAPTERS = "adapters"
"""The graph's input."""
_TOKEN_ROWS, _READ_ROWS = "adapters.tokens", "adapters.read"
_PADDED_ROWS = "adapters.padded"
_ATTENTIONS = frozenset({ATTENTION, *ATTENTION_OVER.values(), "MaskedAttention"})
_OTHER_ATTENTIONS = frozenset({"GroupQueryAttention", "MultiHeadAttention"})
_LOOKED_UP = frozenset({"input_ids", "position_ids", "token_type_ids"})
_INT8, _INT4, _BYTES = 3, 5, 4
_NORMED = 3
"""The index of the first weight behind a norm; else 1."""
_KERNELS = {
    "Linear": (1, _INT8, 2),
    "Linears": (1, _INT8, 3),
    "NormLinear": (_NORMED, _INT8, 2),
    "NormLinears": (_NORMED, _INT8, 3),
    "Linear4": (1, _INT4, 2),
    "NormLinear4": (_NORMED, _INT4, 2),
    "Linear8": (1, _BYTES, 2),
    "NormLinear8": (_NORMED, _BYTES, 2),
}
"""Where the operators have their weights (``src/projection.h``): the first one, the inputs of each,
and how many there may be."""
_FLOATS = frozenset({"MatMul", "Gemm"})
_QUERY_KEY_VALUE = 3
MODULES = "maskdial.modules"
"""The property of a product of floats that names its layers (`maskdial_export.tracing.graph`)."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A product of the kernels: its name, and the rows that it computes."""

    name: str
    rows: str


class Adapting:
    """The products of a graph that adapters may add to.

    It is made after the last layer was pruned, and before products are fused, which hides what
    their rows are.

    Args:
        graph: gets operators ``Adapt``.
        rows: the tokens that a pruned layer computes; empty if it computes all.
    """

    def __init__(self, graph: Graph, rows: str) -> None:
        self.projections: dict[str, Projection] = {}
        self._graph = graph
        self._pruned_rows = rows
        self._found: dict[str, _Found] = {}
        # Lookups come before texts are packed
        self._looked_up_rows = _PADDED_ROWS if "Pack" in graph.kinds else _TOKEN_ROWS
        kinds = _row_kinds(graph, rows)
        adapted: dict[int, NodeProto] = {}
        for node in graph.nodes:
            added = self._adapt_lookup(node)
            kind = kinds.get(node.input[0]) if node.input else None
            if kind is not None and node.op_type in _KERNELS:
                self._note(node, kind)
            elif kind is not None and added is None:
                added = self._adapt(node, kind)
            if added is not None:
                adapted[id(node)] = added
        if adapted:
            graph.set_nodes(each for node in graph.nodes for each in _with(node, adapted))

    def attach(self) -> None:
        """Gives the kernels' products, fused by now, their adapters, and the graph its input."""
        if not self.projections:
            return
        graph = self._graph
        for node in graph.nodes:
            if node.op_type in _KERNELS:
                self._attach(node)
        texts = helper.make_tensor_value_info(ADAPTERS, TensorProto.INT64, ["batch"])
        graph.proto.input.append(texts)
        counts = next((n for n in (NEW_TOKENS, LENGTHS) if self._is_count(n)), "")
        inputs = [ADAPTERS, "input_ids", *([counts] if counts else [])]
        nodes = [helper.make_node("AdapterRows", inputs, [_TOKEN_ROWS], domain=DOMAIN)]
        rest = list(graph.nodes)
        if any(_PADDED_ROWS in node.input for node in rest):
            inputs = [ADAPTERS, "input_ids"]
            nodes.append(helper.make_node("AdapterRows", inputs, [_PADDED_ROWS], domain=DOMAIN))
        if any(_READ_ROWS in node.input for node in rest):
            gather = helper.make_node("Gather", [_TOKEN_ROWS, self._rows], [_READ_ROWS], axis=0)
            made = next((i for i, node in enumerate(rest) if self._rows in node.output), -1)
            rest.insert(made + 1, gather)
        graph.set_nodes([*nodes, *rest])

    @property
    def _rows(self) -> str:
        return self._pruned_rows or "rows"

    def _is_count(self, name: str) -> bool:
        """Whether an input says how many tokens of each text follow one another."""
        packed = name == NEW_TOKENS or "Pack" in self._graph.kinds
        return packed and name in self._graph.inputs

    def _note(self, node: NodeProto, rows: str) -> None:
        """Notes what an operator of the kernels computes."""
        for scale in _scales(node):
            weight = self._graph.dims(node.input[list(node.input).index(scale) - 1])
            sizes = _sizes(node, weight, self._graph.dims(scale))
            name = scale.removesuffix(".scale")
            if name != scale and self._add(name, sizes, node.output[0]):
                self._found[scale] = _Found(name, rows)

    def _adapt(self, node: NodeProto, rows: str) -> NodeProto | None:
        """The operator that adds to a product of floats, whose result is renamed."""
        dims = self._graph.dims(node.input[1]) if len(node.input) > 1 else []
        name = _modules(node)
        if node.op_type not in _FLOATS or len(dims) != 2 or not name:
            return None
        transposed = attributes_of(node).get("transB", 0)
        result = node.output[0]
        if not self._add(name, (dims[1], dims[0]) if transposed else (dims[0], dims[1]), result):
            return None
        return _added("Adapt", node, node.input[0], rows, name)

    def _adapt_lookup(self, node: NodeProto) -> NodeProto | None:
        """The operator that adds to rows of a table, which may be integers with a scale each, or
        with one for each block.
        """
        if restores_rows(node):
            return self._adapt_rows(node)
        scales = self._graph.producer(node.input[1], "Gather") if node.op_type == "Mul" else None
        lookup, name = (node, _modules(node)) if scales is None else (scales, "")
        if lookup.op_type != "Gather" or _ids(self._graph, lookup) != "input_ids":
            return None
        dims = self._graph.dims(lookup.input[0])
        if scales is not None:
            restored = self._graph.producer(node.input[0], "Cast")
            integers = restored and self._graph.producer(restored.input[0], "Gather")
            if integers is None or integers.input[1] != scales.input[1]:
                return None
            dims = self._graph.dims(integers.input[0])
            name = scales.input[0].removesuffix(".scale")
        if len(dims) != 2 or not name or not self._add(name, (dims[0], dims[1]), node.output[0]):
            return None
        return _added("AdaptLookup", node, lookup.input[1], self._looked_up_rows, name)

    def _adapt_rows(self, node: NodeProto) -> NodeProto | None:
        """The operator that adds to rows of a table in blocks."""
        lookup = node
        while lookup.op_type != "Gather":
            lookup = self._graph.producers[lookup.input[0]]
        name = node.output[0].removeprefix(TABLE_ROWS).rpartition(".")[0]
        if _ids(self._graph, lookup) != "input_ids":
            return None
        sizes = self._graph.dims(lookup.input[0])[0], self._graph.integers(node.input[1])[-1]
        if not self._add(name, sizes, node.output[0]):
            return None
        return _added("AdaptLookup", node, lookup.input[1], self._looked_up_rows, name)

    def _add(self, product: str, sizes: tuple[int, int], result: str) -> bool:
        """Adds the layers that a product computes; False if they are not known.

        Its name has those of its layers.
        """
        num_inputs, width = sizes
        layers = product.split(",")
        widths = [width] if len(layers) == 1 else self._widths(result, len(layers), width)
        if len(widths) != len(layers) or not self.projections.keys().isdisjoint(layers):
            return False
        first = 0
        for layer, its in zip(layers, widths, strict=True):
            self.projections[layer] = Projection(num_inputs, its, product, first, width)
            first += its
        return True

    def _widths(self, result: str, num_layers: int, width: int) -> list[int]:
        """The columns of query, key and value, which one product computes; else empty."""
        while True:
            users = self._graph.users(result)
            if len(users) != 1 or num_layers != _QUERY_KEY_VALUE:
                return []
            if users[0].op_type != "Add":
                break
            result = users[0].output[0]
        heads = attributes_of(users[0])
        num_heads, num_keys = heads.get("num_heads", 0), heads.get("kv_num_heads", 0)
        attends = users[0].op_type in _ATTENTIONS | {"GroupQueryAttention"}
        if not attends or not num_keys or width % (num_heads + 2 * num_keys):
            return []
        head = width // (num_heads + 2 * num_keys)
        return [num_heads * head, num_keys * head, num_keys * head]

    def _attach(self, node: NodeProto) -> None:
        first, size, most = _KERNELS[node.op_type]
        scales = list(_scales(node))
        found = [self._found[scale] for scale in scales if scale in self._found]
        if not found:
            return
        # An adapter has nothing for a name that is no projection's.
        lines = [self._found[each].name if each in self._found else each for each in scales]
        node.attribute.append(helper.make_attribute("projections", "\n".join(lines)))
        missing = first + size * most - len(node.input)
        node.input.extend([*[""] * missing, found[0].rows])


def _added(op_type: str, node: NodeProto, source: str, rows: str, name: str) -> NodeProto:
    """The operator that adds to a node's result, which is renamed."""
    result = node.output[0]
    node.output[0] = f"{result}.product"
    inputs = [source, node.output[0], rows]
    return helper.make_node(op_type, inputs, [result], domain=DOMAIN, projections=name)


def _with(node: NodeProto, adapted: dict[int, NodeProto]) -> Iterator[NodeProto]:
    yield node
    if id(node) in adapted:
        yield adapted[id(node)]


def _scales(node: NodeProto) -> Iterator[str]:
    """The names of the scales of an operator's weights."""
    first, size, most = _KERNELS[node.op_type]
    for index in range(first + 1, min(len(node.input), first + size * most), size):
        if node.input[index]:
            yield node.input[index]


def _sizes(node: NodeProto, weight: list[int], scale: list[int]) -> tuple[int, int]:
    """The inputs and outputs of a product of int8 or int4 weights."""
    attributes = attributes_of(node)
    if node.op_type in ("Linear4", "Linear8"):
        return attributes["num_inputs"], weight[0]
    return weight[1 if attributes["transposed"] else 0], scale[-1]


def _modules(node: NodeProto) -> str:
    """The layers that a product of floats computes, with commas; empty if they are not known."""
    return next((each.value for each in node.metadata_props if each.key == MODULES), "")


def _row_kinds(graph: Graph, rows: str) -> dict[str, str]:
    """Values with a row for each token, or for each token that is read, by the name of the rows'
    adapters.
    """
    kinds: dict[str, str] = {}
    for node in graph.nodes:
        kind = _kind(graph, node, rows, kinds)
        if kind:
            kinds.update((name, kind) for name in node.output if name)
    return kinds


def _ids(graph: Graph, gather: NodeProto) -> str:
    """The graph's input whose rows of a table a ``Gather`` looks up; empty if it is none."""
    table, index = gather.input
    where = graph.producer(index, "Where")
    index = where.input[1] if where is not None else index
    return index if graph.is_constant(table) and index in _LOOKED_UP & graph.inputs else ""


def _kind(graph: Graph, node: NodeProto, rows: str, kinds: dict[str, str]) -> str:
    inputs, kind = list(node.input), node.op_type
    if kind in _ATTENTIONS:
        return _READ_ROWS if rows and rows in inputs else _TOKEN_ROWS
    if kind == "Pack" or kind in _OTHER_ATTENTIONS:
        return _TOKEN_ROWS
    if kind == "Gather":
        if _ids(graph, node):
            return _TOKEN_ROWS
        return _READ_ROWS if inputs[1] in {rows or "rows"} and inputs[0] in kinds else ""
    if restores_rows(node):
        return _TOKEN_ROWS
    if kind in ("Reshape", "Squeeze", "Unsqueeze"):
        return kinds.get(inputs[0], "")
    sources = inputs[:1] if kind == "Gemm" else rowwise_inputs(graph, node)
    found = {kinds.get(name, "") for name in sources}
    return found.pop() if len(found) == 1 else ""
