"""How many bytes of weights a pass of an exported graph reads."""

import math
from pathlib import Path

import onnx
from onnx import helper

# They read a few rows of a table, not all of it.
_READS_ROWS = (
    "Gather",
    "GatherND",
    "GatherBlockQuantized",
    "GroupQueryAttention",
    "RotaryEmbedding",
)


def bytes_read(graph: Path) -> int:
    """The size of all constants but those of which only rows are read, such as embeddings."""
    model = onnx.load(graph, load_external_data=False).graph
    read = {name for node in model.node if node.op_type not in _READS_ROWS for name in node.input}
    return sum(_size(tensor) for tensor in model.initializer if tensor.name in read)


def _size(tensor: onnx.TensorProto) -> int:
    width: float = helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    if tensor.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4):
        width = 0.5
    return int(math.prod(tensor.dims) * width)
