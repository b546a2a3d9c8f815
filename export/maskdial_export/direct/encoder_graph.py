"""Writes an encoder as the graph that `maskdial.bundle.bundle` documents.

The operators and their order are those of a traced and optimized graph, so that its outputs have
the same bits, and the server's kernels find what they know: sums of residuals and norms apart, the
biases of query, key and value within the attention, that of the first product with its GELU.
"""

import math

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from maskdial_export.direct.data import DataFile
from maskdial_export.direct.decoder import Attends, Rotary
from maskdial_export.direct.encoder import Encoder
from maskdial_export.direct.mixture import MixtureWriter
from maskdial_export.direct.nodes import Nodes
from maskdial_export.direct.one_pass_graph import IDS, OnePassWriter
from maskdial_export.direct.products import Products
from maskdial_export.direct.weights import Weights

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


def alibi_slopes(count: int) -> NDArray[np.float32]:
    """What the scores of each head lose by a token's distance (arXiv:2108.12409).

    Of a count that is no power of two, the last heads have every other slope of twice as many.
    """
    power = 2 ** (count.bit_length() - 1)
    slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2.0 ** (-4 * (2 * head + 1) / power) for head in range(count - power)]
    return np.array(slopes, np.float32)


class EncoderWriter(OnePassWriter):
    """Writes the graph of one encoder."""

    def __init__(
        self, encoder: Encoder, weights: Weights, products: Products, nodes: Nodes, data: DataFile
    ) -> None:
        super().__init__(encoder, weights, products, nodes, data)
        self._encoder = encoder
        self._tables: dict[int, tuple[str, str]] = {}
        self._mixtures = {
            layer: MixtureWriter(experts, encoder.hidden_size, products, nodes, self._vectors)
            for layer, experts in encoder.mixed()
        }

    def _hidden(self) -> str:
        encoder = self._encoder
        stream = self._embed()
        for layer, attends in zip(encoder.layers, encoder.attends, strict=True):
            stream = self._write_layer(stream, layer, attends)
        return stream if encoder.final_norm is None else self._norm(stream, encoder.final_norm)

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
            before_sum = self._norm(nodes.add("Add", [attended, stream]), before)
            if names.second_norm is not None:
                again = encoder.norm(layer, names.second_norm)
                before_sum = self._norm(nodes.add("Add", [stream, before_sum]), again)
            stream = before_sum
            return self._norm(nodes.add("Add", [self._mlp(stream, layer), stream]), after)
        source = self._norm(stream, before)
        attended = self._dense(
            self._attend(source, layer, attends), encoder.attention_output(layer)
        )
        stream = nodes.add("Add", [stream, attended])
        return nodes.add("Add", [stream, self._mlp(self._norm(stream, after), layer)])

    def _attend(self, source: str, layer: str, attends: Attends) -> str:
        encoder, nodes = self._encoder, self._nodes
        if encoder.relative is not None or encoder.alibi:
            return self._attend_by_distance(source, layer)
        parts = encoder.attention(layer)
        bias = ""
        if len(parts) == 1:
            packed = self._dense(source, parts[0])
            values = [f"{parts[0].module}.{name}" for name in ("query", "key", "value")]
            nodes.add_all("Split", [packed], values, axis=2, num_outputs=3)
        elif attends.rotary is not None:
            values = [self._dense(source, part) for part in parts]
        else:
            values = [self._products.project(source, [part.module]) for part in parts]
            if encoder.attention_bias:
                bias = self._vectors(*(f"{part.module}.bias" for part in parts))
        if attends.rotary is not None:
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

    def _attend_by_distance(self, source: str, layer: str) -> str:
        """Attention written out, as scores have a bias that no operator takes by heads."""
        encoder, nodes = self._encoder, self._nodes
        heads, size = encoder.num_heads, encoder.hidden_size // encoder.num_heads
        batch = nodes.add("Shape", ["input_ids"], start=0, end=1)
        numbers = nodes.constant("heads", np.array([heads, size]))
        split = nodes.add("Concat", [batch, "length", numbers], axis=0)
        norms = [encoder.norm(layer, name) for name in encoder.names.inner_norms] or [None, None]
        parts = []
        for part, norm, perm in zip(
            encoder.attention(layer), [*norms, None], _HEADS_FIRST, strict=True
        ):
            rows = self._norm(self._dense(source, part), norm)
            rows = nodes.add("Reshape", [rows, split], allowzero=1)
            parts.append(nodes.add("Transpose", [rows], perm=perm))
        scores = nodes.add("FusedMatMul", parts[:2], alpha=size**-0.5)
        scores = nodes.add("Add", [scores, self._distances()])
        shares = nodes.add("Softmax", [nodes.add("Add", [scores, self._padding()])], axis=-1)
        joined = nodes.add(
            "Transpose", [nodes.add("MatMul", [shares, parts[2]])], perm=[0, 2, 1, 3]
        )
        return nodes.add("Reshape", [joined, self._full_shape()], allowzero=1)

    def _full_shape(self) -> str:
        """That of hidden states."""
        nodes = self._nodes
        batch = nodes.add("Shape", ["input_ids"], start=0, end=1)
        width = nodes.constant("hidden_size", np.array([self._encoder.hidden_size]))
        return nodes.add("Concat", [batch, "length", width], axis=0)

    def _distances(self) -> str:
        """What is added to scores, (1, num_heads, length, length)."""
        if "distances" not in self._kept:
            column = self._nodes.add("Unsqueeze", ["places", self._axes(1)])
            ahead = self._nodes.add("Sub", ["row.places", column])
            found = self._by_slopes(ahead) if self._encoder.alibi else self._by_buckets(ahead)
            self._kept["distances"] = self._nodes.add("Unsqueeze", [found, self._axes(0)])
        return self._kept["distances"]

    def _by_buckets(self, ahead: str) -> str:
        encoder, nodes = self._encoder, self._nodes
        relative, longest = encoder.relative, encoder.max_length
        assert relative is not None, "there is a table"
        shifted = nodes.add("Add", [ahead, self._integer(longest - 1)])
        table = nodes.constant("buckets", distance_buckets(longest, relative.buckets))
        buckets = nodes.add("Gather", [table, shifted], axis=0)
        rows = nodes.add("Gather", [self._weight(f"{relative.module}.weight"), buckets], axis=0)
        return nodes.add("Transpose", [rows], perm=[2, 0, 1])

    def _by_slopes(self, ahead: str) -> str:
        nodes, slopes = self._nodes, alibi_slopes(self._encoder.num_heads)
        away = nodes.add("Cast", [nodes.add("Abs", [ahead])], to=TensorProto.FLOAT)
        return nodes.add("Mul", [nodes.constant("slopes", -slopes[:, None, None]), away])

    def _padding(self) -> str:
        """What is added to scores of tokens beyond a text, (batch, 1, 1, length)."""
        nodes = self._nodes
        if "padding" not in self._kept:
            least = nodes.number("hidden", float(np.finfo(np.float32).min))
            added = nodes.add("Where", ["inside", nodes.number("zero", 0.0), least])
            axes = nodes.constant("axes.1.2", np.array([1, 2]))
            self._kept["padding"] = nodes.add("Unsqueeze", [added, axes])
        return self._kept["padding"]

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
        if layer in self._mixtures:
            return self._mixtures[layer].write(layer, source, self._full_shape())
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
