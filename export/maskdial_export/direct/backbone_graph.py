"""Writes a decoder that embeds or classifies as the graph of a model that reads in one pass."""

import numpy as np
from onnx import TensorProto

from maskdial_export.direct.backbones import Backbone
from maskdial_export.direct.data import DataFile
from maskdial_export.direct.encoder import Dense
from maskdial_export.direct.graph import GraphWriter
from maskdial_export.direct.nodes import Nodes
from maskdial_export.direct.one_pass_graph import IDS, OnePassWriter
from maskdial_export.direct.products import Products
from maskdial_export.direct.weights import Weights


class BackboneWriter(OnePassWriter):
    """Writes the graph of one decoder, whose attention has no cache."""

    def __init__(
        self, model: Backbone, weights: Weights, products: Products, nodes: Nodes, data: DataFile
    ) -> None:
        super().__init__(model, weights, products, nodes, data)
        self._decoder = model.decoder

    def _hidden(self) -> str:
        nodes = self._nodes
        if not self._decoder.reads_ahead:
            one = nodes.constant("one.int32", np.array(1, np.int32))
            nodes.add("Sub", ["lengths", one], output="seqlens_k")
            size = nodes.add("Squeeze", ["length"])
            nodes.add("Cast", [size], output="total_sequence_length", to=TensorProto.INT32)
        writer = GraphWriter(
            self._decoder, self._weights, self._products, nodes, self._data, self._window
        )
        return writer.hidden()

    def _write_head(self, hidden: str) -> None:
        """A classifier's logits are computed for all tokens: the last one that is not the padding's
        is chosen of them, also where a text itself ends with such tokens."""
        head, nodes = self._model.head, self._nodes
        if head.reads != ("last",) or head.task not in ("classify", "rerank"):
            super()._write_head(hidden)
            return
        (score,) = head.steps
        assert isinstance(score, Dense), "it is linear"
        logits = self._dense(hidden, score)
        padding = nodes.add("Equal", [IDS, self._integer(self._model.pad)])
        words = nodes.add("Cast", [nodes.add("Not", [padding])], to=TensorProto.INT64)
        last = nodes.add(
            "ArgMax",
            [nodes.add("Mul", ["places", words])],
            axis=-1,
            keepdims=0,
            select_last_index=0,
        )
        batch = nodes.add("Squeeze", [nodes.add("Shape", ["lengths"])])
        texts = nodes.add("Range", [self._integer(0), batch, self._integer(1)])
        pairs = [nodes.add("Unsqueeze", [each, self._axes(-1)]) for each in (texts, last)]
        place = nodes.add("Concat", pairs, axis=-1)
        nodes.add("GatherND", [logits, place], output="logits")
