"""Adapters that PEFT trained, such as LoRA: merged into the weights that they were trained for."""

import warnings
from pathlib import Path
from typing import Any

import safetensors
from transformers import PreTrainedModel

from maskdial_export.checkpoint.source import read_json
from maskdial_export.errors import ExportError, first_line

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of every name that PEFT saves


def check_adapter(folder: Path, *, allow_pickle: bool) -> None:
    """Checks that a folder holds an adapter, without loading it.

    Raises:
        ExportError: it does not, or its weights are a pickle and ``allow_pickle`` is not set.
    """
    if not read_json(folder / _CONFIG):
        raise ExportError(f"{folder} is not a PEFT adapter: it has no {_CONFIG}")
    if (folder / _WEIGHTS).is_file():
        return
    pickled = folder / "adapter_model.bin"
    if not pickled.is_file():
        raise ExportError(f"the adapter {folder} has no weights: {_WEIGHTS} is missing")
    if not allow_pickle:
        raise ExportError(
            f"the weights of {folder} are in {pickled.name}, a pickle, which can run code when "
            "loaded; convert it to safetensors, or pass --allow-pickle if you trust it"
        )


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
        raise ExportError(
            f"--adapter needs peft ({error}): pip install 'maskdial[adapter]'"
        ) from error
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
