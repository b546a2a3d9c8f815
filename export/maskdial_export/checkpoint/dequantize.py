"""Quantized checkpoints: the float32 weights that their integers stand for.

* GPTQ (AutoGPTQ, GPTQModel): ``qweight`` int32 (inputs / n, outputs) holds n integers along the
  inputs, lowest bits first; ``qzeros`` (groups, outputs / n) along the outputs, minus 1 in the
  format's first version; ``scales`` (groups, outputs); ``g_idx`` (inputs,), each input's group.
* AWQ (AutoAWQ's version gemm): ``qweight`` (inputs, outputs / 8) and ``qzeros`` (groups,
  outputs / 8) hold 8 integers in an order of their own; ``scales`` (groups, outputs).
* bitsandbytes: int8 rows with ``SCB`` (outputs,), the largest magnitude of each; or two 4-bit codes
  per byte, first one in the upper half, with ``quant_map`` (16,), the values of the codes, and
  ``absmax``, a factor per block, which may be quantized to a byte itself.
* fp8 (DeepSeek, Qwen): float8 with ``weight_scale_inv``, a factor per block of the matrix.
* compressed-tensors, HQQ, torchao: see the modules of these names beside this one.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from maskdial_export.checkpoint import compressed_tensors, hqq, torchao
from maskdial_export.checkpoint.blocks import StoredBlocks
from maskdial_export.errors import ExportError

Settings = Mapping[str, Any]  # quantization_config of config.json
Parts = Mapping[str, Tensor]  # what is stored for one module, by name
Restore = Callable[[Settings, Parts], Tensor]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
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
    if method == "gptq" and bits in (2, 4, 8):
        return "qweight", _gptq
    if method == "awq" and bits == 4 and settings.get("version", "gemm") == "gemm":
        return "qweight", _awq
    if method == "bitsandbytes" and settings.get("load_in_8bit"):
        return "SCB", _bitsandbytes_8bit
    if method == "bitsandbytes" and settings.get("load_in_4bit"):
        return _STATE, _bitsandbytes_4bit
    if method == "fp8" and settings.get("weight_block_size"):
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
        kind = "fp8 without blocks (weight_block_size)"
    raise ExportError(
        f"{name} is quantized with {kind}, which is not supported (gptq of 2, 4 and 8 bits, awq of "
        "4 bits in version gemm, bitsandbytes, compressed-tensors, hqq, torchao, and fp8 in blocks "
        "are); export "
        "the checkpoint that it was made from, with --precision int8 or int4"
    )


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """The integers in each int32, lowest bits first: (..., 32 / bits)."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    integers: Tensor = (packed[..., None] >> shifts) & (2**bits - 1)
    return integers


def _gptq_integers(settings: Settings, parts: Parts) -> tuple[Tensor, Tensor]:
    """The integers (inputs, outputs) and zeros (groups, outputs)."""
    bits = int(settings["bits"])
    integers = _unpack(parts["qweight"], bits).transpose(1, 2).flatten(0, 1)
    zeros = _unpack(parts["qzeros"], bits).flatten(1)[:, : parts["scales"].shape[1]]
    if settings.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = (zeros + 1) & (2**bits - 1)
    return integers, zeros


def _gptq(settings: Settings, parts: Parts) -> Tensor:
    scales = parts["scales"].float()
    integers, zeros = _gptq_integers(settings, parts)
    group = parts.get("g_idx")
    if group is None:
        group = torch.arange(len(integers)) // (len(integers) // len(scales))
    return ((integers - zeros[group]) * scales[group]).T.contiguous()


def _awq_integers(_settings: Settings, parts: Parts) -> tuple[Tensor, Tensor]:
    """The integers (inputs, outputs) and zeros (groups, outputs)."""
    order = torch.tensor(_AWQ_ORDER).argsort()
    packed = (parts["qweight"], parts["qzeros"])
    integers, zeros = (_unpack(each, 4)[..., order].flatten(1) for each in packed)
    return integers, zeros


def _awq(settings: Settings, parts: Parts) -> Tensor:
    integers, zeros = _awq_integers(settings, parts)
    group = torch.arange(len(integers)) // (len(integers) // len(zeros))
    return ((integers - zeros[group]) * parts["scales"].float()[group]).T.contiguous()


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
    if method not in ("gptq", "awq"):
        return None
    bits = 4 if method == "awq" else int(settings["bits"])
    integers, zeros = (_awq_integers if method == "awq" else _gptq_integers)(settings, parts)
    num_inputs, num_groups = len(integers), len(zeros)
    size = num_inputs // num_groups
    order = parts.get("g_idx")
    if num_inputs % num_groups or (
        order is not None and not torch.equal(order.long(), torch.arange(num_inputs) // size)
    ):
        return None
    return StoredBlocks(
        integers.T.to(torch.uint8).contiguous().numpy(),
        parts["scales"].float().T.contiguous().numpy(),
        None,
        bits,
        size,
        zeros.T.to(torch.uint8).contiguous().numpy(),
    )


def _fp8(settings: Settings, parts: Parts) -> Tensor:
    weight = parts["weight"].float()
    rows, columns = settings["weight_block_size"]
    factors = parts["weight_scale_inv"].float().repeat_interleave(rows, 0)
    factors = factors.repeat_interleave(columns, 1)
    return weight * factors[: weight.shape[0], : weight.shape[1]]
