"""Rewrites attention that adds scores by the distance of two tokens, as DeBERTa's second and third
versions do (He et al., "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", 2021).

Such attention is written out in the graph. ``MaskedAttention`` (``src/masked_attention.cpp``) takes
its place, with tables of the keys and queries of positions (``src/relative.h``). These depend on
the weights alone, so a graph of their own, `Positions.tables`, computes them once, when the model
is loaded.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from maskdial.kernels.graph import DOMAIN, LENGTHS, QUANTIZED, Graph, attributes_of
from maskdial.kernels.varlen import is_distance, is_token_mask

# As src/processor.h has them.
_BLOCK, _LANES, _MAX_HEAD = 64, 16, 512
_MAX_INTEGER = 2047.0
_MIN_MAGNITUDE = 1e-30
_MASKED = -10_000  # scores this low have no weight
_FARTHEST = 1 << 16
"""Tokens; positions are known up to this distance, and are the same beyond."""
_OPSETS = helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)
_REACHES = "positions.reaches"

_Integers = NDArray[np.int64]
_UNKNOWN: _Integers = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Side:
    """The scores of queries by keys of positions, or of keys by queries of positions.

    Attributes:
        rows: a row for each position, (1, positions, num_heads * head_size).
        index: which of them a query and a key need, int64 (1, length, length).
    """

    rows: str
    index: str


@dataclass(frozen=True, slots=True)
class _Heads:
    """A value by heads: (batch * num_heads, length, size) of (batch, length, num_heads * size)."""

    source: str
    num_heads: int
    size: int


@dataclass(frozen=True, slots=True)
class _Attention:
    """Attention as the graph has it; scores are divided by ``scale``."""

    query: _Heads
    key: _Heads
    value: _Heads
    scale: float
    keys: _Side | None
    queries: _Side | None


def attend_by_distance(graph: Graph) -> bytes:
    """Rewrites a graph in place; returns one without inputs, which computes the tensors that the
    rewritten graph lacks; empty if it lacks none.
    """
    found = [(node, each) for node in graph.nodes if (each := _attention(graph, node))]
    known: dict[str, _Integers] = {}
    reaches = [_reaches(graph, attention, known) for _, attention in found]
    first = next((each for each in reaches if each.size), None)
    if first is None:
        return b""
    tables = _Tables(graph)
    replaced: dict[int, NodeProto | None] = {
        id(node): tables.attend(attention, node.output[0], len(first) - 1)
        for (node, attention), each in zip(found, reaches, strict=True)
        if np.array_equal(each, first)
    }
    graph.replace(replaced)
    constant = numpy_helper.from_array(first.astype(np.int32), _REACHES)
    graph.set_nodes(graph.nodes, [constant, *tables.missing])
    graph.remove_unused()
    return tables.model


class _Tables:
    """Writes the graph that computes the tables."""

    def __init__(self, graph: Graph) -> None:
        self.missing: list[TensorProto] = []
        self._graph = graph
        self._integers = not QUANTIZED.isdisjoint(graph.kinds)
        self._nodes: dict[str, NodeProto] = {}
        self._constants: dict[str, TensorProto] = {}
        self._outputs: list[str] = []

    def attend(self, attention: _Attention, output: str, span: int) -> NodeProto:
        """The kernels' operator for an attention."""
        heads = attention.query
        inputs = [heads.source, attention.key.source, attention.value.source, "", LENGTHS, ""]
        columns = np.arange(-(-(2 * span + 1) // _BLOCK) * _BLOCK)
        for side, order in ((attention.keys, 2 * span - columns), (attention.queries, columns)):
            if side is None:
                inputs += ["", ""]
            else:
                order = np.clip(order, 0, 2 * span - 1)
                inputs += self._table(side.rows, order, heads.num_heads, heads.size)
        return helper.make_node(
            "MaskedAttention",
            [*inputs, _REACHES],
            [output],
            domain=DOMAIN,
            num_heads=heads.num_heads,
            scale=1 / attention.scale,
            window=0,
            packed=0,
            integers=int(self._integers),
        )

    @property
    def model(self) -> bytes:
        """The graph, serialized."""
        outputs = [helper.make_empty_tensor_value_info(name) for name in self._outputs]
        proto = helper.make_graph(
            list(self._nodes.values()), "tables", [], outputs, list(self._constants.values())
        )
        opsets = [*_OPSETS, helper.make_opsetid(DOMAIN, 1)]
        model = helper.make_model(proto, opset_imports=opsets, ir_version=10)
        return bytes(model.SerializeToString())

    def _table(self, rows: str, order: _Integers, num_heads: int, size: int) -> list[str]:
        """The names of a table of some rows of positions, and of its factors."""
        for node in _nodes_of(self._graph, rows) or []:
            self._nodes[node.output[0]] = node
            for name in node.input:
                if (constant := self._graph.initializer(name)) is not None:
                    self._constants[name] = constant
        integers = self._integers and size <= _MAX_HEAD
        padded, num_blocks = -(-size // _LANES) * _LANES, len(order) // _BLOCK
        sorted_rows = self._node("Gather", rows, self._ids(order), axis=1)
        heads = self._node("Reshape", sorted_rows, self._ids([len(order), num_heads, size]))
        heads = self._node("Pad", heads, self._ids([0, 0, 0, 0, 0, padded - size]))
        factors = ""
        if integers:
            magnitude = self._node("Abs", heads)
            peak = self._node("ReduceMax", magnitude, self._ids([-1]), keepdims=1)
            inverse = self._node("Div", self._float(_MAX_INTEGER), self._most(peak))
            heads = self._node("Round", self._node("Mul", heads, inverse))
            heads = self._node("Cast", heads, to=TensorProto.INT16)
            steps = self._node("Div", peak, self._float(_MAX_INTEGER))
            steps = self._node("Transpose", steps, perm=[1, 0, 2])
            shape = [num_heads, len(order)]
            factors = self._give(self._node("Reshape", steps, self._ids(shape)), shape, np.float32)
        pair = 2 if integers else 1
        shape = [num_blocks, _BLOCK, num_heads, padded // pair, pair]
        heads = self._node("Reshape", heads, self._ids(shape))
        table = self._node("Transpose", heads, perm=[2, 0, 3, 1, 4])
        shape = [num_heads, num_blocks, padded // pair, _BLOCK, pair]
        return [self._give(table, shape, np.int16 if integers else np.float32), factors]

    def _most(self, peak: str) -> str:
        """Peaks of which an inverse is finite."""
        return self._node("Max", peak, self._float(_MIN_MAGNITUDE))

    def _node(self, kind: str, *inputs: str, **attributes: object) -> str:
        output = f"table.{len(self._nodes)}"
        self._nodes[output] = helper.make_node(kind, inputs, [output], **attributes)
        return output

    def _ids(self, numbers: _Integers | list[int]) -> str:
        return self._constant(np.asarray(numbers, np.int64))

    def _float(self, number: float) -> str:
        return self._constant(np.array(number, np.float32))

    def _constant(self, array: NDArray[np.int64] | NDArray[np.float32]) -> str:
        name = f"constant.{len(self._constants)}"
        self._constants[name] = numpy_helper.from_array(array, name)
        return name

    def _give(self, name: str, shape: list[int], dtype: type[np.generic]) -> str:
        """Makes a value an output, and a tensor that the rewritten graph lacks."""
        self._outputs.append(name)
        tensor = TensorProto(
            name=name,
            dims=shape,
            data_type=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)),
            data_location=TensorProto.EXTERNAL,
        )
        tensor.external_data.add(key="location", value="computed when the model is loaded")
        self.missing.append(tensor)
        return name


def _nodes_of(graph: Graph, name: str, given: str = "") -> list[NodeProto] | None:
    """The nodes that compute a value from constants and perhaps one given value, in order; None if
    it depends on anything else.
    """
    needed, nodes = {name}, []
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.output) and given not in node.output:
            needed.update(filter(None, node.input))
            nodes.append(node)
    computed = {output for node in nodes for output in node.output}
    rest = needed - computed - {given}
    return nodes[::-1] if all(map(graph.is_constant, rest)) else None


def _attention(graph: Graph, node: NodeProto) -> _Attention | None:
    """The attention that ends with a node, or None."""
    names = _chain(graph, node.output[0], "Reshape", "Transpose", "Reshape", "MatMul")
    if node.op_type != "Reshape" or names is None:
        return None
    weights, value = names.input
    softmax = _chain(graph, weights, "Reshape", "Softmax")
    if softmax is None or attributes_of(softmax).get("axis", -1) != -1:
        return None
    where = graph.producer(softmax.input[0], "Where")
    if where is None or not _masks_padding(graph, where):
        return None
    scores = _chain(graph, where.input[2], "Reshape", "Add")
    if scores is None:
        return None
    return _from_scores(graph, _terms(graph, scores), _heads(graph, value))


def _terms(graph: Graph, add: NodeProto) -> list[str]:
    """The terms of a sum of sums."""
    terms: list[str] = []
    for name in add.input:
        inner = graph.producer(name, "Add")
        terms += [name] if inner is None else _terms(graph, inner)
    return terms


def _from_scores(graph: Graph, terms: list[str], value: _Heads | None) -> _Attention | None:
    """The attention of some scores."""
    content = [node for name in terms if (node := graph.producer(name, "MatMul")) is not None]
    if len(content) != 1 or value is None:
        return None
    divided = graph.producer(content[0].input[1], "Div")
    transpose = graph.producer(divided.input[0], "Transpose") if divided is not None else None
    if divided is None or transpose is None or not _swaps(transpose):
        return None
    query, key = _heads(graph, content[0].input[0]), _heads(graph, transpose.input[0])
    scale = graph.scalar(divided.input[1])
    if query is None or key is None or not scale:
        return None
    if {(each.num_heads, each.size) for each in (key, value)} != {(query.num_heads, query.size)}:
        return None
    keys = queries = None
    for name in terms:
        if name == content[0].output[0]:
            continue
        term = graph.producer(name, "Div")
        if term is None or graph.scalar(term.input[1]) != scale:
            return None
        turned = graph.producer(term.input[0], "Transpose")
        source, heads = (query, term.input[0]), content[0].input[0]
        if turned is not None and _swaps(turned):
            source, heads = (key, turned.input[0]), transpose.input[0]
        side = _side(graph, source[1], heads, query)
        if side is None or (keys if turned is None else queries) is not None:
            return None
        if turned is None:
            keys = side
        else:
            queries = side
    return _Attention(query, key, value, scale, keys, queries)


def _side(graph: Graph, name: str, content: str, heads: _Heads) -> _Side | None:
    """The products of content, by heads, and positions, of which some are gathered."""
    gather = graph.producer(name, "GatherElements")
    product = graph.producer(gather.input[0], "FusedMatMul") if gather is not None else None
    if gather is None or product is None or product.input[0] != content:
        return None
    expand = graph.producer(gather.input[1], "Expand")
    repeated = _chain(graph, product.input[1], "Tile", "Expand")
    if expand is None or repeated is None or attributes_of(gather).get("axis") not in (-1, 2):
        return None
    settings = {"transA": 0, "alpha": 1.0} | attributes_of(product)
    if settings != {"transA": 0, "alpha": 1.0, "transB": 1}:
        return None
    positions = _heads(graph, repeated.input[0])
    if positions is None or (positions.num_heads, positions.size) != (heads.num_heads, heads.size):
        return None
    if _nodes_of(graph, positions.source) is None:
        return None
    return _Side(positions.source, expand.input[0])


def _heads(graph: Graph, name: str) -> _Heads | None:
    """What a value has by heads, or None."""
    last = graph.producer(name, "Reshape")
    transpose = graph.producer(last.input[0], "Transpose") if last is not None else None
    first = graph.producer(transpose.input[0], "Reshape") if transpose is not None else None
    if last is None or transpose is None or first is None:
        return None
    split, joined = _shape(graph, first.input[1]), _shape(graph, last.input[1])
    if attributes_of(transpose)["perm"] != [0, 2, 1, 3] or (len(split), len(joined)) != (4, 3):
        return None
    num_heads, size = split[2], joined[2]
    known = num_heads > 0 and size > 0 and split[3] in (-1, size) and joined[0] in (-1, num_heads)
    return _Heads(first.input[0], num_heads, size) if known else None


def _shape(graph: Graph, name: str) -> list[int]:
    """The sizes of a shape; 0 for one that is not constant."""
    node = graph.producer(name, "Concat")
    if node is None:
        return graph.integers(name)
    return [size for part in node.input for size in graph.integers(part) or [0]]


def _masks_padding(graph: Graph, where: NodeProto) -> bool:
    """Whether a node masks the scores of tokens beyond the texts' lengths, and no others."""
    masked = graph.scalar(where.input[1])
    both = _chain(graph, where.input[0], "Not", "Cast", "Mul")
    if masked is None or masked > _MASKED or both is None:
        return False
    return all(is_token_mask(graph, name) for name in both.input)


def _swaps(transpose: NodeProto) -> bool:
    return bool(attributes_of(transpose).get("perm") == [0, 2, 1])


def _chain(graph: Graph, name: str, *kinds: str) -> NodeProto | None:
    """The last of some nodes, each of which computes the first input of the one before."""
    node = None
    for kind in kinds:
        node = graph.producer(name, kind)
        if node is None:
            return None
        name = node.input[0]
    return node


def _reaches(graph: Graph, attention: _Attention, known: dict[str, _Integers]) -> _Integers:
    """For each column of positions from the middle on, the least distance that it is for; empty if
    the graph computes positions in another way. ``known`` has indices that were computed.
    """
    reaches: list[_Integers] = []
    for side, turn in ((attention.keys, -1), (attention.queries, 1)):
        if side is None:
            continue
        if side.index not in known:
            known[side.index] = _index(graph, side.index)
        index = known[side.index][::turn]
        behind, ahead = index[_FARTHEST:], index[_FARTHEST::-1]
        if not index.size or behind[0] < 1:
            return _UNKNOWN
        span = int(behind[0])
        steps = span - behind
        rises = set(np.diff(steps).tolist()) <= {0, 1} and steps[-1] == span
        if not rises or not np.array_equal(ahead, np.minimum(span + steps, 2 * span - 1)):
            return _UNKNOWN
        reaches.append(np.searchsorted(steps, np.arange(span + 1)))
    same = bool(reaches) and all(np.array_equal(each, reaches[0]) for each in reaches)
    return reaches[0] if same else _UNKNOWN


def _index(graph: Graph, name: str) -> _Integers:
    """The indices of positions, for a row from `_FARTHEST` before a column to as far behind it;
    empty if they depend on more than the distance.
    """
    for node in graph.nodes:
        nodes = _nodes_of(graph, name, node.output[0]) if is_distance(graph, node) else None
        if nodes:
            distances = np.arange(-_FARTHEST, _FARTHEST + 1)
            return _evaluate(graph, nodes, node.output[0], name, distances)
    return _UNKNOWN


def _evaluate(
    graph: Graph, nodes: list[NodeProto], given: str, result: str, values: _Integers
) -> _Integers:
    """What some nodes make of a value, in NumPy."""
    names = {name for node in nodes for name in node.input}
    proto = helper.make_graph(
        nodes,
        "index",
        [helper.make_tensor_value_info(given, TensorProto.INT64, [1, None])],
        [helper.make_empty_tensor_value_info(result)],
        [each for name in names if (each := graph.initializer(name)) is not None],
    )
    model = helper.make_model(proto, opset_imports=_OPSETS[:1], ir_version=10)
    with np.errstate(all="ignore"):  # the logarithm of 0, which is not used
        (index,) = ReferenceEvaluator(model).run(None, {given: values[None]})
    return np.asarray(index, np.int64).reshape(-1)
