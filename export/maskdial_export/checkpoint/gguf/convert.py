"""From a GGUF file, or the parts of one, to a checkpoint as transformers saves it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console

from maskdial_export.checkpoint.gguf.contents import (
    Contents,
    read_contents,
    write_json,
    write_settings,
)
from maskdial_export.checkpoint.gguf.weights import Weight, count_kinds, read_values
from maskdial_export.errors import ExportError, first_line
from maskdial_export.phase import finding

_DENSE = ("dense_2.weight", "dense_3.weight")
_MAX_SURPLUS = 2**20  # parameters of the model that the file may lack


def convert(parts: Sequence[Path], folder: Path, console: Console | None = None) -> None:
    """Writes a checkpoint of float32 weights into an empty folder.

    Raises:
        ExportError: a file is damaged, or its model or its tokenizer is not supported.
        OSError: a file cannot be read or written.
    """
    contents = read_contents(parts)
    if not contents.model.traceable:
        raise ExportError(
            f"a GGUF file of {contents.settings.architecture} is written directly, and cannot be "
            "traced; leave out the options that need a trace, or export the checkpoint that "
            f"{contents.file.path} was made from"
        )
    _check_shapes(contents)
    write_settings(contents, folder)
    if contents.model.pooling is not None:
        _write_pooling(contents, folder)
    kinds = count_kinds(list(contents.weights))
    total = sum(kinds.values())
    shares = ", ".join(f"{kind} {count / total:.1%}" for kind, count in kinds.items())
    finding(
        console or Console(quiet=True),
        f"GGUF of {contents.settings.architecture} with {total:,} weights: {shares}; "
        "restored to float32",
    )
    _write_weights(contents.weights, folder / "model.safetensors")


def _check_shapes(contents: Contents) -> None:
    """Compares weights with the model that the metadata describes, before it takes memory."""
    transformers.utils.logging.set_verbosity_error()
    model_class = getattr(transformers, contents.model.architecture)
    try:
        config = model_class.config_class(**contents.model.config)
        with torch.device("meta"):
            model = model_class(config)
    except Exception as error:  # transformers raises many types for settings that do not fit
        raise ExportError(
            f"the metadata of {contents.file.path} describes no {contents.model.architecture}: "
            f"{first_line(error)}"
        ) from error
    expected = {name: tuple(each.shape) for name, each in model.named_parameters()}
    stored = 0
    for weight in contents.weights:
        shape = weight.shape
        stored += int(np.prod(shape))
        if expected.get(weight.name, shape) != shape:
            raise ExportError(
                f"{weight.pieces[0].tensor.name} of {contents.file.path} has the shape {shape}, "
                f"but the metadata describes a model where it has {expected[weight.name]}"
            )
    described = sum(each.numel() for each in model.parameters())
    if described > 2 * stored + _MAX_SURPLUS:
        raise ExportError(
            f"the metadata of {contents.file.path} describes a model of {described:,} parameters, "
            f"and the file has {stored:,}"
        )


def _write_pooling(contents: Contents, folder: Path) -> None:
    """sentence-transformers' modules; the vectors are normalized, as llama.cpp's server does."""
    modules = ["Transformer", "Pooling"]
    width = contents.model.config["hidden_size"]
    pooling = folder / "1_Pooling"
    pooling.mkdir()
    mode = f"pooling_mode_{contents.model.pooling}"
    write_json(pooling / "config.json", {"word_embedding_dimension": width, mode: True})
    for name in _DENSE:
        tensor = contents.file.tensors.get(name)
        if tensor is not None and not tensor.is_vector:
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


def _write_weights(weights: Sequence[Weight], path: Path) -> None:
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
