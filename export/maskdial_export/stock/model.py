"""A graph of ONNX as another exporter wrote it: what it reads and what it gives, by their names."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnxruntime
from google.protobuf.message import DecodeError
from onnx import TensorProto

from maskdial.bundle.manifest import TaskName
from maskdial_export.direct.encoder import OnePass, Shapes
from maskdial_export.errors import ExportError, first_line

IDS, MASK, TYPES, POSITIONS = "input_ids", "attention_mask", "token_type_ids", "position_ids"
_READ = frozenset({IDS, MASK, TYPES, POSITIONS})
_INTEGERS = frozenset({TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT, TensorProto.BOOL})
_POOLED = "sentence_embedding"
_STATES = ("token_embeddings", "last_hidden_state")
_SPANS = ("start_logits", "end_logits")
_LOGITS = "logits"
_OF_CLASSES: Mapping[str, TaskName] = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token-classify",
    "ForMaskedLM": "fill-mask",
}
# Operators of integers, and of weights that are restored from them
_ROUNDS = frozenset(
    {
        *("DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearMatMul"),
        *("DequantizeLinear", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QAttention"),
    }
)
_BLOCKS = "MatMulNBits"


@dataclass(frozen=True, slots=True, kw_only=True)
class StockModel(OnePass):
    """A model that reads a text in one pass, in a graph that is taken as it is.

    Attributes:
        inputs: the types of the graph's inputs, by name.
        outputs: those that are read; several stand for columns side by side.
        is_pooled: whether an output is a vector of the whole text.
    """

    inputs: Mapping[str, int]
    outputs: tuple[str, ...]
    is_pooled: bool

    @property
    def windows(self) -> tuple[int, ...]:
        """Of a graph, nobody knows."""
        return ()

    def shapes(self) -> Shapes:
        """None: the weights are the graph's own."""
        return {}


@dataclass(frozen=True, slots=True)
class StockGraph:
    """A graph in a file.

    Attributes:
        path: the file.
        model: without what is in files of weights beside it.
        inputs: their element types, by name.
        outputs: their names.
    """

    path: Path
    model: onnx.ModelProto
    inputs: Mapping[str, int]
    outputs: tuple[str, ...]

    @property
    def rounds(self) -> bool:
        """Whether it computes with integers."""
        return any(node.op_type in _ROUNDS for node in self.model.graph.node)

    def files(self) -> tuple[Path, ...]:
        """The file, and those that have its weights.

        Raises:
            ExportError: a tensor is in none of the graph's folder.
        """
        outside = [each for each in self.model.graph.initializer if is_outside(each)]
        return (self.path, *sorted({self.data_file(tensor) for tensor in outside}))

    def data_file(self, tensor: TensorProto) -> Path:
        """The file that a tensor outside the graph is in, without links: in a folder of the Hub's
        cache, each file is a link into another one, which has the files of the graph's repository.

        Raises:
            ExportError: there is none, or it is elsewhere.
        """
        name = {each.key: each.value for each in tensor.external_data}.get("location", "")
        folders = self.path.parent.resolve(), self.path.resolve().parent
        file: Path = (folders[0] / name.partition("\0")[0]).resolve()  # a name in C ends there
        if file.is_file() and any(file.is_relative_to(folder) for folder in folders):
            return file
        raise ExportError(
            f"the tensor {tensor.name[:64]!r} of {self.path.name} is in {name[:64]!r}, which is no "
            "file in the graph's folder"
        )

    def task(
        self, architecture: str, *, prefers_tokens: bool = False
    ) -> tuple[TaskName, tuple[str, ...], bool]:
        """What it is for, the outputs that say so, and whether they are of a whole text.

        Args:
            architecture: transformers' class.
            prefers_tokens: whether vectors of tokens are read where it gives those of texts, too.

        Raises:
            ExportError: no output is known, or the class of logits is not.
        """
        if set(self.outputs).issuperset(_SPANS):
            return "question-answering", _SPANS, False
        if _LOGITS in self.outputs:
            for end, task in _OF_CLASSES.items():
                if architecture.endswith(end):
                    return task, (_LOGITS,), task == "classify"
            raise ExportError(
                f"the graph {self.path.name} gives logits, and architectures in config.json, "
                f"{architecture or 'which is empty'}, does not say of what; it must end with one "
                f"of {', '.join(_OF_CLASSES)}"
            )
        found = [name for name in _STATES if name in self.outputs]
        if _POOLED in self.outputs and not (found and prefers_tokens):
            return "embed", (_POOLED,), True
        if not found:
            raise ExportError(
                f"the graph {self.path.name} gives {', '.join(self.outputs)}; it must give "
                f"{', '.join((_LOGITS, *_SPANS, _POOLED, *_STATES))} or some of them"
            )
        return "embed", tuple(found[:1]), False


def load_as_it_is(path: Path, *, optimizes: bool = True) -> onnxruntime.InferenceSession:
    """A session of a graph's file; ``optimizes``: whether ONNX Runtime does."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised, and said in words of our own
    if not optimizes:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def is_outside(tensor: TensorProto) -> bool:
    """Whether a tensor's numbers are in a file beside the graph."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def read_graph(path: Path) -> StockGraph:
    """Reads a graph, and refuses one that cannot be served with others' texts in a batch.

    Raises:
        ExportError: it is damaged, or has inputs or types that are not known.
        OSError: it cannot be read.
    """
    try:
        model = onnx.load(str(path), load_external_data=False)
        load_as_it_is(path)
    except OSError:
        raise
    except (DecodeError, ValueError) as error:
        raise ExportError(f"{path} is no graph of ONNX: {first_line(error)}") from error
    except Exception as error:  # ONNX Runtime's exceptions share no other base
        raise ExportError(f"ONNX Runtime cannot load {path}: {first_line(error)}") from error
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = {}
    for value in model.graph.input:
        if value.name in constants:
            continue
        inputs[value.name] = value.type.tensor_type.elem_type
        _check_input(path, value)
    for name in (IDS, MASK):
        if name not in inputs:
            raise ExportError(
                f"the graph {path.name} has no input {name}, without which texts of several "
                "lengths cannot share a batch; export it again with optimum-cli"
            )
    if any(tensor.data_type == TensorProto.FLOAT16 for tensor in model.graph.initializer):
        raise ExportError(
            f"the weights of {path.name} are float16, in which a processor does not compute; take "
            "the graph in float32"
        )
    if any(node.op_type == _BLOCKS for node in model.graph.node):
        raise ExportError(
            f"{path.name} has products in blocks ({_BLOCKS}) that were rounded elsewhere, and "
            "nothing says what they lose; take the graph in float32 or int8"
        )
    return StockGraph(path, model, inputs, tuple(value.name for value in model.graph.output))


def _check_input(path: Path, value: onnx.ValueInfoProto) -> None:
    """Refuses an input that is not known, or not of any number of tokens."""
    name, kind = value.name, value.type.tensor_type
    if name.startswith("past_key_values") or name == "past_key":
        raise ExportError(
            f"the graph {path.name} has an input {name}: it is a decoder with a KV cache in a form "
            "of its own; export the checkpoint that it was made of"
        )
    if name not in _READ:
        raise ExportError(
            f"the graph {path.name} has an input {name}; those of texts are "
            f"{', '.join(sorted(_READ))}"
        )
    dims = kind.shape.dim
    if kind.elem_type not in _INTEGERS or len(dims) != 2:
        raise ExportError(
            f"the input {name} of the graph {path.name} must be of integers, (batch, length)"
        )
    if any(dim.HasField("dim_value") for dim in dims):
        sizes = ", ".join(str(dim.dim_value or dim.dim_param or "any") for dim in dims)
        raise ExportError(
            f"the input {name} of the graph {path.name} has the shape ({sizes}); export it again "
            "with both sizes dynamic, as optimum-cli does"
        )
