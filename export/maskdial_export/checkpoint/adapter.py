"""Adapters that PEFT trained, such as LoRA: merged into the weights that they were trained for."""

import struct
import warnings
from pathlib import Path
from typing import Any

import safetensors
from transformers import PreTrainedModel

from maskdial.extras import how_to_install
from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.errors import ExportError, first_line

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of every name that PEFT saves
# safetensors itself reads headers of 100 MB; the largest adapters name some thousand matrices.
_MAX_HEADER_BYTES = 8 * 2**20
_LENGTH = struct.Struct("<Q")


def check_adapter(folder: Path, *, allow_pickle: bool) -> None:
    """Checks that a folder holds an adapter, without loading it.

    Raises:
        ExportError: it does not, its weights are damaged, or they are a pickle and ``allow_pickle``
            is not set.
    """
    if not read_json(folder / _CONFIG):
        raise ExportError(f"{folder} is not a PEFT adapter: it has no {_CONFIG}")
    if (folder / _WEIGHTS).is_file():
        _check_header(folder / _WEIGHTS)
        return
    pickled = folder / "adapter_model.bin"
    if not pickled.is_file():
        raise ExportError(f"the adapter {folder} has no weights: {_WEIGHTS} is missing")
    if not allow_pickle:
        raise ExportError(
            f"the weights of {folder} are in {pickled.name}, a pickle, which can run code when "
            "loaded; convert it to safetensors, or pass --allow-pickle if you trust it"
        )


def _check_header(path: Path) -> None:
    """Raises: ExportError: it does not describe what is in the file."""
    try:
        with path.open("rb") as file:
            length = file.read(_LENGTH.size)
        if len(length) == _LENGTH.size and _LENGTH.unpack(length)[0] > _MAX_HEADER_BYTES:
            raise ExportError(f"{path} is damaged: its header would have more than 8 MiB")
        with safetensors.safe_open(path, "pt"):
            pass
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise ExportError(
            f"{path} is damaged or incomplete ({first_line(error)}); get it again"
        ) from error


def whole_weights(folder: Path) -> frozenset[str]:
    """The names of weights that the adapter replaces as a whole, such as a new head's."""
    if not (folder / _WEIGHTS).is_file():
        return frozenset()
    with safetensors.safe_open(folder / _WEIGHTS, "pt") as stored:
        return frozenset(name.removeprefix(_PREFIX) for name in stored.keys())  # noqa: SIM118


def merge_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Adds the adapter to the model's weights, and returns the model without PEFT's layers.

    Raises:
        ExportError: PEFT is missing, the adapter belongs to another model, or its kind has no
            weights to merge.
    """
    try:
        import peft
    except ImportError as error:
        raise ExportError(f"--adapter needs peft ({error}): {how_to_install('adapter')}") from error
    kind = read_json(folder / _CONFIG).get("peft_type")
    try:
        with warnings.catch_warnings(record=True) as complaints:
            warnings.simplefilter("always")
            adapted: Any = peft.PeftModel.from_pretrained(
                model, str(folder), torch_device="cpu", local_files_only=True
            )
    except Exception as error:  # peft has no common error class
        raise ExportError(
            f"the adapter {folder} does not fit the model: {first_line(error)}"
        ) from error
    if any("missing adapter keys" in str(each.message) for each in complaints):
        raise ExportError(f"{folder / _WEIGHTS} lacks weights that {_CONFIG} describes")
    if not hasattr(adapted.base_model, "merge_and_unload"):
        raise ExportError(f"{folder} is a {kind} adapter, which cannot be merged into weights")
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged
