"""Writes an encoder as the graph that `maskdial.bundle.bundle` documents.

The operators and their order are those of a traced and optimized graph, so that its outputs have
the same bits, and the server's kernels find what they know: sums of residuals and norms apart, the
biases of query, key and value within the attention, that of the first product with its GELU.
"""

import math
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from maskdial_export.direct.data import DataFile
from maskdial_export.direct.decoder import Attends, Rotary
from maskdial_export.direct.encoder import (
    Dense,
    Encoder,
    Function,
    Leading,
    Norm,
    Normalize,
    Relative,
    Vocabulary,
)
from maskdial_export.direct.nodes import IR_VERSION, OPSET, Nodes
from maskdial_export.direct.products import Products
from maskdial_export.direct.weights import Weights

IDS = "ids"
"""The tokens' ids, with the padding's beyond each text's length."""
_MASKED = -60_000.0
_SHORTEST = 1e-12
_WHOLE = 2**63 - 1  # as the end of a slice
_PLAIN = {"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid"}


_HEADS_FIRST = ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
"""How queries, keys and values are turned for their products."""
_FARTHEST = 128
"""The distance from which all tokens share a bucket."""


def distance_buckets(length: int, count: int) -> NDArray[np.int64]:
    """The bucket of each distance from ``1 - length`` to ``length - 1``, in float32 as in torch."""
    ahead = np.arange(1 - length, length)
    half = count // 2
    near, away = half // 2, np.abs(ahead)
    with np.errstate(divide="ignore"):
        share = np.log(away.astype(np.float32) / np.float32(near))
    share = share / np.float32(math.log(_FARTHEST / near)) * np.float32(half - near)
    far = near + np.where(away < near, 0, share).astype(np.int64)
    return np.where(away < near, away, np.minimum(far, half - 1)) + np.where(ahead > 0, half, 0)


class EncoderWriter:
    """Writes the graph of one encoder."""

    def __init__(
        self, encoder: Encoder, weights: Weights, products: Products, nodes: Nodes, data: DataFile
    ) -> None:
        self._encoder = encoder
        self._weights = weights
        self._products = products
        self._nodes = nodes
        self._data = data
        self._kept: dict[str, str] = {}
        self._tables: dict[int, tuple[str, str]] = {}

    def write(self) -> onnx.ModelProto:
        """The graph, whose initializers are in the weight file."""
        encoder = self._encoder
        self._write_ids()
        stream = self._embed()
        for layer, attends in zip(encoder.layers, encoder.attends, strict=True):
            stream = self._write_layer(stream, layer, attends)
        if encoder.final_norm is not None:
            stream = self._norm(stream, encoder.final_norm)
        self._write_head(stream)
        return self._finish()

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
        nodes.add("Where", ["inside", "input_ids", self._integer(self._encoder.pad)], output=IDS)

    def _embed(self) -> str:
        encoder, nodes = self._encoder, self._nodes
        total = self._products.look_up()
        if encoder.types is not None:
            table = self._weight(f"{encoder.types}.weight")
            # Where no token has a type, all have the first one
            types = "token_type_ids" if encoder.reads_types else self._integer(0)
            rows = nodes.add("Gather", [table, types], axis=0, modules=encoder.types)
            total = nodes.add("Add", [total, rows])
        if encoder.positions is not None:
            module = encoder.positions.module
            table = self._weight(f"{module}.weight")
            rows = nodes.add("Gather", [table, self._positions()], axis=0, modules=module)
            total = nodes.add("Add", [total, rows])
        stream = self._norm(total, encoder.embedding_norm)
        return stream if encoder.mapping is None else self._dense(stream, encoder.mapping)

    def _positions(self) -> str:
        positions, nodes = self._encoder.positions, self._nodes
        assert positions is not None, "there is a table"
        if not positions.skips_padding:
            return "row.places"
        padding = nodes.add("Equal", [IDS, self._integer(self._encoder.pad)])
        counts = nodes.add("Cast", [nodes.add("Not", [padding])], to=TensorProto.INT64)
        running = nodes.add("CumSum", [counts, self._integer(1)])
        counted = nodes.add("Mul", [running, counts])
        return nodes.add("Add", [counted, self._integer(positions.first - 1)])

    def _write_layer(self, stream: str, layer: str, attends: Attends) -> str:
        encoder, names, nodes = self._encoder, self._encoder.names, self._nodes
        before = encoder.norm(layer, names.attention_norm)
        after = encoder.norm(layer, names.mlp_norm)
        if not encoder.norm_first:
            attended = self._dense(
                self._attend(stream, layer, attends), encoder.attention_output(layer)
            )
            stream = self._norm(nodes.add("Add", [attended, stream]), before)
            return self._norm(nodes.add("Add", [self._mlp(stream, layer), stream]), after)
        source = self._norm(stream, before)
        attended = self._dense(
            self._attend(source, layer, attends), encoder.attention_output(layer)
        )
        stream = nodes.add("Add", [stream, attended])
        return nodes.add("Add", [stream, self._mlp(self._norm(stream, after), layer)])

    def _attend(self, source: str, layer: str, attends: Attends) -> str:
        encoder, nodes = self._encoder, self._nodes
        if encoder.relative is not None:
            return self._attend_by_distance(source, layer, encoder.relative)
        parts = encoder.attention(layer)
        bias = ""
        if len(parts) == 1:
            packed = self._dense(source, parts[0])
            values = [f"{parts[0].module}.{name}" for name in ("query", "key", "value")]
            nodes.add_all("Split", [packed], values, axis=2, num_outputs=3)
        else:
            values = [self._products.project(source, [part.module]) for part in parts]
            if encoder.attention_bias:
                bias = self._vectors(*(f"{part.module}.bias" for part in parts))
        if attends.rotary is not None:
            assert not bias, "biases are added before queries and keys turn"
            zero = self._axes(0)
            for index in range(2):
                inputs = [values[index], zero, *self._rotary(attends.rotary)]
                values[index] = nodes.add("RotaryEmbedding", inputs, num_heads=encoder.num_heads)
        inputs = [*values, bias, "lengths"]
        if attends.window is not None:
            inputs.append(self._window(attends.window))
        size = encoder.hidden_size // encoder.num_heads
        return nodes.add(
            "MultiHeadAttention", inputs, num_heads=encoder.num_heads, scale=size**-0.5
        )

    def _attend_by_distance(self, source: str, layer: str, relative: Relative) -> str:
        """Attention written out, as scores have a bias that no operator takes by heads."""
        encoder, nodes = self._encoder, self._nodes
        heads, size = encoder.num_heads, encoder.hidden_size // encoder.num_heads
        batch = nodes.add("Shape", ["input_ids"], start=0, end=1)
        numbers = nodes.constant("heads", np.array([heads, size]))
        split = nodes.add("Concat", [batch, "length", numbers], axis=0)
        parts = []
        for part, perm in zip(encoder.attention(layer), _HEADS_FIRST, strict=True):
            rows = nodes.add("Reshape", [self._dense(source, part), split], allowzero=1)
            parts.append(nodes.add("Transpose", [rows], perm=perm))
        scores = nodes.add("FusedMatMul", parts[:2], alpha=size**-0.5)
        scores = nodes.add("Add", [scores, self._distances(relative)])
        shares = nodes.add("Softmax", [nodes.add("Add", [scores, self._padding()])], axis=-1)
        joined = nodes.add(
            "Transpose", [nodes.add("MatMul", [shares, parts[2]])], perm=[0, 2, 1, 3]
        )
        width = nodes.constant("hidden_size", np.array([encoder.hidden_size]))
        full = nodes.add("Concat", [batch, "length", width], axis=0)
        return nodes.add("Reshape", [joined, full], allowzero=1)

    def _distances(self, relative: Relative) -> str:
        """What is added to scores, (1, num_heads, length, length)."""
        nodes = self._nodes
        if "distances" not in self._kept:
            longest = self._encoder.max_length
            column = nodes.add("Unsqueeze", ["places", self._axes(1)])
            ahead = nodes.add("Sub", ["row.places", column])
            shifted = nodes.add("Add", [ahead, self._integer(longest - 1)])
            table = nodes.constant("buckets", distance_buckets(longest, relative.buckets))
            buckets = nodes.add("Gather", [table, shifted], axis=0)
            rows = nodes.add("Gather", [self._weight(f"{relative.module}.weight"), buckets], axis=0)
            by_head = nodes.add("Transpose", [rows], perm=[2, 0, 1])
            self._kept["distances"] = nodes.add("Unsqueeze", [by_head, self._axes(0)])
        return self._kept["distances"]

    def _padding(self) -> str:
        """What is added to scores of tokens beyond a text, (batch, 1, 1, length)."""
        nodes = self._nodes
        if "padding" not in self._kept:
            least = nodes.number("hidden", float(np.finfo(np.float32).min))
            added = nodes.add("Where", ["inside", nodes.number("zero", 0.0), least])
            axes = nodes.constant("axes.1.2", np.array([1, 2]))
            self._kept["padding"] = nodes.add("Unsqueeze", [added, axes])
        return self._kept["padding"]

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

    def _rotary(self, rotary: Rotary) -> tuple[str, str]:
        if id(rotary) not in self._tables:
            number, arrays = len(self._tables), rotary.tables(self._encoder.max_length)
            cos, sin = (
                self._nodes.keep(self._data.write(f"rotary.{number}.{kind}", array))
                for kind, array in zip(("cos", "sin"), arrays, strict=True)
            )
            self._tables[id(rotary)] = cos, sin
        return self._tables[id(rotary)]

    def _mlp(self, source: str, layer: str) -> str:
        encoder, nodes = self._encoder, self._nodes
        up = encoder.up(layer)
        if not encoder.gated:
            return self._dense(self._dense(source, up[0], encoder.function), encoder.down(layer))
        if len(up) == 1:
            both = self._dense(source, up[0])
            gate, other = f"{up[0].module}.gate", f"{up[0].module}.up"
            nodes.add_all("Split", [both], [gate, other], axis=2, num_outputs=2)
            gate = self._activated(gate, encoder.function)
        else:
            gate = self._dense(source, up[0], encoder.function)
            other = self._dense(source, up[1])
        return self._dense(nodes.add("Mul", [gate, other]), encoder.down(layer))

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
            return nodes.add("Mul", [source, nodes.add("Sigmoid", [source])])
        half = nodes.add("Mul", [source, nodes.number("half", 0.5)])
        cube = nodes.add("Pow", [source, nodes.number("three", 3.0)])
        share = nodes.add("Mul", [cube, nodes.number("gelu.cube", 0.044715)])
        inner = nodes.add("Add", [source, share])
        root = nodes.number("gelu.root", math.sqrt(2 / math.pi))
        bent = nodes.add("Tanh", [nodes.add("Mul", [inner, root])])
        return nodes.add("Mul", [half, nodes.add("Add", [bent, nodes.number("one", 1.0)])])

    def _norm(self, source: str, norm: Norm | None) -> str:
        if norm is None:
            return source
        inputs = [source, *(self._weight(name) for name in norm.shapes())]
        return self._nodes.add("LayerNormalization", inputs, axis=-1, epsilon=norm.epsilon)

    def _write_head(self, hidden: str) -> None:
        head, nodes = self._encoder.head, self._nodes
        if head.is_of_tokens:
            flat = nodes.constant("flat", np.array([-1, self._encoder.hidden_size]))
            tokens = nodes.add("Reshape", [hidden, flat], allowzero=1)
            rows = nodes.add("Reshape", ["rows", self._axes(-1)], allowzero=0)
            base = self._encoder.base.removesuffix(".")
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
        shape = nodes.constant("columns", np.array([1, 1, self._encoder.hidden_size]))
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
        return "logits" if self._encoder.head.embedding is None else "embeddings"

    def _finish(self) -> onnx.ModelProto:
        encoder, nodes, head = self._encoder, self._nodes, self._encoder.head
        info, integers = helper.make_tensor_value_info, TensorProto.INT64
        inputs = [
            info("input_ids", integers, ["batch", "length"]),
            info("lengths", TensorProto.INT32, ["batch"]),
        ]
        if encoder.reads_types:
            inputs.append(info("token_type_ids", integers, ["batch", "length"]))
        if head.is_of_tokens:
            inputs.append(info("rows", integers, ["num_rows"]))
        shape: list[Any] = ["num_rows" if head.is_of_tokens else "batch", self._num_columns()]
        outputs = [info(self._output, TensorProto.FLOAT, shape)]
        graph = helper.make_graph(
            nodes.nodes, "main_graph", inputs, outputs, list(nodes.initializers.values())
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, producer_name="maskdial")
        model.ir_version = IR_VERSION
        return model

    def _num_columns(self) -> int:
        head = self._encoder.head
        if head.embedding is not None:
            return head.embedding.dimension
        last = head.steps[-1]
        return last.num_outputs if isinstance(last, Dense) else self._encoder.vocab_size
