"""What those who rewrite graphs share."""

from collections.abc import Iterable
from typing import Any

from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from maskdial.bundle.manifest import CacheInteger

DOMAIN = "maskdial"
"""The domain of our operators."""

QUANTIZED = frozenset({"Linear", "Linear4"})
"""Products of int8 and int4 weights, before they are joined to others."""
ATTENTION = "CausalAttention"
ATTENTION_OVER: dict[CacheInteger, str] = {
    "int8": "Int8CausalAttention",
    "int16": "Int16CausalAttention",
}
"""The same over a KV cache of integers."""
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
        "MatMul",
        "MatMulNBits",
        "QuickGelu",
        "Relu",
        "Sigmoid",
        "SimplifiedLayerNormalization",
        "Tanh",
    }
)
# Those of several inputs, which broadcast.
_ELEMENTWISE = frozenset({"Add", "Div", "Mul", "Pow", "Sub"})


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """The values of a node's attributes by name."""
    return {each.name: helper.get_attribute_value(each) for each in node.attribute}


class Values:
    """The values of a graph: constants, and what computes the others.

    Attributes:
        graph: whose they are.
        producers: the node that computes each one.
    """

    def __init__(self, graph: GraphProto) -> None:
        self.graph = graph
        self.producers = {name: node for node in graph.node for name in node.output if name}
        self._initializers = {each.name: each for each in graph.initializer}

    def carried(self, node: NodeProto) -> list[str]:
        """The inputs that have a row for each token if the results have, and the other way round;
        empty for an operator that mixes tokens, or that is not known.
        """
        kind, inputs = node.op_type, list(node.input)
        attributes = attributes_of(node)
        if kind in RESIDUAL_NORMS or kind == "AddNorm":
            return inputs[:2] if self.all_constant(inputs[2:]) else []
        if kind in _ROWWISE:
            fits = attributes.get("axis", -1) == -1 and self.all_constant(inputs[1:])
            fits = fits and attributes.get("to", TensorProto.FLOAT) == TensorProto.FLOAT
            if kind == "MatMul":
                fits = fits and len(self.dims(inputs[1])) == 2
            return inputs[:1] if fits and not self.is_constant(inputs[0]) else []
        if kind in _ELEMENTWISE:
            constants = [name for name in inputs if self.is_constant(name)]
            if all(len(self.dims(name)) <= 1 for name in constants):
                return [name for name in inputs if name not in constants]
        if kind == "Split":
            return inputs[:1] if attributes.get("axis", 0) in (-1, 2) else []
        return []

    def is_constant(self, name: str, or_missing: bool = False) -> bool:
        """Whether a value is an initializer."""
        return name in self._initializers if name else or_missing

    def all_constant(self, names: Iterable[str]) -> bool:
        """Whether all of some inputs are initializers or missing."""
        return all(self.is_constant(name, True) for name in names)

    def dims(self, name: str) -> list[int]:
        """The dimensions of an initializer; empty for any other value."""
        return list(self._initializers[name].dims) if name in self._initializers else []

    def numbers(self, name: str) -> list[int]:
        """The values of an initializer of integers that is stored in the graph; else empty."""
        tensor = self._initializers.get(name)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            return []
        return [int(number) for number in numpy_helper.to_array(tensor).reshape(-1)]
