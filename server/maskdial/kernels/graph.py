"""Graph: a view of an ONNX graph, which the rewrites share."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from maskdial.bundle.manifest import TABLE_ROWS, CacheInteger

DOMAIN = "maskdial"
"""The domain of the kernels' operators."""

BLOCK_PRODUCTS = frozenset({"Linear4", "Linear8"})
"""Products of weights of 4 and 8 bits in blocks."""
QUANTIZED = BLOCK_PRODUCTS | {"Linear"}
"""Products of quantized weights, before they are fused with others."""
ATTENTION = "CausalAttention"
ATTENTION_OVER: dict[CacheInteger, str] = {
    "int8": "Int8CausalAttention",
    "int16": "Int16CausalAttention",
}
"""The same over a KV cache of integers."""
NEW_TOKENS_INPUT = 10
"""The index of ``new_tokens`` among ``CausalAttention``'s inputs; ``ahead`` and ``rows`` follow."""
NEW_TOKENS = "new_tokens"
"""The input with each row's number of tokens, of a causal graph whose rows have no padding."""
AHEAD = "tokens_ahead"
"""The input of such a graph with how many of the tokens behind it in its row each token sees."""
LENGTHS = "lengths"
"""The input with each row's number of tokens, where padding follows them."""
RECURRENT = frozenset({"CausalConv", "LinearAttention"})
"""The operators that update a state."""
RESIDUAL_NORMS = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})
# Operators that compute each token of their first input by itself, with constants.
_ROWWISE = frozenset(
    {
        "BiasGelu",
        "Cast",
        "Erf",
        "FastGelu",
        "Gelu",
        "Identity",
        "LayerNormalization",
        "Linear",
        "Linear4",
        "Linear8",
        "MatMul",
        "MatMulNBits",
        "QuickGelu",
        "Relu",
        "Sigmoid",
        "SimplifiedLayerNormalization",
        "Tanh",
    }
)
# Operators of several inputs, which broadcast.
_ELEMENTWISE = frozenset({"Add", "Div", "Mul", "Pow", "Sub"})


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """The values of a node's attributes by name."""
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


class Graph:
    """The nodes of a graph, the producer and the users of each value, and the constants.

    Attributes:
        proto: the graph itself; rewrites change its nodes with `replace` or `set_nodes`.
        nodes: its nodes, in order.
        inputs: the names of its inputs.
        outputs: the names of its outputs.
        producers: the node that computes each value.
    """

    nodes: list[NodeProto]
    inputs: frozenset[str]
    outputs: frozenset[str]
    producers: dict[str, NodeProto]

    def __init__(self, proto: GraphProto) -> None:
        self.proto = proto
        self._shapes = {
            value.name: tuple(int(dim.dim_value) for dim in value.type.tensor_type.shape.dim)
            for value in proto.value_info
        }
        self._index()

    def _index(self) -> None:
        self.inputs = frozenset(value.name for value in self.proto.input)
        self.outputs = frozenset(value.name for value in self.proto.output)
        self.nodes = list(self.proto.node)  # protobuf's objects, and their ids, live as long
        self.producers = {name: node for node in self.nodes for name in node.output if name}
        self._initializers = {each.name: each for each in self.proto.initializer}
        self._users: dict[str, list[NodeProto]] = {}
        for node in self.nodes:
            for name in filter(None, node.input):  # an input that is left out has no name
                self._users.setdefault(name, []).append(node)

    @property
    def kinds(self) -> set[str]:
        """The operators of all nodes."""
        return {node.op_type for node in self.nodes}

    def set_nodes(
        self, nodes: Iterable[NodeProto], initializers: Iterable[TensorProto] = ()
    ) -> None:
        """Replaces all nodes, and adds initializers."""
        nodes = list(nodes)
        del self.proto.node[:]
        self.proto.node.extend(nodes)
        self.proto.initializer.extend(initializers)
        self._index()

    def replace(self, replacements: Mapping[int, NodeProto | None]) -> None:
        """Replaces nodes, by id; None removes one."""
        nodes = [replacements.get(id(node), node) for node in self.nodes]
        self.set_nodes(node for node in nodes if node is not None)

    def needed_nodes(self) -> list[NodeProto]:
        """The nodes that an output needs, in order."""
        needed, kept = set(self.outputs), []
        for node in reversed(self.nodes):
            if not needed.isdisjoint(node.output):
                needed.update(node.input)
                kept.append(node)
        return kept[::-1]

    def remove_unused(self) -> None:
        """Removes the nodes and initializers that no output needs."""
        kept = self.needed_nodes()
        used = {name for node in kept for name in node.input}
        initializers = [each for each in self.proto.initializer if each.name in used]
        del self.proto.initializer[:]
        self.set_nodes(kept, initializers)

    def remove_input(self, name: str) -> None:
        """Removes an input that no node reads."""
        kept = [value for value in self.proto.input if value.name != name]
        del self.proto.input[:]
        self.proto.input.extend(kept)
        self._index()

    def producer(self, name: str, kind: str) -> NodeProto | None:
        """The node that computes a value, if it is of an operator."""
        node = self.producers.get(name)
        return node if node is not None and node.op_type == kind else None

    def users(self, name: str) -> list[NodeProto]:
        """The nodes that read a value, once for each input."""
        return self._users.get(name, [])

    def num_uses(self, name: str) -> int:
        """The number of inputs that read a value, and of graph outputs that are it."""
        return len(self.users(name)) + (name in self.outputs)

    def only_user(self, name: str) -> NodeProto | None:
        """The node that is the only use of a value."""
        return self.users(name)[0] if self.users(name) and self.num_uses(name) == 1 else None

    def is_constant(self, name: str, or_missing: bool = False) -> bool:
        """Whether a value is an initializer."""
        return name in self._initializers if name else or_missing

    def all_constant(self, names: Iterable[str]) -> bool:
        """Whether all of some inputs are initializers or missing."""
        return all(self.is_constant(name, True) for name in names)

    def initializer(self, name: str) -> TensorProto | None:
        """The initializer of a name."""
        return self._initializers.get(name)

    def dims(self, name: str) -> list[int]:
        """The dimensions of an initializer; empty for any other value."""
        return list(self._initializers[name].dims) if name in self._initializers else []

    def rank(self, name: str) -> int:
        """The number of dimensions of an intermediate value; 0 if the graph does not state it."""
        return len(self._shapes.get(name, ()))

    def width(self, name: str) -> int:
        """The last dimension of an intermediate value; 0 if the graph does not state it."""
        return (self._shapes.get(name) or (0,))[-1]

    def integers(self, name: str) -> list[int]:
        """The values of an initializer of integers that is stored in the graph; else empty."""
        return [int(number) for number in self._numbers(name)]

    def scalar(self, name: str) -> float | None:
        """The value of an initializer of one element that is stored in the graph."""
        numbers = self._numbers(name)
        return float(numbers[0]) if len(numbers) == 1 else None

    def _numbers(self, name: str) -> NDArray[Any]:
        tensor = self._initializers.get(name)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            return np.empty(0)
        numbers: NDArray[Any] = numpy_helper.to_array(tensor).reshape(-1)
        return numbers


def restores_rows(node: NodeProto) -> bool:
    """Whether a node ends the lookup of each token's row in a table in blocks."""
    return bool(node.op_type == "Reshape" and node.output[0].startswith(TABLE_ROWS))


def rowwise_inputs(graph: Graph, node: NodeProto) -> list[str]:
    """The inputs that have a row for each token if the results have, and the other way round;
    empty for an operator that mixes tokens, or that is not known.
    """
    kind, inputs = node.op_type, list(node.input)
    attributes = attributes_of(node)
    if kind in RESIDUAL_NORMS or kind == "AddNorm":
        return inputs[:2] if graph.all_constant(inputs[2:]) else []
    if kind in _ROWWISE:
        fits = attributes.get("axis", -1) == -1 and graph.all_constant(inputs[1:])
        fits = fits and attributes.get("to", TensorProto.FLOAT) == TensorProto.FLOAT
        if kind == "MatMul":
            fits = fits and len(graph.dims(inputs[1])) == 2
        return inputs[:1] if fits and not graph.is_constant(inputs[0]) else []
    if kind in _ELEMENTWISE:
        constants = [name for name in inputs if graph.is_constant(name)]
        if all(len(graph.dims(name)) <= 1 for name in constants):
            return [name for name in inputs if name not in constants]
    if kind == "Split":
        return inputs[:1] if attributes.get("axis", 0) in (-1, 2) else []
    return []
