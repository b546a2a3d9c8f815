"""Graphs of ONNX in a folder that has no weights beside them.

They come from optimum, from sentence-transformers with ``backend="onnx"``, and from repositories of
the Hub that have ``onnx/model.onnx``.
"""

from pathlib import Path

from maskdial_export.errors import ExportError

ONNX = ".onnx"
_PLACES = ("", "onnx")
_PLAIN = "model.onnx"
_ROUNDED = ("quantized", "int8", "uint8", "q8")  # in the names that optimum and others give
_GENAI = "genai_config.json"
_ENGINES = (".engine", ".plan", ".trt")
_OPENVINO = "openvino"
_INSTEAD = "export the checkpoint that it was made of, with its weights in safetensors"


def find_graphs(name: str, folder: Path) -> list[Path]:
    """The graphs of a folder that may be encoders; empty if there are none.

    Args:
        name: the folder's, for messages.
        folder: of a model without weights in another form.

    Raises:
        ExportError: it is in a form of which no bundle is made; the message says which.
    """
    if (folder / _GENAI).exists():
        raise ExportError(
            f"{name} is a model of onnxruntime-genai ({_GENAI}), a decoder whose graph has a KV "
            f"cache in a form of its own; {_INSTEAD}"
        )
    files = [file for place in _PLACES for file in sorted((folder / place).glob("*"))]
    graphs = [file for file in files if file.suffix == ONNX]
    decoders = [file for file in graphs if file.stem.startswith(("decoder_", "encoder_model"))]
    if decoders:
        raise ExportError(
            f"{name} has {decoders[0].name}, optimum's graph of a model that writes, with a KV "
            f"cache in a form of its own; {_INSTEAD}"
        )
    if graphs:
        return graphs
    engines = [file for file in files if file.suffix in _ENGINES]
    if engines:
        raise ExportError(
            f"{name} has {engines[0].name}, an engine of TensorRT, which runs on one kind of GPU "
            f"alone; {_INSTEAD}"
        )
    others = [*folder.glob(f"{_OPENVINO}*.xml"), *folder.glob(f"{_OPENVINO}/*.xml")]
    if others:
        raise ExportError(
            f"{name} has {others[0].name}, a model in OpenVINO's form, which is not read; "
            f"{_INSTEAD}, or take its graph in ONNX"
        )
    return []


def choose_graph(name: str, graphs: list[Path], precision: str | None) -> Path:
    """The graph that is meant: ``model.onnx``, or with int8 the one whose name says so.

    Raises:
        ExportError: there is none, or there are several.
    """
    found = graphs
    if precision == "int8":
        found = [file for file in graphs if any(word in file.stem for word in _ROUNDED)]
    elif any(file.name == _PLAIN for file in graphs):
        found = [file for file in graphs if file.name == _PLAIN][:1]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ExportError(
            f"{name} has no graph in int8, and what it has is taken as it is; leave out "
            f"--precision, or {_INSTEAD}"
        )
    names = ", ".join(file.name for file in found)
    raise ExportError(f"{name} has several graphs: {names}; leave one of them in the folder")
