"""GPTQ's and AWQ's integers, packed in int32.

* GPTQ (AutoGPTQ, GPTQModel): ``qweight`` int32 (inputs / n, outputs) holds n integers along the
  inputs, lowest bits first; ``qzeros`` (groups, outputs / n) along the outputs, minus 1 in the
  format's first version; ``scales`` (groups, outputs); ``g_idx`` (inputs,), each input's group.
* AWQ (AutoAWQ's version gemm): ``qweight`` (inputs, outputs / 8) and ``qzeros`` (groups,
  outputs / 8) hold 8 integers in an order of their own; ``scales`` (groups, outputs).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from maskdial_export.checkpoint.blocks import StoredBlocks
from maskdial_export.errors import ExportError

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FIRST, _SECOND, _GEMM = "gptq", "gptq_v2", "gemm"
# What one module may have of its own by ``dynamic``, and what changes nothing of what is stored
_STORED = ("bits", "group_size", "sym", "pack_dtype", "format", "checkpoint_format", "quant_method")


def unsupported(settings: Mapping[str, Any]) -> str | None:
    """What is not supported of a checkpoint's settings; None if all is."""
    method, bits = settings.get("quant_method"), settings.get("bits", settings.get("w_bit", 4))
    known = (_GEMM,) if method == "awq" else (_FIRST, _SECOND)
    if bits not in ((4,) if method == "awq" else (2, 4, 8)) or _format(settings) not in known:
        return f"{method} of {bits} bits in format {_format(settings)}"
    if settings.get("pack_dtype", "int32") not in ("int32", None):
        return f"{method} packed in {settings['pack_dtype']}"
    for pattern, changed in (settings.get("dynamic") or {}).items():
        own = [
            key
            for key in _STORED
            if (changed or {}).get(key, settings.get(key)) != settings.get(key)
        ]
        if own and not str(pattern).startswith("-:"):
            return f"{method} with other {own[0]} for {pattern} (dynamic)"
    return None


def _format(settings: Mapping[str, Any]) -> str:
    """The layout of the integers; transformers reads the older name first."""
    older, default = (
        ("version", _GEMM) if settings["quant_method"] == "awq" else ("checkpoint_format", _FIRST)
    )
    return str(settings.get(older) or settings.get("format") or default).lower()


def restore(settings: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Tensor:
    """The weight (outputs, inputs).

    Raises:
        ExportError: the parts do not fit together, or the zeros are not what ``sym`` says.
        KeyError: a part is missing.
    """
    integers, zeros, group = _read(settings, parts)
    return ((integers - zeros[group]) * parts["scales"].float()[group]).T.contiguous()


def read_integers(settings: Mapping[str, Any], parts: Mapping[str, Tensor]) -> StoredBlocks | None:
    """The integers, if groups are full and of neighboring inputs.

    Raises:
        ExportError: the parts do not fit together, or the zeros are not what ``sym`` says.
        KeyError: a part is missing.
    """
    integers, zeros, group = _read(settings, parts)
    size = len(integers) // len(zeros)
    if len(integers) % len(zeros) or not torch.equal(group, torch.arange(len(integers)) // size):
        return None
    return StoredBlocks(
        integers.T.to(torch.uint8).contiguous().numpy(),
        parts["scales"].float().T.contiguous().numpy(),
        None,
        _bits(settings),
        size,
        zeros.T.to(torch.uint8).contiguous().numpy(),
    )


def _bits(settings: Mapping[str, Any]) -> int:
    return int(settings.get("bits", settings.get("w_bit", 4)))


def _read(
    settings: Mapping[str, Any], parts: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The integers (inputs, outputs), the zeros (groups, outputs), each input's group."""
    scales, bits = parts["scales"], _bits(settings)
    if settings["quant_method"] == "awq":
        order = torch.tensor(_AWQ_ORDER).argsort()
        integers = _unpack(parts["qweight"], bits)[..., order].flatten(1)
        stored = _unpack(parts["qzeros"], bits)[..., order].flatten(1)
        zeros = stored[:, : scales.shape[1]]
    else:
        integers = _unpack(parts["qweight"], bits).transpose(1, 2).flatten(0, 1)
        zeros = _gptq_zeros(settings, parts, bits)
    if zeros.shape != scales.shape or integers.shape[1] != scales.shape[1]:
        raise ExportError(
            f"scales have the shape {tuple(scales.shape)}, zeros {tuple(zeros.shape)} and integers "
            f"{tuple(integers.shape)}, of which groups and outputs must be the same"
        )
    group = _groups(settings, parts, len(integers))
    if len(group) != len(integers) or int(group.max()) >= len(scales):
        raise ExportError(
            f"{len(integers)} inputs are in {int(group.max()) + 1} groups, but scales has "
            f"{len(scales)}"
        )
    return integers, zeros, group


def _groups(settings: Mapping[str, Any], parts: Mapping[str, Tensor], num_inputs: int) -> Tensor:
    if "g_idx" in parts:
        return parts["g_idx"].long()
    size = settings.get("group_size", settings.get("q_group_size"))
    num_groups = len(parts["scales"])
    if size is None and num_inputs % num_groups == 0:
        size = num_inputs // num_groups
    size = num_inputs if size == -1 else size
    if type(size) is not int or size < 1 or -(-num_inputs // size) != num_groups:
        raise ExportError(
            f"{num_inputs} inputs are not in {num_groups} groups of group_size {size!r}"
        )
    return torch.arange(num_inputs) // size


def _gptq_zeros(settings: Mapping[str, Any], parts: Mapping[str, Tensor], bits: int) -> Tensor:
    """The zeros (groups, outputs); with ``sym`` all are in the middle.

    Kernels for symmetric weights do not read them, so files exist that store them as the other
    version of the format does.
    """
    scales, middle = parts["scales"], 2 ** (bits - 1)
    if settings.get("sym") and "qzeros" not in parts:
        return torch.full(scales.shape, middle)
    packed = parts["qzeros"]
    if packed.shape[1] == scales.shape[1]:
        raise ExportError(
            "qzeros are not packed, which is not supported; quantize or save it again"
        )
    stored = _unpack(packed, bits).flatten(1)[:, : scales.shape[1]]
    zeros = stored if _format(settings) == _SECOND else (stored + 1) & (2**bits - 1)
    if not settings.get("sym") or bool((zeros == middle).all()):
        return zeros
    if bool((stored == middle).all()) or bool((stored == middle - 1).all()):
        return torch.full_like(zeros, middle)
    raise ExportError(
        f"sym in quantization_config says that all zeros are {middle}, and qzeros has others; if "
        "the weights are not symmetric, set sym to false there"
    )


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """The integers in each int32, lowest bits first: (..., 32 / bits)."""
    if packed.dtype != torch.int32:
        raise ExportError(f"its integers are packed in {packed.dtype}, not in int32")
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    integers: Tensor = (packed[..., None] >> shifts) & (2**bits - 1)
    return integers
