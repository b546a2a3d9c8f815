"""The integers of a quantized checkpoint, read when they are asked for."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors

from maskdial_export.checkpoint import hqq
from maskdial_export.checkpoint.blocks import StoredBlocks, StoredMatrix
from maskdial_export.checkpoint.dequantize import by_module, read_integers
from maskdial_export.checkpoint.gguf.contents import read_contents
from maskdial_export.checkpoint.source import Source


def stored_matrices(source: Source) -> dict[str, StoredMatrix]:
    """The matrices of integers of a GGUF file or of a checkpoint of safetensors, by module."""
    if source.gguf:
        weights = read_contents(source.gguf).weights
        return {
            each.name.removesuffix(".weight"): StoredMatrix(each.bits, each.blocks)
            for each in weights
            if each.bits is not None
        }
    settings = source.read_json("config.json").get("quantization_config")
    bits = None if settings is None else _bits(settings)
    if settings is None or bits is None:
        return {}
    files = [file for file in source.weight_files() if file.suffix == ".safetensors"]
    places: dict[str, Path] = {}
    for file in files:
        with safetensors.safe_open(file, "pt") as opened:
            places |= dict.fromkeys(opened.keys(), file)
    modules = by_module(source.name, settings, places)
    del modules[""]
    return {
        module: StoredMatrix(bits, partial(_read, settings, places, keys))
        for module, keys in modules.items()
    }


def _bits(settings: Mapping[str, Any]) -> int | None:
    """How many bits the integers of a format have; None if it has none."""
    method = settings.get("quant_method")
    if method == "gptq":
        return int(settings["bits"])
    if method == "awq":
        return 4
    if method == "hqq":
        return hqq.num_bits(settings)
    if method == "torchao":
        return 4 if '"int4"' in json.dumps(settings.get("quant_type")) else 8
    groups = (settings.get("config_groups") or {}).values()
    kinds = [group.get("weights") or {} for group in groups]
    found = [int(kind["num_bits"]) for kind in kinds if kind.get("strategy", "").endswith("group")]
    return max(found) if method == "compressed-tensors" and found else None


def _read(
    settings: Mapping[str, Any], places: Mapping[str, Path], keys: Mapping[str, str]
) -> StoredBlocks | None:
    parts = {}
    for part, key in keys.items():
        with safetensors.safe_open(places[key], "pt") as opened:
            parts[part] = opened.get_tensor(key)
    return read_integers(settings, parts)
