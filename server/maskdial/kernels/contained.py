"""What a graph must be that is loaded from its bytes: contained in them."""

from collections.abc import Iterator
from typing import Any

import onnx

from maskdial.errors import BundleError

_ORT_FORMAT = b"ORTM"  # ONNX Runtime takes bytes with this at the fifth place for its own format


def check_contained(content: bytes, what: str) -> None:
    """Refuses a graph that has any of its tensors in other files.

    ONNX Runtime looks for such files where the server was started, and what it finds there becomes
    weights, which answers tell. No hash covers it, and no limit on memory counts it. A tensor may
    be anywhere: in initializers, in attributes, in subgraphs, in functions.

    Args:
        content: the graph, serialized.
        what: it is, for messages.

    Raises:
        BundleError: it has, or it is not ONNX.
    """
    try:
        if content[4:8] == _ORT_FORMAT:
            raise ValueError("it is in ONNX Runtime's own format")
        model = onnx.load_model_from_string(content)
    except Exception as error:  # protobuf's have no common base
        raise BundleError(f"{what} is no ONNX graph: {error}") from error
    for tensor in _tensors(model):
        if tensor.external_data or tensor.data_location != onnx.TensorProto.DEFAULT:
            raise BundleError(
                f"{what} has data in another file (tensor {tensor.name[:64]!r}); save it with "
                "all of its tensors in the graph"
            )


def _tensors(message: Any) -> Iterator[Any]:
    """Every tensor in a message, whatever it is part of."""
    if message.DESCRIPTOR.name == "TensorProto":
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for each in [value] if hasattr(value, "DESCRIPTOR") else value:
            yield from _tensors(each)
