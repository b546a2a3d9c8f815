"""Weights of checkpoints that compressed-tensors has quantized (llm-compressor, vLLM).

What is stored for a module says what it is:

* ``weight_packed`` int32 (outputs, inputs * bits / 32), lowest bits first, each integer plus half
  of the range, ``weight_shape`` and, unless symmetric, ``weight_zero_point`` packed along the
  outputs: pack-quantized, 4 or 8 bits.
* ``weight_packed`` uint8 (outputs, inputs / 2), codes of e2m1, the first in the low half, with
  scales of e4m3 over a ``weight_global_scale`` (NVFP4), or with powers of two as bytes (MXFP4).
* ``weight`` int8 or float8 (outputs, inputs): int-quantized, float-quantized, naive-quantized, and
  with powers of two MXFP8.

``weight_scale`` has one scale, or one per output, per group of inputs or per block of the matrix.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from maskdial_export.checkpoint.blocks import StoredBlocks
from maskdial_export.errors import ExportError

Settings = Mapping[str, Any]
Parts = Mapping[str, Tensor]

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_BITS = (4, 8)
_FORMATS = frozenset(
    {
        "dense",
        "float-quantized",
        "int-quantized",
        "mixed-precision",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "naive-quantized",
        "nvfp4-pack-quantized",
        "pack-quantized",
    }
)
# Scales of the KV cache, which is another precision here
CACHE_SCALES = (".self_attn.k_scale", ".self_attn.v_scale", ".self_attn.q_scale")


def check_settings(name: str, settings: Settings) -> None:
    """Refuses what is more than scaled integers.

    Raises:
        ExportError: the weights are sparse, or transformed while the model runs.
    """
    sparse = (settings.get("sparsity_config") or {}).get("format", "dense")
    for kind in (settings.get("format", "dense"), sparse):
        if kind not in _FORMATS:
            raise ExportError(
                f"{name} is quantized with compressed-tensors of {kind}, which is not supported; "
                "export the checkpoint that it was made from"
            )
    transforms = (settings.get("transform_config") or {}).get("config_groups")
    if transforms:
        raise ExportError(
            f"{name} is quantized after transforms ({', '.join(transforms)} in transform_config) "
            "that the model would have to repeat, which is not supported; export the checkpoint "
            "that it was made from"
        )


def restore(settings: Settings, parts: Parts) -> Tensor:
    """The float32 weight of one module.

    Raises:
        ExportError: it is stored in a way that is not known.
    """
    scale = parts["weight_scale"]
    packed = parts.get("weight_packed")
    if packed is None:
        values = parts["weight"].float()
        zero = parts.get("weight_zero_point")
        zero = None if zero is None else zero.float()
        return _scaled(values, _read_scale(scale, parts), zero, settings)
    if packed.dtype == torch.uint8:
        return _scaled(_unpack_e2m1(packed), _read_scale(scale, parts), None, settings)
    values, zero, _ = _unpack_integers(packed, parts)
    group = parts.get("weight_g_idx")
    order = None if group is None or bool((group < 0).any()) else group.long()
    return _scaled(
        values.float(), scale.float(), None if zero is None else zero.float(), settings, order
    )


def read_integers(parts: Parts) -> StoredBlocks | None:
    """The integers of a module in groups of neighboring inputs; None if it has no such form.

    Codes of e2m1 are twice their values, at half of the scale.
    """
    packed, scale = parts.get("weight_packed"), parts["weight_scale"]
    group = parts.get("weight_g_idx")
    if packed is None or (group is not None and not bool((group < 0).any())):
        return None
    zero = None
    if packed.dtype == torch.uint8:
        values, bits = 2 * _unpack_e2m1(packed), 5
        scale = _read_scale(scale, parts) / 2
    else:
        values, zero, bits = _unpack_integers(packed, parts)
        middle = 0 if zero is None else 2 ** (bits - 1)
        values, zero = values + middle, None if zero is None else zero + middle
    rows, columns = values.shape
    if scale.ndim != 2 or len(scale) != rows or columns % scale.shape[1]:
        return None
    return StoredBlocks(
        values.to(torch.int8 if zero is None else torch.uint8).numpy(),
        scale.float().contiguous().numpy(),
        None,
        bits,
        columns // scale.shape[1],
        None if zero is None else zero.to(torch.uint8).contiguous().numpy(),
    )


def _unpack_integers(packed: Tensor, parts: Parts) -> tuple[Tensor, Tensor | None, int]:
    """Signed integers (outputs, inputs), their zero points, and how many bits they have."""
    shape = [int(each) for each in parts["weight_shape"]]
    rows, columns = shape
    bits = next((each for each in _BITS if math.ceil(columns * each / 32) == packed.shape[1]), None)
    if packed.dtype != torch.int32 or bits is None or packed.shape[0] != rows:
        raise ExportError(
            f"weights of the shape {shape} are packed as {packed.dtype} of the shape "
            f"{tuple(packed.shape)}; 4 and 8 bits are supported"
        )
    zero = parts.get("weight_zero_point")
    if zero is not None and zero.dtype == torch.int32:
        zero = _unpack(zero.T.contiguous(), bits)[:, :rows].T
    return _unpack(packed, bits)[:, :columns], zero, bits


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Signed integers along the rows of int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    integers = (packed[..., None] >> shifts) & (2**bits - 1)
    signed: Tensor = integers.flatten(-2) - 2 ** (bits - 1)
    return signed


def _unpack_e2m1(packed: Tensor) -> Tensor:
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
    return torch.where(codes < 8, 1.0, -1.0) * _E2M1[codes & 7]


def _read_scale(scale: Tensor, parts: Parts) -> Tensor:
    """Bytes are exponents (MX formats); NVFP4's are over one scale of the whole matrix."""
    if scale.dtype == torch.uint8:
        return torch.exp2(scale.float() - 127)
    whole = parts.get("weight_global_scale")
    return scale.float() if whole is None else scale.float() / whole.float()


def _scaled(
    values: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    settings: Settings,
    order: Tensor | None = None,
) -> Tensor:
    """Values (outputs, inputs) less their zero points, times their scales."""
    scales = _spread(scale, values, settings, order)
    if zero is not None:
        values = values - _spread(zero, values, settings, order)
    return values * scales


def _spread(each: Tensor, values: Tensor, settings: Settings, order: Tensor | None) -> Tensor:
    """One number for every value, or in a shape that broadcasts to that."""
    rows, columns = values.shape
    if each.numel() == 1:
        return each.reshape(1, 1)
    if each.ndim == 1:
        each = each[:, None]
    if each.shape[0] == rows:
        if order is not None:
            return each[:, order]
        if columns % each.shape[1] == 0:
            return each.repeat_interleave(columns // each.shape[1], 1)
    blocks = _block_structure(settings)
    if blocks is not None:
        spread = each.repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)
        if spread.shape[0] >= rows and spread.shape[1] >= columns:
            return spread[:rows, :columns]
    raise ExportError(
        f"scales of the shape {tuple(each.shape)} do not fit weights of the shape "
        f"{tuple(values.shape)}"
    )


def _block_structure(settings: Settings) -> tuple[int, int] | None:
    for group in (settings.get("config_groups") or {}).values():
        given = (group.get("weights") or {}).get("block_structure")
        if isinstance(given, list) and len(given) == 2:
            return int(given[0]), int(given[1])
    return None
