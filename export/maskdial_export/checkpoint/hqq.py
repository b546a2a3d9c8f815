"""HQQ: integers with a zero of floating point for each group of neighboring weights.

A module has ``W_q``, its integers packed (below), ``scale`` and ``zero``, and how they were made:
``nbits``, ``group_size``, ``axis``, ``shape`` and ``packing``, encoded as tensors. The weight is
``(integer - zero) * scale``. With an axis of 1 the groups are runs of each output's inputs; with 0
they are columns of the matrix (group_size, -1). Packing is along the first axis of the matrix of
groups: a word's highest bits are of the first part of its rows. (hqq/core/quantize.py, bitpack.py)

In float32, ``integer * scale`` and ``zero * scale`` of 16-bit numbers are exact, so that their
difference is the weight rounded once, and blocks with minima hold it as it is.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from maskdial_export.checkpoint.blocks import StoredBlocks
from maskdial_export.errors import ExportError

_WORDS: Mapping[str, tuple[int, int, torch.dtype]] = {
    "8bit_u8": (8, 1, torch.uint8),
    "4bit_u8": (4, 2, torch.uint8),
    "2bit_u8": (2, 4, torch.uint8),
    "1bit_u8": (1, 8, torch.uint8),
    "3bit_32": (3, 10, torch.int32),
}
"""Of a packing, the bits of an integer, how many a word has, and the word."""


def num_bits(settings: Mapping[str, Any]) -> int:
    """The most bits that integers of a checkpoint have."""
    found = settings.get("quant_config") or {}
    groups = [found, *(each for each in found.values() if isinstance(each, dict))]
    chosen = [each.get("weight_quant_params") or each for each in groups]
    return max((int(each["nbits"]) for each in chosen if each.get("nbits")), default=8)


def restore(parts: Mapping[str, Tensor]) -> Tensor:
    """The float32 weight of one module, (outputs, inputs).

    Raises:
        ExportError: it is stored in a way that is not known.
    """
    integers, scale, zero, shape, _ = _read(parts)
    return (integers * scale - zero * scale).reshape(shape)


def read_integers(parts: Mapping[str, Tensor]) -> StoredBlocks | None:
    """The integers of a module in groups of neighboring inputs; None if they are in others.

    Raises:
        ExportError: it is stored in a way that is not known.
    """
    integers, scale, zero, (rows, columns), bits = _read(parts)
    size = integers.shape[1]
    if scale.shape[1] != 1 or columns % size:
        return None
    groups = (rows, columns // size)
    return StoredBlocks(
        integers.reshape(rows, columns).to(torch.uint8).numpy(),
        scale.reshape(groups).numpy(),
        (zero * scale).reshape(groups).numpy(),
        bits,
        size,
    )


def _read(parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, tuple[int, int], int]:
    """The matrix of groups, scales and zeros that broadcast to it, the weight's shape, the bits."""
    if "scale" not in parts or "zero" not in parts:
        raise ExportError(
            "its scales or zeros are quantized themselves, which is not supported; export the "
            "checkpoint that it was made from"
        )
    try:
        packing = bytes(parts["packing"].tolist()).decode("ascii")
        rows, columns = (int(each) for each in parts["shape"])
        bits, per_word, word = _WORDS[packing]
        axis = int(parts["axis"])
    except (KeyError, ValueError, TypeError) as error:
        raise ExportError(f"HQQ's description of the weight is not known ({error!r})") from error
    scale, zero = parts["scale"].float(), parts["zero"].float()
    packed = parts["W_q"].contiguous().view(word)
    num_groups = scale.numel()
    if num_groups == 0 or rows * columns % num_groups:
        raise ExportError(f"{num_groups} groups do not fit weights of the shape {(rows, columns)}")
    num_rows = num_groups if axis == 1 else rows * columns // num_groups
    shifts = torch.arange(per_word - 1, -1, -1, dtype=torch.int32) * bits
    integers = (packed.int()[None] >> shifts[:, None, None]) & (2**bits - 1)
    integers = integers.flatten(0, 1)[:num_rows].float()
    if integers.numel() != rows * columns or zero.numel() not in (1, num_groups):
        raise ExportError(
            f"weights of the shape {(rows, columns)} are packed as {tuple(packed.shape)} with "
            f"{num_groups} scales and {zero.numel()} zeros"
        )
    sides = (-1, 1) if axis == 1 else (1, -1)
    return integers, scale.reshape(sides), zero.reshape(sides), (rows, columns), bits
