"""Weights of 4 bits in blocks: each has a scale and, with int4, a zero of its own.

A weight is ``scale * (integer - zero)``. Scales and zeros are searched for the least squared
error, weighted by how large the inputs are where they matter (as llama.cpp's importance matrix
does, where all tokens count alike). With the
inputs' second moments the integers are chosen by GPTQ (Frantar et al. 2022, arXiv:2210.17323): the
error of each input's weights is made up for by those of the inputs that follow. Inputs of large
moments come first, but the blocks stay as they are, so that no index of groups is needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from maskdial_export.quantize.blocks import NIBBLE_CENTER, Blocks

# MatMulNBits' accuracy levels. CUDA ignores them; on the CPU the second one rounds activations to
# int8.
_EXACT, _INT8_ACTIVATIONS = 0, 4
_LARGEST = 15
_SHRINKS = tuple(np.linspace(0.7, 1.05, 12))
"""Of the range between a block's extremes, how much its integers span."""
_DAMPING = 0.1
"""Added to the moments' diagonal, as a share of its mean. For the starter model, shares of 0.01 to
0.3 give the same loss within the noise of the text."""
_COLUMNS = 128
"""Inputs whose errors are made up for at once."""
_SEARCHED = 2**17
"""Weights whose scales are searched at once: the intermediate results stay in the processor's
cache, which makes the search 2 to 3 times as fast."""
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class Int4:
    """How 4-bit weights are stored.

    Attributes:
        block_size: inputs that share a scale.
        dtype: of scales and activations.
        accuracy_level: of ``MatMulNBits``.
        zeros: whether blocks have a zero of their own; otherwise it is 8.
    """

    block_size: int
    dtype: type[np.float32 | np.float16]
    accuracy_level: int
    zeros: bool


INT4: Mapping[Literal["int4", "int4-fp16"], Int4] = {
    "int4": Int4(32, np.float32, _INT8_ACTIVATIONS, zeros=True),
    "int4-fp16": Int4(64, np.float16, _EXACT, zeros=False),
}


def to_blocks(weight: NDArray[np.float32], kind: Int4, moments: Tensor | None = None) -> Blocks:
    """Rounds a matrix.

    Args:
        weight: float32 (inputs, outputs).
        kind: how it is stored.
        moments: the mean of the inputs' products with each other, float32 (inputs, inputs), by
            which the integers are chosen; None rounds each weight to the nearest one.
    """
    num_inputs, num_outputs = weight.shape
    rows = torch.from_numpy(np.ascontiguousarray(weight.T))
    blocks = _blocks(rows, kind.block_size)
    if not kind.zeros:
        scale, zero = _symmetric(blocks)
        scale = scale.half().float() if kind.dtype is np.float16 else scale
        scale = torch.where(scale == 0, 1, scale)
    else:
        importance = torch.ones(num_inputs) if moments is None else _damped(moments).diagonal()
        shared = _blocks(importance[None], kind.block_size)
        parts = torch.split(blocks, max(1, _SEARCHED // num_inputs))
        found = [_search(part, shared) for part in parts]
        scale, zero = (torch.cat(each) for each in zip(*found, strict=True))
    if moments is None or not kind.zeros:
        integers = (blocks / scale + zero).round().clamp(0, _LARGEST)
    else:
        steps, zeros = (
            each.expand_as(blocks).flatten(1)[:, :num_inputs].T.contiguous()
            for each in (scale, zero)
        )
        chosen = _make_up(rows.T.contiguous(), steps, zeros, _damped(moments))
        integers = _blocks(chosen.T, kind.block_size)
    shape = num_outputs, -1
    return Blocks(
        integers.to(torch.uint8).numpy(),
        scale.reshape(shape).numpy(),
        zero.to(torch.uint8).expand_as(scale).reshape(shape).numpy(),
        num_inputs,
    )


def _blocks(rows: Tensor, size: int) -> Tensor:
    """(num_rows, inputs) as (num_rows, num_blocks, size), padded with zeros."""
    padded = nn.functional.pad(rows, (0, -rows.shape[1] % size))
    return padded.reshape(len(rows), -1, size)


def as_halves(scale: Tensor) -> Tensor:
    """Scales as numbers of 16 bits, where those are as exact as any."""
    halves = scale.half().float()
    normal = torch.isfinite(halves) & (halves >= torch.finfo(torch.float16).smallest_normal)
    return torch.where(normal, halves, scale)


def _symmetric(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales by which the value of largest magnitude becomes -8, the longer end of the range."""
    largest = blocks.gather(2, blocks.abs().argmax(dim=2, keepdim=True))
    return largest / -NIBBLE_CENTER, torch.tensor(float(NIBBLE_CENTER))


def _search(blocks: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and zeros (rows, num_blocks, 1) of the least weighted squared error.

    Tries ranges of several widths, and zeros beside the nearest one; each scale is then the best
    for the integers that it gives.
    """
    low = blocks.amin(dim=2, keepdim=True).clamp_max(0)
    high = blocks.amax(dim=2, keepdim=True).clamp_min(0)
    weighted = importance * blocks
    most = torch.full_like(low, -1)
    best_scale, best_zero = torch.ones_like(low), torch.full_like(low, NIBBLE_CENTER)
    for shrink in _SHRINKS:
        first = torch.where(high > low, (high - low) * (shrink / _LARGEST), 1)
        nearest = (-low * shrink / first).round()
        exact = blocks / first
        for shift in (-1, 0, 1):
            zero = (nearest + shift).clamp(0, _LARGEST)
            steps = (exact + zero).round_().clamp_(0, _LARGEST).sub_(zero)
            products = (weighted * steps).sum(dim=2, keepdim=True)
            squares = steps.square_().mul_(importance).sum(dim=2, keepdim=True).clamp_min_(_TINY)
            # By how much the scale that is best for these integers lowers the error
            gain = torch.where(products > 0, products * products / squares, 0)
            better = gain > most
            most = torch.where(better, gain, most)
            scale = torch.where(products > 0, products / squares, first)
            best_scale = torch.where(better, scale, best_scale)
            best_zero = torch.where(better, zero, best_zero)
    return as_halves(best_scale), best_zero


def _damped(moments: Tensor) -> Tensor:
    """Moments with a larger diagonal, as that of inputs that the text never had must not be 0."""
    mean = float(moments.diagonal().mean())
    share = _DAMPING * mean if mean > 0 else 1.0
    return moments + share * torch.eye(len(moments))


def _make_up(weight: Tensor, scale: Tensor, zero: Tensor, moments: Tensor) -> Tensor:
    """Integers by GPTQ; all but the moments are (inputs, outputs), so that a column is one run of
    memory."""
    order = moments.diagonal().argsort(descending=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments[order][:, order]))
    factor = torch.linalg.cholesky(inverse, upper=True)
    left, scale, zero = weight[order], scale[order], zero[order]
    integers = torch.empty_like(left)
    for start in range(0, len(order), _COLUMNS):
        stop = min(start + _COLUMNS, len(order))
        errors = torch.empty_like(left[start:stop])
        for row in range(start, stop):
            exact, step, offset = left[row], scale[row], zero[row]
            integers[row] = (exact / step + offset).round_().clamp_(0, _LARGEST)
            error = (exact - (integers[row] - offset) * step) / factor[row, row]
            errors[row - start] = error
            left[row:stop].addr_(factor[row, row:stop], error, alpha=-1)
        left[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    chosen = torch.empty_like(integers)
    chosen[order] = integers
    return chosen
