"""torchao: integers or float8 with a scale, and perhaps a zero, for each block of a weight.

A module has ``_weight_qdata`` (outputs, inputs), ``_weight_scale`` and, of integers,
``_weight_zero_point``, one number for each block of the matrix. What kind of tensor they are of is
said in the metadata of the file. Those for a GPU's products alone, such as Int4Tensor, have
layouts of their own. (torchao/prototype/safetensors, torchao/quantization/quantize_/workflows)
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from maskdial_export.checkpoint.blocks import StoredBlocks
from maskdial_export.errors import ExportError

_KINDS = ("IntxUnpackedToInt8Tensor", "Int8Tensor", "Float8Tensor")
_PLAIN = "Tensor"


def check_files(name: str, files: Sequence[Path]) -> None:
    """Refuses a checkpoint whose tensors are of other kinds.

    Raises:
        ExportError: it has such tensors, or none that are described.
    """
    kinds = set()
    for file in files:
        if file.suffix != ".safetensors":
            continue
        with safetensors.safe_open(file, "pt") as opened:
            described = opened.metadata() or {}
        kinds |= {_kind(text) for key, text in described.items() if "." in key}
    others = sorted(kinds - {*_KINDS, _PLAIN})
    if others or not kinds:
        found = ", ".join(others) or "tensors without a description (of an older version)"
        raise ExportError(
            f"{name} is quantized with torchao's {found}, which is not supported "
            f"({', '.join(_KINDS)} are); export the checkpoint that it was made from, with "
            "--precision int8 or int4"
        )


def _kind(text: str) -> str:
    try:
        return str(json.loads(text)["_type"])
    except (ValueError, TypeError, KeyError):
        return "unreadable description"


def restore(parts: Mapping[str, Tensor]) -> Tensor:
    """The float32 weight of one module, (outputs, inputs).

    Raises:
        ExportError: its parts do not fit each other.
    """
    values, scale, zero = _read(parts)
    rows, columns = (size // count for size, count in zip(values.shape, scale.shape, strict=True))

    def spread(each: Tensor) -> Tensor:
        return each.repeat_interleave(rows, 0).repeat_interleave(columns, 1)

    return (values.float() - spread(zero)) * spread(scale)


def read_integers(parts: Mapping[str, Tensor]) -> StoredBlocks | None:
    """The integers of a module in groups of neighboring inputs; None if it has no such form.

    Raises:
        ExportError: its parts do not fit each other.
    """
    values, scale, zero = _read(parts)
    if values.dtype != torch.int8 or len(scale) != len(values):
        return None
    bits = next(each for each in (4, 8) if each == 8 or (_fits(values, each) and _fits(zero, each)))
    has_zero = bool(zero.any())
    middle = 2 ** (bits - 1) if has_zero else 0
    if not torch.equal(zero, zero.round()):
        return None
    return StoredBlocks(
        (values.int() + middle).to(torch.uint8 if has_zero else torch.int8).numpy(),
        scale.contiguous().numpy(),
        None,
        bits,
        values.shape[1] // scale.shape[1],
        (zero + middle).to(torch.uint8).contiguous().numpy() if has_zero else None,
    )


def _fits(values: Tensor, bits: int) -> bool:
    return bool((values >= -(2 ** (bits - 1))).all() and (values < 2 ** (bits - 1)).all())


def _read(parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The values (outputs, inputs), and float32 scales and zeros of blocks of them."""
    values, scale = parts["_weight_qdata"], parts.get("_weight_scale")
    if "_weight_act_pre_scale" in parts:
        raise ExportError("its activations are scaled first, which is not supported")
    if scale is None or values.ndim != 2:
        raise ExportError(f"values of the shape {tuple(values.shape)} have no scales that fit")
    scale = scale.float()
    scale = scale.reshape(1, 1) if scale.numel() == 1 else scale
    scale = scale[:, None] if scale.ndim == 1 else scale
    zero = parts.get("_weight_zero_point")
    zero = torch.zeros_like(scale) if zero is None else zero.float()
    zero = zero.reshape(scale.shape) if zero.numel() == scale.numel() else zero
    if (
        scale.ndim != 2
        or zero.shape != scale.shape
        or any(
            count == 0 or size % count
            for size, count in zip(values.shape, scale.shape, strict=True)
        )
    ):
        raise ExportError(
            f"scales of the shape {tuple(scale.shape)} and zeros of the shape {tuple(zero.shape)} "
            f"do not fit weights of the shape {tuple(values.shape)}"
        )
    return values, scale, zero
