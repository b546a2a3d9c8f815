"""Quantized checkpoints: the float32 weights that their integers stand for.

* bitsandbytes: int8 rows with ``SCB`` (outputs,), the largest magnitude of each; or two 4-bit codes
  per byte, first one in the upper half, with ``quant_map`` (16,), the values of the codes, and
  ``absmax``, a factor per block, which may be quantized to a byte itself.
* fp8 (DeepSeek, Qwen, Ministral 3): float8 with ``weight_scale_inv``, a factor per block of the
  matrix or one for all of it.
* GPTQ and AWQ, compressed-tensors, HQQ, torchao: see the modules of these names beside this one.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from maskdial_export.checkpoint import compressed_tensors, gptq, hqq, torchao
from maskdial_export.checkpoint.blocks import StoredBlocks
from maskdial_export.errors import ExportError, first_line

Settings = Mapping[str, Any]  # quantization_config of config.json
Parts = Mapping[str, Tensor]  # what is stored for one module, by name
Restore = Callable[[Settings, Parts], Tensor]

_STATE = "weight.quant_state.bitsandbytes__"  # then the kind of codes


def dequantize(name: str, settings: Settings, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the checkpoint ``name``, as a checkpoint that is not quantized has them.

    Raises:
        ExportError: the format is not supported.
    """
    _, restore = _format(name, settings)
    modules = by_module(name, settings, weights)
    others = modules.pop("")
    plain = {key: weights[key] for key in others.values()}
    for module, keys in modules.items():
        stored = {part: weights[key] for part, key in keys.items()}
        try:
            plain[f"{module}.weight"] = restore(settings, stored)
        except ExportError as error:
            raise ExportError(f"{module} of {name} is damaged: {error.message}") from error
        except KeyError as error:
            raise ExportError(
                f"{module} of {name} is damaged: it has no {error.args[0]}"
            ) from error
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise ExportError(
                f"{module} of {name} is damaged, or {settings.get('quant_method')} of another kind "
                f"than config.json says: its parts do not fit together ({first_line(error)})"
            ) from error
        if "bias" in stored:
            plain[f"{module}.bias"] = stored["bias"]
    return plain


def by_module(name: str, settings: Settings, keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """The names of a checkpoint's tensors, by quantized module and the rest of the name.

    Tensors of other modules, but for scales of the KV cache, are those of the module "".

    Raises:
        ExportError: the format is not supported.
    """
    mark, _ = _format(name, settings)
    keys = list(keys)
    modules: dict[str, dict[str, str]] = {
        key[: key.index(f".{mark}")]: {} for key in keys if f".{mark}" in key
    }
    others: dict[str, str] = {}
    for key in keys:
        module = next((each for each in _parents(key) if each in modules), None)
        if module is not None:
            modules[module][key[len(module) + 1 :]] = key
        elif not key.endswith(compressed_tensors.CACHE_SCALES):
            others[key] = key
    return {**modules, "": others}


def _parents(key: str) -> list[str]:
    """The parts of a name before a dot, longest first."""
    return [key[:index] for index in reversed(range(len(key))) if key[index] == "."]


def _format(name: str, settings: Settings) -> tuple[str, Restore]:
    """The end of the name that quantized modules have, and how one is restored."""
    method, bits = settings.get("quant_method"), settings.get("bits", settings.get("w_bit"))
    reason = gptq.unsupported(settings) if method in ("gptq", "awq") else None
    if method in ("gptq", "awq") and reason is None:
        return "qweight", gptq.restore
    if method == "bitsandbytes" and settings.get("load_in_8bit"):
        return "SCB", _bitsandbytes_8bit
    if method == "bitsandbytes" and settings.get("load_in_4bit"):
        return _STATE, _bitsandbytes_4bit
    if method == "fp8" and settings.get("expert_dtype", "fp8") == "fp8":
        return "weight_scale_inv", _fp8
    if method == "compressed-tensors":
        compressed_tensors.check_settings(name, settings)
        return "weight_scale", compressed_tensors.restore
    if method == "hqq":
        return "W_q", lambda _, parts: hqq.restore(parts)
    if method == "torchao":
        return "_weight_qdata", lambda _, parts: torchao.restore(parts)
    details = [f"{bits} bits"] * (bits is not None)
    details += [str(settings[key]) for key in ("version", "format") if settings.get(key)]
    kind = f"{method or 'an unnamed format'}{' of ' if details else ''}{', '.join(details)}"
    if method == "fp8":
        kind = f"fp8 with experts in {settings['expert_dtype']}"
    raise ExportError(
        f"{name} is quantized with {reason or kind}, which is not supported (gptq of 2, 4 and 8 "
        "bits, awq of 4 bits in format gemm, bitsandbytes, compressed-tensors, hqq, torchao and "
        "fp8 are); export "
        "the checkpoint that it was made from, with --precision int8 or int4"
    )


def _bitsandbytes_8bit(_settings: Settings, parts: Parts) -> Tensor:
    return parts["weight"].float() * (parts["SCB"].float() / 127)[:, None]


def _bitsandbytes_4bit(_settings: Settings, parts: Parts) -> Tensor:
    (encoded,) = (part for key, part in parts.items() if key.startswith(_STATE))
    state = json.loads(bytes(encoded.tolist()))
    factors = parts["weight.absmax"]
    if "weight.nested_absmax" in parts:
        blocks = torch.arange(len(factors)) // state["nested_blocksize"]
        factors = parts["weight.nested_quant_map"][factors.long()]
        factors = factors * parts["weight.nested_absmax"][blocks] + state["nested_offset"]
    codes = parts["weight"].flatten()
    values = parts["weight.quant_map"][torch.stack([codes >> 4, codes & 15], 1).flatten().long()]
    factors = factors.repeat_interleave(state["blocksize"])[: len(values)]
    return (values * factors)[: torch.Size(state["shape"]).numel()].reshape(state["shape"])


def read_integers(settings: Settings, parts: Parts) -> StoredBlocks | None:
    """The integers of a module whose groups are neighboring inputs; None if it has no such form.

    ``dequantize`` of what it returns is the weight that `dequantize` restores, to the last bit.
    """
    method = settings.get("quant_method")
    if method == "compressed-tensors":
        return compressed_tensors.read_integers(parts)
    if method == "hqq":
        return hqq.read_integers(parts)
    if method == "torchao":
        return torchao.read_integers(parts)
    return gptq.read_integers(settings, parts) if method in ("gptq", "awq") else None


def _fp8(settings: Settings, parts: Parts) -> Tensor:
    weight = parts["weight"].float()
    factors = parts["weight_scale_inv"].float()
    if factors.numel() == 1:
        return weight * factors.reshape(())
    rows, columns = settings["weight_block_size"]
    blocks = tuple(
        -(-size // each) for size, each in zip(weight.shape, (rows, columns), strict=True)
    )
    if factors.shape != blocks:
        raise ValueError(f"factors of the shape {tuple(factors.shape)}, not {blocks}")
    factors = factors.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return weight * factors[: weight.shape[0], : weight.shape[1]]
