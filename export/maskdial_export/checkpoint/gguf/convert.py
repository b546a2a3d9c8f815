"""From a GGUF file, or the parts of one, to a checkpoint as transformers saves it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console

from maskdial_export.checkpoint.gguf.contents import Contents, read_contents, write_settings
from maskdial_export.checkpoint.gguf.restored import write_pooling, write_weights
from maskdial_export.checkpoint.gguf.weights import count_kinds
from maskdial_export.errors import ExportError, UntraceableError, first_line
from maskdial_export.phase import finding

_MAX_SURPLUS = 2**20  # parameters of the model that the file may lack


def convert(parts: Sequence[Path], folder: Path, console: Console | None = None) -> None:
    """Writes a checkpoint of float32 weights into an empty folder.

    Raises:
        UntraceableError: transformers' class does not have the weights as they are here.
        ExportError: a file is damaged, or its model or its tokenizer is not supported.
        OSError: a file cannot be read or written.
    """
    contents = read_contents(parts)
    if not contents.model.traceable:
        raise UntraceableError(
            f"a GGUF file of {contents.settings.architecture} is written directly, and cannot be "
            "traced; leave out the options that need a trace, or export the checkpoint that "
            f"{contents.file.path} was made from"
        )
    _check_shapes(contents)
    write_settings(contents, folder)
    write_pooling(contents, folder)
    kinds = count_kinds(list(contents.weights))
    total = sum(kinds.values())
    shares = ", ".join(f"{kind} {count / total:.1%}" for kind, count in kinds.items())
    finding(
        console or Console(quiet=True),
        f"GGUF of {contents.settings.architecture} with {total:,} weights: {shares}; "
        "restored to float32",
    )
    write_weights(contents.weights, folder / "model.safetensors")


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
