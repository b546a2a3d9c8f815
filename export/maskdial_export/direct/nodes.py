"""A graph under construction: its nodes, and its small constants."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

_MICROSOFT = frozenset(
    {
        *("FusedMatMul", "GroupQueryAttention", "MatMulNBits", "MatMulIntegerToFloat"),
        *("BiasGelu", "LinearAttention", "MultiHeadAttention", "RotaryEmbedding"),
        "SkipSimplifiedLayerNormalization",
    }
)
"""ONNX Runtime's own operators (docs/ContribOperators.md)."""
OPSET, IR_VERSION = 20, 10
MODULES = "maskdial.modules"
"""The metadata by which adapters know the module of a product or a lookup of floats."""


class Nodes:
    """Adds nodes one after the other, and gives their results names."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self.widths: dict[str, int] = {}
        self._shared: set[str] = set()

    def add(
        self,
        kind: str,
        inputs: Sequence[str],
        *,
        output: str | None = None,
        modules: str | None = None,
        **attributes: Any,
    ) -> str:
        """Adds a node with one result, whose name is returned."""
        name = output or f"{kind}.{len(self.nodes)}"
        self.add_all(kind, inputs, [name], modules=modules, **attributes)
        return name

    def add_all(
        self,
        kind: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        modules: str | None = None,
        **attributes: Any,
    ) -> None:
        """Adds a node with several results; an empty name is none."""
        node = helper.make_node(
            kind,
            inputs,
            outputs,
            name=f"node.{len(self.nodes)}",
            domain="com.microsoft" if kind in _MICROSOFT else "",
            **attributes,
        )
        if modules is not None:
            node.metadata_props.add(key=MODULES, value=modules)
        self.nodes.append(node)

    def once(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """A node that several others read, added where the first of them asks for it."""
        if output not in self._shared:
            self._shared.add(output)
            self.add(kind, inputs, output=output, **attributes)
        return output

    def dimension(self, axis: int) -> str:
        """The batch, or the length, of ``input_ids``."""
        return self.once("Shape", ["input_ids"], f"dimension.{axis}", start=axis, end=axis + 1)

    def split_heads(self, source: str, size: int) -> str:
        """Rows as heads of some columns: (batch, length, num_heads, size)."""
        minus = self.constant("minus_one", np.array([-1]))
        columns = self.constant(f"head_size.{size}", np.array([size]))
        dims = [self.dimension(0), self.dimension(1), minus, columns]
        shape = self.once("Concat", dims, f"split_heads.{size}", axis=0)
        return self.add("Reshape", [source, shape], allowzero=1)

    def join_heads(self, heads: str) -> str:
        """(batch, length, columns of all heads)."""
        minus = self.constant("minus_one", np.array([-1]))
        dims = [self.dimension(0), self.dimension(1), minus]
        shape = self.once("Concat", dims, "join_heads", axis=0)
        return self.add("Reshape", [heads, shape], allowzero=1)

    def scaled(self, source: str, name: str, factor: float | None) -> str:
        """A value times a number, which has a name; None: as it is."""
        return source if factor is None else self.add("Mul", [source, self.number(name, factor)])

    def relu2(self, source: str) -> str:
        """The square of what is positive."""
        return self.add("Pow", [self.add("Relu", [source]), self.number("two", 2.0)])

    def silu(self, source: str) -> str:
        """A value times its sigmoid."""
        return self.add("Mul", [source, self.add("Sigmoid", [source])])

    def gelu_new(self, source: str) -> str:
        """GELU's approximation by a hyperbolic tangent, written out as GPT-2's is."""
        half = self.add("Mul", [source, self.number("half", 0.5)])
        cube = self.add("Pow", [source, self.number("three", 3.0)])
        share = self.add("Mul", [cube, self.number("gelu.cube", 0.044715)])
        inner = self.add("Add", [source, share])
        root = self.number("gelu.root", math.sqrt(2 / math.pi))
        bent = self.add("Tanh", [self.add("Mul", [inner, root])])
        return self.add("Mul", [half, self.add("Add", [bent, self.number("one", 1.0)])])

    def constant(self, name: str, array: NDArray[Any]) -> str:
        """A small array within the graph, added once."""
        if name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(array, name)
        return name

    def number(self, name: str, value: float) -> str:
        """A float32 scalar within the graph."""
        return self.constant(name, np.array(value, np.float32))

    def keep(self, tensor: onnx.TensorProto) -> str:
        """An initializer of the weight file."""
        self.initializers[tensor.name] = tensor
        return str(tensor.name)
