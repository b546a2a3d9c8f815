"""Writes an encoder whose attention has positions of its own: DeBERTa's (arXiv:2006.03654).

A score is the sum of three products: of two tokens, and of each with a row that stands for their
distance. The operators are those of a trace, from the numbers of the distances on.
"""

import math

import numpy as np
from onnx import TensorProto

from maskdial_export.direct.data import DataFile
from maskdial_export.direct.decoder import Attends
from maskdial_export.direct.encoder import Dense, Disentangled, Encoder
from maskdial_export.direct.encoder_graph import EncoderWriter
from maskdial_export.direct.nodes import Nodes
from maskdial_export.direct.products import Products
from maskdial_export.direct.weights import Weights


class DisentangledWriter(EncoderWriter):
    """Writes the graph of one encoder."""

    def __init__(
        self, encoder: Encoder, weights: Weights, products: Products, nodes: Nodes, data: DataFile
    ) -> None:
        super().__init__(encoder, weights, products, nodes, data)
        assert encoder.disentangled is not None, "others have no such positions"
        self._positioned: Disentangled = encoder.disentangled
        self._size = encoder.hidden_size // encoder.num_heads
        self._root = nodes.number("root", math.sqrt(3 * self._size))
        self._minus = nodes.constant("axes.-1", np.array([-1]))
        self._heads = nodes.constant("heads", np.array([encoder.num_heads]))

    def _embed(self) -> str:
        nodes = self._nodes
        stream = super()._embed()
        valid = nodes.add("Cast", ["inside"], to=TensorProto.INT64)
        column = nodes.add("Unsqueeze", [valid, self._axes(2)])
        kept = nodes.add("Cast", [column], to=TensorProto.FLOAT)
        stream = nodes.add("Mul", [stream, kept])
        self._write_hidden(valid)
        self._write_distances()
        return stream

    def _write_hidden(self, valid: str) -> None:
        """Which pairs of tokens are not of one text, (batch, 1, length, length)."""
        nodes = self._nodes
        row = nodes.add("Unsqueeze", [valid, nodes.constant("axes.1.2", np.array([1, 2]))])
        turned = nodes.add("Squeeze", [row, self._axes(-2)])
        column = nodes.add("Unsqueeze", [turned, self._axes(-1)])
        pairs = nodes.add("Mul", [row, column])
        nodes.add("Not", [nodes.add("Cast", [pairs], to=TensorProto.BOOL)], output="apart")

    def _write_distances(self) -> None:
        """The row of each pair's distance, for queries and for keys; far ones share rows."""
        nodes, rows = self._nodes, self._positioned.buckets
        middle = rows // 2
        column = nodes.add("Unsqueeze", ["places", self._axes(1)])
        distance = nodes.add("Sub", [column, "row.places"])
        sign = nodes.add("Sign", [distance])
        near = nodes.add(
            "And",
            [
                nodes.add("Less", [distance, self._integer(middle)]),
                nodes.add("Greater", [distance, self._integer(-middle)]),
            ],
        )
        away = nodes.add("Abs", [distance])
        away = nodes.add("Where", [near, self._integer(middle - 1), away])
        floats = nodes.add("Cast", [away], to=TensorProto.FLOAT)
        half = nodes.number("distance.middle", middle)
        ratio = np.float32((self._positioned.farthest - 1) / middle)
        share = nodes.add("Log", [nodes.add("Div", [floats, half])])
        share = nodes.add("Div", [share, nodes.number("distance.log", float(np.log(ratio)))])
        share = nodes.add("Mul", [share, nodes.number("distance.rest", middle - 1)])
        far = nodes.add("Add", [nodes.add("Ceil", [share]), half])
        exact = nodes.add("LessOrEqual", [away, self._integer(middle)])
        plain = nodes.add("Cast", [distance], to=TensorProto.FLOAT)
        signed = nodes.add("Mul", [far, nodes.add("Cast", [sign], to=TensorProto.FLOAT)])
        bucket = nodes.add("Where", [exact, plain, signed])
        bucket = nodes.add("Cast", [bucket], to=TensorProto.INT64)
        axes = nodes.constant("axes.0.1", np.array([0, 1]))
        ahead = nodes.add("Unsqueeze", [bucket, axes])
        batch = nodes.add("Squeeze", [nodes.add("Shape", ["lengths"])])
        count = nodes.add("Mul", [self._integer(self._encoder.num_heads), batch])
        count = nodes.add("Reshape", [count, self._minus], allowzero=0)
        shape = nodes.add("Concat", [count, "length", "length"], axis=0)
        last = self._integer(2 * rows - 1)
        for name, places in (("query", ahead), ("key", nodes.add("Neg", [ahead]))):
            moved = nodes.add("Add", [places, self._integer(rows)])
            inside = nodes.add("Clip", [moved, self._integer(0), last])
            table = nodes.add("Squeeze", [inside, self._axes(0)])
            nodes.add("Expand", [table, shape], output=f"rows.of.{name}")

    def _attend(self, source: str, layer: str, attends: Attends) -> str:
        nodes, positioned = self._nodes, self._positioned
        query, key, value = self._encoder.attention(layer)
        batch = nodes.once("Shape", ["lengths"], "batch", start=0, end=1)
        queries, keys, values = (self._by_head(source, each) for each in (query, key, value))
        turned = nodes.add("Transpose", [keys], perm=[0, 2, 1])
        scores = nodes.add("MatMul", [queries, nodes.add("Div", [turned, self._root])])
        if "distances" not in self._kept:
            rows = self._weight(f"{positioned.module}.weight")
            normalized = self._norm(rows, positioned.norm)
            self._kept["distances"] = nodes.add("Unsqueeze", [normalized, self._axes(0)])
        of_queries, of_keys = (self._tiled(each, batch) for each in (query, key))
        to_rows = nodes.add("FusedMatMul", [queries, of_keys], transB=1)
        to_rows = nodes.add("GatherElements", [to_rows, "rows.of.query"], axis=-1)
        from_rows = nodes.add("FusedMatMul", [keys, of_queries], transB=1)
        from_rows = nodes.add("GatherElements", [from_rows, "rows.of.key"], axis=-1)
        from_rows = nodes.add("Transpose", [from_rows], perm=[0, 2, 1])
        parts = [nodes.add("Div", [each, self._root]) for each in (to_rows, from_rows)]
        scores = nodes.add("Add", [scores, nodes.add("Add", parts)])
        shape = self._shape("scores", self._minus, self._heads, "length", "length")
        scores = nodes.add("Reshape", [scores, shape], allowzero=1)
        least = nodes.number("hidden", float(np.finfo(np.float32).min))
        scores = nodes.add("Where", ["apart", least, scores])
        shares = nodes.add("Softmax", [scores], axis=-1)
        shares = nodes.add(
            "Reshape",
            [shares, self._shape("shares", self._minus, "length", "length")],
            allowzero=1,
        )
        joined = nodes.add("MatMul", [shares, values])
        size = nodes.constant("size", np.array([self._size]))
        shape = self._shape("joined", self._minus, self._heads, "length", size)
        joined = nodes.add("Reshape", [joined, shape], allowzero=1)
        joined = nodes.add("Transpose", [joined], perm=[0, 2, 1, 3])
        whole = self._shape("whole", batch, "length", self._minus)
        return nodes.add("Reshape", [joined, whole], allowzero=1)

    def _by_head(self, source: str, dense: Dense) -> str:
        """(batch * num_heads, length, size)."""
        nodes = self._nodes
        split = self._shape("split", "batch", "length", self._heads, self._minus)
        rows = nodes.add("Reshape", [self._dense(source, dense), split], allowzero=1)
        rows = nodes.add("Transpose", [rows], perm=[0, 2, 1, 3])
        size = nodes.constant("size", np.array([self._size]))
        flat = self._shape("flat", self._minus, "length", size)
        return nodes.add("Reshape", [rows, flat], allowzero=1)

    def _tiled(self, dense: Dense, batch: str) -> str:
        """What a projection makes of the distances' rows, (batch * num_heads, rows, size)."""
        nodes, count = self._nodes, 2 * self._positioned.buckets
        heads = self._encoder.num_heads
        rows = self._dense(self._kept["distances"], dense)
        split = nodes.constant("rows.split", np.array([1, count, heads, -1]))
        rows = nodes.add("Reshape", [rows, split], allowzero=1)
        rows = nodes.add("Transpose", [rows], perm=[0, 2, 1, 3])
        flat = nodes.constant("rows.flat", np.array([-1, count, self._size]))
        rows = nodes.add("Reshape", [rows, flat], allowzero=1)
        rows = nodes.add("Expand", [rows, nodes.constant("ones.3", np.ones(3, np.int64))])
        times = self._shape("times", batch, self._axes(1), self._axes(1))
        return nodes.add("Tile", [rows, times])

    def _shape(self, name: str, *dims: str) -> str:
        return self._nodes.once("Concat", dims, f"shape.{name}", axis=0)
