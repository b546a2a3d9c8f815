"""The files of a checkpoint that a GGUF file is restored to, beside its settings.

Nothing here needs torch.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maskdial_export.checkpoint.gguf.contents import Contents, write_json
from maskdial_export.checkpoint.gguf.weights import Weight, read_values
from maskdial_export.errors import ExportError

_DENSE = ("dense_2.weight", "dense_3.weight")


def write_pooling(contents: Contents, folder: Path) -> None:
    """Writes sentence-transformers' modules into the folder, of a model that pools.

    The vectors are normalized, as llama.cpp's server does.
    """
    if contents.model.pooling is None:
        return
    modules = ["Transformer", "Pooling"]
    width = contents.model.config["hidden_size"]
    pooling = folder / "1_Pooling"
    pooling.mkdir()
    mode = f"pooling_mode_{contents.model.pooling}"
    write_json(pooling / "config.json", {"word_embedding_dimension": width, mode: True})
    for name in _DENSE:
        tensor = contents.file.tensors.get(name)
        if tensor is not None:
            if len(tensor.shape) != 2:
                raise ExportError(
                    f"{name} of {contents.file.path} has the shape {tensor.shape}; it must be a "
                    "matrix"
                )
            dense = folder / f"{len(modules)}_Dense"
            dense.mkdir()
            outputs, inputs = tensor.shape
            linear = {"in_features": inputs, "out_features": outputs, "bias": False}
            activation = "torch.nn.modules.linear.Identity"
            write_json(dense / "config.json", linear | {"activation_function": activation})
            _write_tensors(
                {"linear.weight": (outputs, inputs)},
                [read_values(tensor)],
                dense / "model.safetensors",
            )
            modules.append("Dense")
    modules.append("Normalize")
    write_json(
        folder / "modules.json",
        [
            {
                "idx": index,
                "name": str(index),
                "path": "" if index == 0 else f"{index}_{module}",
                "type": f"sentence_transformers.models.{module}",
            }
            for index, module in enumerate(modules)
        ],
    )


def write_weights(weights: Sequence[Weight], path: Path) -> None:
    """Writes a safetensors file of float32."""
    shapes = {weight.name: weight.shape for weight in weights}
    _write_tensors(shapes, (weight.values() for weight in weights), path)


def _write_tensors(shapes: Any, values: Any, path: Path) -> None:
    """Writes a safetensors file of float32, one tensor after the other.

    The library's own writer wants all of them in memory.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for each in values:
            file.write(memoryview(each).cast("B"))
