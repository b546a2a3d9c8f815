"""Matrices of integers in blocks of their inputs, and weights of 8 bits in such blocks.

8 bits in blocks of 32 with a scale of 16 bits each are what GGUF's Q8_0 has; `MatMulNBits` and the
server's kernels round each block of a row likewise. A single scale for a row of a trained language
model would be that of a few large inputs: SmolLM2-135M's distributions then diverge by 0.044 nats
instead of 0.005, and by 0.008 with blocks of 64.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

NIBBLE_CENTER, BYTE_ZERO = 8, 128
"""What ``MatMulNBits`` takes as zero, of integers of 4 and of 8 bits."""
BYTE_BLOCK = 32
_LARGEST = 127
_SMALLEST_STEP = 2.0**-20
"""A scale of 16 bits has 4 binary digits left there; smaller ones are floats of 32."""
_SPACING = 2.0**-24  # of small numbers of 16 bits


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix in blocks of its inputs: a weight is ``scale * (integer - zero) - minimum``.

    Attributes:
        integers: uint8 (outputs, num_blocks, block_size), from 0 to 15, or to 255 with 8 bits;
            padded with zeros.
        scale: float32 (outputs, num_blocks), numbers of 16 bits unless some are too small.
        zero: uint8 (outputs, num_blocks); 128 with 8 bits, 0 with 4 bits and minima.
        num_inputs: without the padding.
        minimum: float32 (outputs, num_blocks) in blocks of a file that has them; None otherwise.
        bits: 4 or 8.
        center: uint8 (outputs,) beside minima with 8 bits: the middle of the integers of an output,
            less 128; None otherwise.
    """

    integers: NDArray[np.uint8]
    scale: NDArray[np.float32]
    zero: NDArray[np.uint8]
    num_inputs: int
    minimum: NDArray[np.float32] | None = None
    bits: Literal[4, 8] = 4
    center: NDArray[np.uint8] | None = None

    @property
    def block_size(self) -> int:
        size: int = self.integers.shape[2]
        return size

    def weight(self) -> NDArray[np.float32]:
        """The matrix (inputs, outputs) in float32."""
        values = self.integers.astype(np.float32) - self.zero[..., None]
        values *= self.scale[..., None]
        if self.minimum is not None:
            values -= self.minimum[..., None]
        rounded: NDArray[np.float32] = values.reshape(len(values), -1)[:, : self.num_inputs].T
        return rounded


def to_bytes(weight: NDArray[np.float32]) -> Blocks:
    """A matrix float32 (inputs, outputs) as 8-bit integers, each weight the nearest one."""
    num_inputs, num_outputs = weight.shape
    size = num_inputs + -num_inputs % BYTE_BLOCK
    rows = np.zeros((num_outputs, size), np.float32)
    rows[:, :num_inputs] = weight.T
    blocks = rows.reshape(num_outputs, -1, BYTE_BLOCK)
    peak = np.abs(blocks).max(axis=2, keepdims=True)
    exact = peak / np.float32(_LARGEST)
    with np.errstate(over="ignore"):
        halves = exact.astype(np.float16).astype(np.float32)
    # Rounded down, a small scale would leave its block's largest weight out of reach
    unreachable = peak >= np.float32(_LARGEST + 0.5) * halves
    halves += np.where(unreachable, np.float32(_SPACING), np.float32(0))
    scale = np.where(np.isfinite(halves) & (halves >= _SMALLEST_STEP), halves, exact)
    scale[scale == 0] = 1
    blocks /= scale
    np.rint(blocks, out=blocks)
    np.clip(blocks, -_LARGEST, _LARGEST, out=blocks)
    blocks += BYTE_ZERO
    with np.errstate(invalid="ignore"):  # damaged weights; found later
        integers = blocks.astype(np.uint8)
    return Blocks(
        integers,
        scale[..., 0],
        np.full(scale.shape[:2], BYTE_ZERO, np.uint8),
        num_inputs,
        bits=8,
    )
