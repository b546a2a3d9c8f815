"""A stock graph as ONNX Runtime runs it by itself, and sentence-transformers' modules in NumPy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from maskdial_export.checkpoint.sentence import SENTENCE_CONFIG
from maskdial_export.direct.encoder_reference import EncoderReference
from maskdial_export.direct.weights import Weights
from maskdial_export.session import Floats, Ids
from maskdial_export.stock import model as stock
from maskdial_export.stock.model import StockGraph, StockModel


class PlainGraph:
    """A graph in ONNX Runtime, as its exporter left it."""

    def __init__(self, graph: StockGraph, pad: int, *, optimizes: bool = True) -> None:
        """``pad``: the token of padding; ``optimizes``: whether ONNX Runtime does."""
        self._graph = graph
        self._inputs = graph.inputs
        self._pad = pad
        self._session = stock.load_as_it_is(graph.path, optimizes=optimizes)

    def as_written(self) -> "PlainGraph":
        """The same without ONNX Runtime's optimizations."""
        return PlainGraph(self._graph, self._pad, optimizes=False)

    def run(
        self, texts: Sequence[Ids], types: Sequence[Ids] | None, names: Sequence[str]
    ) -> list[NDArray[np.float32]]:
        """Outputs of texts in one batch, which is padded on the right.

        Args:
            texts: token ids, (length,) each.
            types: token types; None for zeros.
            names: the outputs that are wanted.
        """
        shape = len(texts), max(map(len, texts))
        ids, kinds, mask = np.full(shape, self._pad), np.zeros(shape, int), np.zeros(shape, int)
        for row, text in enumerate(texts):
            ids[row, : len(text)], mask[row, : len(text)] = text, 1
            kinds[row, : len(text)] = 0 if types is None else types[row]
        given = {
            stock.IDS: ids,
            stock.MASK: mask,
            stock.TYPES: kinds,
            stock.POSITIONS: np.broadcast_to(np.arange(shape[1]), shape),
        }
        feeds = {
            name: given[name].astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
            for name, kind in self._inputs.items()
        }
        found: list[NDArray[np.float32]] = self._session.run(list(names), feeds)
        return found


class StockReference(EncoderReference):
    """The graph's answers, with nothing of what is written around it."""

    def __init__(self, files: Any, weights: Weights, graph: PlainGraph, model: StockModel) -> None:
        """``files``: as of `EncoderReference`; ``weights``: of the modules behind the graph."""
        self._files = files
        self._weights = weights
        self._names = weights.shapes()
        self._graph = graph
        self._model = model

    def output(self, ids: Ids, types: Ids) -> Floats:
        """As of `EncoderReference`."""
        return self.outputs([ids], [types])[0]

    def as_written(self) -> "StockReference":
        """The same without ONNX Runtime's optimizations."""
        return StockReference(self._files, self._weights, self._graph.as_written(), self._model)

    def outputs(self, texts: Sequence[Ids], types: Sequence[Ids] | None = None) -> list[Floats]:
        """The same of several texts in one batch."""
        model = self._model
        raw = self._graph.run(texts, types, model.outputs)
        embeds = model.head.task == "embed"
        if model.is_pooled:
            kept = self._files.read_json(SENTENCE_CONFIG).get("truncate_dim") if embeds else None
            return [row[:kept] for row in raw[0]]
        values = raw[0] if len(raw) == 1 else np.stack(raw, axis=-1)
        rows = [each[: len(text)] for each, text in zip(values, texts, strict=True)]
        return [self._vector(each) for each in rows] if embeds else rows
