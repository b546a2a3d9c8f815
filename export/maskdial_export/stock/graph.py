"""Puts a stock graph between the inputs and the outputs of a bundle.

Its nodes stay as they are. Before them stand nodes that make its inputs of token ids and lengths;
behind them pooling and the modules of sentence-transformers, or the choice of rows.
"""

from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import TensorProto, compose, inliner, numpy_helper, version_converter

from maskdial_export.direct.data import DataFile
from maskdial_export.direct.nodes import OPSET, Nodes
from maskdial_export.direct.one_pass_graph import IDS, OnePassWriter
from maskdial_export.direct.products import FloatProducts, Modules
from maskdial_export.direct.weights import Weights
from maskdial_export.errors import ExportError, first_line
from maskdial_export.stock import model as stock
from maskdial_export.stock.model import StockGraph, StockModel, is_outside

_PREFIX = "stock/"
_LEAST_WEIGHT = 1024  # bytes; smaller ones are shapes and axes, which optimizers read
_IN_FILE = (TensorProto.FLOAT, TensorProto.INT8, TensorProto.UINT8)


def write_stock_graph(graph: StockGraph, model: StockModel, weights: Weights, path: Path) -> int:
    """Writes the graph and its file of weights; returns how many numbers these are.

    Args:
        graph: as another exporter wrote it.
        model: what is known of it.
        weights: of sentence-transformers' modules behind it.
        path: the bundle's graph.

    Raises:
        ExportError: its operators are of a version that cannot be brought to ours.
        OSError: a file cannot be read or written.
    """
    nodes = Nodes()
    with DataFile(path.with_name(f"{path.name}.data")) as data:
        products = FloatProducts(Modules("", None), weights, nodes, data)
        writer = _StockWriter(graph, model, weights, products, nodes, data)
        written = writer.write()
    path.write_bytes(written.SerializeToString())
    return writer.num_weights


class _StockWriter(OnePassWriter):
    """Writes one graph."""

    num_weights = 0

    def __init__(self, graph: StockGraph, model: StockModel, *parts: object) -> None:
        super().__init__(model, *parts)  # type: ignore[arg-type]
        self._graph = graph
        self._stock = model

    def _hidden(self) -> str:
        nodes, model = self._nodes, self._stock
        inner = self._inner()
        self._opsets = {each.domain: each.version for each in inner.opset_import}
        self._ir_version = inner.ir_version
        self._write_inputs()
        nodes.nodes.extend(inner.graph.node)
        nodes.initializers.update((each.name, each) for each in inner.graph.initializer)
        names = [_PREFIX + name for name in model.outputs]
        if len(names) == 1:
            return names[0]
        columns = [nodes.add("Unsqueeze", [name, self._axes(2)]) for name in names]
        return nodes.add("Concat", columns, axis=2)

    def _write_inputs(self) -> None:
        nodes, kinds = self._nodes, self._stock.inputs
        zeros = nodes.add("Mul", ["input_ids", self._integer(0)])
        given = {
            stock.IDS: IDS,
            stock.MASK: "inside",
            stock.TYPES: "token_type_ids" if self._stock.reads_types else zeros,
            stock.POSITIONS: nodes.add("Add", [zeros, "row.places"]),
        }
        for name, kind in kinds.items():
            nodes.add("Cast", [given[name]], output=_PREFIX + name, to=kind)

    def _inner(self) -> onnx.ModelProto:
        """The stock graph with its own names, apart from ours, and its weights in our file."""
        model = onnx.ModelProto()
        model.CopyFrom(self._graph.model)
        places = dict[bytes, TensorProto]()
        for tensor in model.graph.initializer:
            name, place = tensor.name, _place(tensor)
            if place in places:  # some bytes of a file may be many tensors
                tensor.CopyFrom(places[place])
                tensor.name = name
                continue
            array = self._array(tensor)
            if array.nbytes >= _LEAST_WEIGHT:
                self.num_weights += array.size
            if array.nbytes >= _LEAST_WEIGHT and tensor.data_type in _IN_FILE:
                tensor.CopyFrom(self._data.write(name, array))
                if place:
                    places[place] = tensor
            elif tensor.external_data:
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
        if model.functions:
            model = inliner.inline_local_functions(model)
        version = {each.domain: each.version for each in model.opset_import}
        if version.get("", version.get("ai.onnx", OPSET)) < OPSET:
            model = self._raised(model)
        try:
            return compose.add_prefix(model, _PREFIX)
        except TypeError as error:  # bytes, which protobuf gives for what is no text
            raise ExportError(
                f"{self._graph.path.name} is damaged: a name in it is no text"
            ) from error

    def _array(self, tensor: TensorProto) -> NDArray[Any]:
        """The numbers of a tensor; of one in another file, they are looked for behind links."""
        folder = ""
        if is_outside(tensor):
            file = self._graph.data_file(tensor)
            folder = str(file.parent)
            for entry in tensor.external_data:
                entry.value = file.name if entry.key == "location" else entry.value
        try:
            found: NDArray[Any] = numpy_helper.to_array(tensor, folder)
        except (ValueError, onnx.checker.ValidationError) as error:
            raise ExportError(
                f"{self._graph.path.name} is damaged: tensor {tensor.name[:64]!r}: "
                f"{first_line(error)}"
            ) from error
        return found

    def _raised(self, model: onnx.ModelProto) -> onnx.ModelProto:
        try:
            return version_converter.convert_version(model, OPSET)
        except Exception as error:  # the converter has no class of its own for what it lacks
            raise ExportError(
                f"the operators of {self._graph.path.name} cannot be brought to version {OPSET}: "
                f"{first_line(error)}; export it again with --opset {OPSET}"
            ) from error

    def _write_head(self, hidden: str) -> None:
        if self._stock.is_pooled and not self._model.head.steps:
            self._nodes.add("Identity", [hidden], output=self._output)
        else:
            super()._write_head(hidden)

    def _pooled(self, hidden: str, name: str) -> str:
        return hidden if self._stock.is_pooled else super()._pooled(hidden, name)

    def _finish(self) -> onnx.ModelProto:
        made = super()._finish()
        for node in made.graph.node:  # of the other exporter's machine, and modules of none
            del node.metadata_props[:]
        for domain, version in self._opsets.items():
            own = [each for each in made.opset_import if each.domain == domain]
            if own:
                own[0].version = max(own[0].version, version)
            else:
                made.opset_import.add(domain=domain, version=version)
        made.ir_version = max(made.ir_version, self._ir_version)
        return made

    def _num_columns(self) -> int:
        head = self._model.head
        return self._model.hidden_size if head.embedding is None else head.embedding.dimension


def _place(tensor: TensorProto) -> bytes:
    """What tensors share whose numbers are the same bytes of a file; empty for other tensors."""
    if not is_outside(tensor):
        return b""
    unnamed = TensorProto()
    unnamed.CopyFrom(tensor)
    for field in ("name", "doc_string"):
        unnamed.ClearField(field)
    return bytes(unnamed.SerializeToString(deterministic=True))
