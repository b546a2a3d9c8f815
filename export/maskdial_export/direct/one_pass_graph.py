"""Writes what models have in common that read a text in one pass: their inputs, and their heads."""

import abc
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from maskdial_export.direct.data import DataFile
from maskdial_export.direct.encoder import (
    Dense,
    Function,
    Leading,
    Norm,
    Normalize,
    OnePass,
    Vocabulary,
)
from maskdial_export.direct.nodes import IR_VERSION, OPSET, Nodes
from maskdial_export.direct.products import Products
from maskdial_export.direct.weights import Weights

IDS = "ids"
"""The tokens' ids, with the padding's beyond each text's length."""
_MASKED = -60_000.0
_SHORTEST = 1e-12
_PLAIN = {"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid"}


class OnePassWriter(abc.ABC):
    """Writes the graph of one model."""

    def __init__(
        self, model: OnePass, weights: Weights, products: Products, nodes: Nodes, data: DataFile
    ) -> None:
        self._model = model
        self._weights = weights
        self._products = products
        self._nodes = nodes
        self._data = data
        self._kept: dict[str, str] = {}

    def write(self) -> onnx.ModelProto:
        """The graph, whose initializers are in the weight file."""
        self._write_ids()
        self._write_head(self._hidden())
        return self._finish()

    @abc.abstractmethod
    def _hidden(self) -> str:
        """Writes what gives the hidden states of tokens."""

    def _write_ids(self) -> None:
        """The places of tokens, and their ids."""
        nodes = self._nodes
        nodes.add("Shape", ["input_ids"], output="length", start=1, end=2)
        size = nodes.add("Squeeze", ["length"])
        zero, one = self._integer(0), self._integer(1)
        nodes.add("Range", [zero, size, one], output="places")
        nodes.add("Unsqueeze", ["places", self._axes(0)], output="row.places")
        nodes.add("Cast", ["lengths"], output="wide.lengths", to=TensorProto.INT64)
        ends = nodes.add("Unsqueeze", ["wide.lengths", self._axes(1)])
        nodes.add("Less", ["row.places", ends], output="inside")
        nodes.add("Where", ["inside", "input_ids", self._integer(self._model.pad)], output=IDS)

    def _window(self, size: int) -> str:
        """What is added to scores: enough to hide tokens so far away, or farther."""
        nodes, name = self._nodes, f"window.{size}"
        if name in self._kept:
            return self._kept[name]
        column = nodes.add("Unsqueeze", ["places", self._axes(1)])
        distance = nodes.add("Abs", [nodes.add("Sub", [column, "row.places"])])
        far = nodes.add("GreaterOrEqual", [distance, self._integer(size)])
        axes = nodes.constant("axes.0.1", np.array([0, 1]))
        wide = nodes.add("Unsqueeze", [nodes.add("Cast", [far], to=TensorProto.FLOAT), axes])
        self._kept[name] = nodes.add("Mul", [wide, nodes.number("masked", _MASKED)])
        return self._kept[name]

    def _dense(self, source: str, dense: Dense, function: Function | None = None) -> str:
        """A linear layer of tokens, and a function behind it."""
        nodes, function = self._nodes, function or dense.function
        product = self._products.project(source, [dense.module])
        if dense.has_bias:
            bias = self._weight(f"{dense.module}.bias")
            if function == "gelu":
                return nodes.add("BiasGelu", [product, bias])
            product = nodes.add("Add", [product, bias])
        return product if function is None else self._activated(product, function)

    def _activated(self, source: str, function: Function) -> str:
        nodes = self._nodes
        if function in _PLAIN:
            return nodes.add(_PLAIN[function], [source])
        if function == "gelu":
            return nodes.add("Gelu", [source], approximate="none")
        if function == "silu":
            return nodes.silu(source)
        return nodes.gelu_new(source)

    def _norm(self, source: str, norm: Norm | None) -> str:
        if norm is None:
            return source
        inputs = [source, *(self._weight(name) for name in norm.shapes())]
        return self._nodes.add("LayerNormalization", inputs, axis=-1, epsilon=norm.epsilon)

    def _write_head(self, hidden: str) -> None:
        head, nodes = self._model.head, self._nodes
        for dense in head.before:
            hidden = self._dense(hidden, dense)
        if head.is_of_tokens:
            flat = nodes.constant("flat", np.array([-1, self._model.hidden_size]))
            tokens = nodes.add("Reshape", [hidden, flat], allowzero=1)
            rows = nodes.add("Reshape", ["rows", self._axes(-1)], allowzero=0)
            base = self._model.base.removesuffix(".")
            value = nodes.add("Gather", [tokens, rows], axis=0, modules=base)
        else:
            pooled = [self._pooled(hidden, name) for name in head.reads]
            value = pooled[0] if len(pooled) == 1 else nodes.add("Concat", pooled, axis=-1)
        for step in head.steps:
            if isinstance(step, Norm):
                value = self._norm(value, step)
            elif isinstance(step, Vocabulary):
                value = self._products.head(value, None, None)
                if step.bias is not None:
                    # Apart, as in a trace: ONNX Runtime would add it within a product in blocks
                    wide = nodes.add("Unsqueeze", [value, self._axes(0)])
                    total = nodes.add("Add", [wide, self._weight(step.bias)])
                    value = nodes.add("Squeeze", [total, self._axes(0)])
            elif isinstance(step, Dense) and head.is_of_tokens:
                value = self._dense(value, step)
            elif isinstance(step, Dense):
                bias = self._weight(f"{step.module}.bias") if step.has_bias else None
                value = self._products.project_vectors(value, step.module, bias)
                value = value if step.function is None else self._activated(value, step.function)
            elif isinstance(step, Normalize):
                length = nodes.add("ReduceL2", [value, self._axes(-1)], keepdims=1)
                least = nodes.add("Clip", [length, nodes.number("shortest", _SHORTEST)])
                value = nodes.add("Div", [value, least])
            else:
                value = self._leading(value, step)
        assert nodes.nodes[-1].output[0] == value, "the head's last node gives its result"
        nodes.nodes[-1].output[0] = self._output

    def _leading(self, value: str, step: Leading) -> str:
        count = self._nodes.constant(f"leading.{step.count}", np.array([step.count]))
        return self._nodes.add("Slice", [value, self._axes(0), count, self._axes(1)])

    def _pooled(self, hidden: str, name: str) -> str:
        """One vector of a text's tokens; see `maskdial_export.checkpoint.pooling`."""
        nodes = self._nodes
        if name == "cls":
            return nodes.add("Gather", [hidden, self._integer(0)], axis=1)
        if name == "last":
            return self._at_end(hidden)
        if name == "max":
            within = nodes.add("Unsqueeze", ["inside", self._axes(2)])
            least = nodes.number("least", -np.inf)
            seen = nodes.add("Where", [within, hidden, least])
            return nodes.add("ReduceMax", [seen, self._axes(1)], keepdims=0)
        if name == "weighted_mean":
            places = nodes.add("Add", ["row.places", self._integer(1)])
            weights = nodes.add("Cast", [places], to=TensorProto.FLOAT)
            hidden = nodes.add("Mul", [hidden, nodes.add("Unsqueeze", [weights, self._axes(2)])])
        # A running sum adds in the same order whatever the padding is
        total = self._at_end(nodes.add("CumSum", [hidden, self._integer(1)]))
        counts = nodes.add("Cast", ["lengths"], to=TensorProto.FLOAT)
        if name == "mean_sqrt_len":
            counts = nodes.add("Sqrt", [counts])
        if name == "weighted_mean":
            more = nodes.add("Cast", [nodes.add("Add", ["wide.lengths", self._integer(1)])], to=1)
            both = nodes.add("Mul", [counts, more])
            counts = nodes.add("Div", [both, nodes.number("two", 2.0)])
        return nodes.add("Div", [total, nodes.add("Unsqueeze", [counts, self._axes(1)])])

    def _at_end(self, values: str) -> str:
        """The row of each text's last token."""
        nodes = self._nodes
        last = nodes.add("Sub", ["wide.lengths", self._integer(1)])
        axes = nodes.constant("axes.1.2", np.array([1, 2]))
        place = nodes.add("Unsqueeze", [last, axes])
        before = self._model.head.before
        columns = before[-1].num_outputs if before else self._model.hidden_size
        shape = nodes.constant("columns", np.array([1, 1, columns]))
        rows = nodes.add("GatherElements", [values, nodes.add("Expand", [place, shape])], axis=1)
        return nodes.add("Gather", [rows, self._integer(0)], axis=1)

    def _integer(self, value: int) -> str:
        return self._nodes.constant(f"integer.{value}", np.array(value))

    def _axes(self, value: int) -> str:
        return self._nodes.constant(f"axes.{value}", np.array([value]))

    def _weight(self, name: str) -> str:
        """A small weight as it is."""
        return self._vectors(name)

    def _vectors(self, *names: str) -> str:
        """Weights one after the other."""
        name = ",".join(names)
        if name not in self._kept:
            values = np.concatenate([self._weights.values(each) for each in names])
            self._kept[name] = self._nodes.keep(self._data.write(name, values))
        return self._kept[name]

    @property
    def _output(self) -> str:
        return "logits" if self._model.head.embedding is None else "embeddings"

    def _finish(self) -> onnx.ModelProto:
        model, nodes, head = self._model, self._nodes, self._model.head
        info, integers = helper.make_tensor_value_info, TensorProto.INT64
        inputs = [
            info("input_ids", integers, ["batch", "length"]),
            info("lengths", TensorProto.INT32, ["batch"]),
        ]
        if model.reads_types:
            inputs.append(info("token_type_ids", integers, ["batch", "length"]))
        if head.is_of_tokens:
            inputs.append(info("rows", integers, ["num_rows"]))
        shape: list[Any] = ["num_rows" if head.is_of_tokens else "batch", self._num_columns()]
        outputs = [info(self._output, TensorProto.FLOAT, shape)]
        graph = helper.make_graph(
            nodes.nodes, "main_graph", inputs, outputs, list(nodes.initializers.values())
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        made = helper.make_model(graph, opset_imports=opsets, producer_name="maskdial")
        made.ir_version = IR_VERSION
        return made

    def _num_columns(self) -> int:
        head = self._model.head
        if head.embedding is not None:
            return head.embedding.dimension
        last = (*head.before, *head.steps)[-1]
        return last.num_outputs if isinstance(last, Dense) else self._model.vocab_size
