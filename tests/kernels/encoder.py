"""The graph of a small masked model like BERT, as the export writes it."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from maskdial.kernels.rewrite import rewrite

Change = Callable[[onnx.GraphProto], object]

WORDS, POSITIONS, SIZE, HEADS, LAYERS = 50, 80, 24, 3, 2
LENGTHS = [5, 1, 70, 64, 2, 33]
MICROSOFT = {"domain": "com.microsoft"}


class Encoder:
    """A graph that can be changed before it is saved; its products are of float32 or of int8."""

    def __init__(self, *, int8: bool = False) -> None:
        self._rng = np.random.default_rng(0)
        self._int8 = int8
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._embed()
        hidden = self.norm("embedded")
        for layer in range(LAYERS):
            hidden = self.layer(hidden, f"layer{layer}")
        self.hidden = hidden

    def node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def constant(self, name: str, array: NDArray[Any]) -> str:
        self.initializers.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, name: str, *shape: int) -> str:
        return self.constant(name, self._rng.standard_normal(shape, np.float32) * np.float32(0.4))

    def _embed(self) -> None:
        one, zero = np.array([1], np.int64), np.array([0], np.int64)
        self.constant("zero", np.array(0, np.int64))
        self.constant("one", np.array(1, np.int64))
        self.constant("axis0", zero)
        self.constant("axis1", one)
        self.node("Shape", ["input_ids"], "length1", start=1, end=2)
        self.node("Squeeze", ["length1"], "length")
        self.node("Range", ["zero", "length", "one"], "positions")
        self.node("Unsqueeze", ["positions", "axis0"], "places")
        self.node("Unsqueeze", ["lengths", "axis1"], "column")
        self.node("Cast", ["column"], "ends", to=TensorProto.INT64)
        self.node("Less", ["places", "ends"], "valid")
        self.node("Where", ["valid", "input_ids", "zero"], "tokens")
        self.node("Gather", [self.weight("words", WORDS, SIZE), "tokens"], "word")
        self.node("Gather", [self.weight("places.table", POSITIONS, SIZE), "places"], "place")
        self.node("Add", ["word", "place"], "embedded")

    def norm(self, source: str) -> str:
        weights = [self.weight(f"{source}.weight", SIZE), self.weight(f"{source}.bias", SIZE)]
        return self.node("LayerNormalization", [source, *weights], f"{source}.norm", axis=-1)

    def product(self, source: str, name: str, outputs: int = SIZE, inputs: int = SIZE) -> str:
        if not self._int8:
            return self.node("MatMul", [source, self.weight(f"{name}.w", inputs, outputs)], name)
        weight = self._rng.integers(-63, 64, (inputs, outputs)).astype(np.int8)
        step = self.constant(f"{name}.step", np.array(0.03, np.float32))
        zero = self.constant(f"{name}.zero", np.array(128, np.uint8))
        rows = self.node("QuantizeLinear", [source, step, zero], f"{name}.rows")
        scale = self.constant(f"{name}.scale", np.full(outputs, 0.01, np.float32))
        weights = [self.constant(f"{name}.w", weight), step, scale, zero]
        return self.node("MatMulIntegerToFloat", [rows, *weights], name, **MICROSOFT)

    def residual(self, name: str, hidden: str) -> str:
        biased = self.node("Add", [name, self.weight(f"{name}.b", SIZE)], f"{name}.biased")
        return self.norm(self.node("Add", [biased, hidden], f"{name}.sum"))

    def layer(self, hidden: str, name: str) -> str:
        parts = [self.product(hidden, f"{name}.{part}") for part in "qkv"]
        bias = self.weight(f"{name}.qkv", 3 * SIZE)
        inputs = [*parts, bias, "lengths"]
        attended = f"{name}.attended"
        self.node("MultiHeadAttention", inputs, attended, num_heads=HEADS, **MICROSOFT)
        middle = self.residual(self.product(attended, f"{name}.o"), hidden)
        inner = self.product(middle, f"{name}.in", 2 * SIZE)
        bias = self.weight(f"{name}.in.b", 2 * SIZE)
        inner = self.node("BiasGelu", [inner, bias], f"{name}.gelu", **MICROSOFT)
        return self.residual(self.product(inner, f"{name}.out", SIZE, 2 * SIZE), middle)

    def save(self, path: Path, change: Change | None = None, output: str = "logits") -> Path:
        """Writes the graph, which returns the rows ``rows`` of the last layer; changed first."""
        self.constant("flat", np.array([-1, SIZE], np.int64))
        self.node("Reshape", [self.hidden, "flat"], "all_rows")
        self.node("Gather", ["all_rows", "rows"], output)
        types = {"input_ids": 7, "lengths": 6, "rows": 7}
        inputs = [
            helper.make_tensor_value_info(name, kind, ["b", "l"] if name == "input_ids" else [name])
            for name, kind in types.items()
        ]
        outputs = [helper.make_tensor_value_info(output, 1, None)]
        graph = helper.make_graph(self.nodes, "encoder", inputs, outputs, self.initializers)
        if change is not None:
            change(graph)
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
        return path


def feeds(lengths: list[int] = LENGTHS) -> dict[str, Any]:
    """A padded batch; the rows are those of all tokens."""
    input_ids = np.random.default_rng(1).integers(1, WORDS, (len(LENGTHS), max(LENGTHS)))
    rows = [
        row * max(lengths) + place for row, length in enumerate(lengths) for place in range(length)
    ]
    return {
        "input_ids": input_ids[: len(lengths), : max(lengths)],
        "lengths": np.array(lengths, np.int32),
        "rows": np.array(rows),
    }


def rewritten(path: Path) -> onnx.GraphProto:
    return onnx.load_from_string(rewrite(path).model).graph


def kinds(graph: onnx.GraphProto) -> Counter[str]:
    return Counter(node.op_type for node in graph.node)
