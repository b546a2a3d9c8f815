"""Matrices of integers, as quantized checkpoints store them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.uint8] | NDArray[np.int8]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A matrix of integers: a weight is ``scale * (value - zero) - minimum``, in float32.

    Attributes:
        values: uint8 or int8 (outputs, inputs).
        scale: float32 (outputs, inputs / block_size).
        minimum: float32, of the same shape; what is subtracted. None is zero.
        bits: how many bits hold any of the values, with a sign if they are int8.
        block_size: how many neighboring inputs share a scale, a zero and a minimum.
        zero: uint8, of the shape of the scales. None is zero.
    """

    values: Integers
    scale: Floats
    minimum: Floats | None
    bits: int
    block_size: int
    zero: NDArray[np.uint8] | None = None

    def dequantize(self) -> Floats:
        """The weights (outputs, inputs)."""
        parts = self.values.reshape(*self.scale.shape, self.block_size).astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):  # damaged scales; found later
            if self.zero is not None:
                parts -= self.zero[..., None]
            parts *= self.scale[..., None]
            if self.minimum is not None:
                parts -= self.minimum[..., None]
        return parts.reshape(self.values.shape)

    def take(self, rows: NDArray[np.int64]) -> "StoredBlocks":
        """The same matrix with other rows, or in another order."""
        minimum = None if self.minimum is None else self.minimum[rows]
        zero = None if self.zero is None else self.zero[rows]
        values, scale = self.values[rows], self.scale[rows]
        return replace(self, values=values, scale=scale, minimum=minimum, zero=zero)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """The integers of a module's weight.

    Attributes:
        bits: the most that one of its formats has.
        read: returns them, if they have one form for the whole matrix; otherwise None.
    """

    bits: int
    read: Callable[[], StoredBlocks | None]
