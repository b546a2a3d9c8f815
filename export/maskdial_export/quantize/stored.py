"""Integers that a quantized checkpoint has, kept as they are in a bundle of int4 or int8."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from maskdial_export.checkpoint.blocks import StoredBlocks, StoredMatrix
from maskdial_export.quantize.blocks import BYTE_ZERO, NIBBLE_CENTER, Blocks

Floats = NDArray[np.float32]
Value = TypeVar("Value", bound=np.generic)

_EXPERT = re.compile(r"(.*)\.\w+\.experts\.products\.(\d+)\.([01])")
_EXPERTS = {
    "mlp": (("gate_proj", "up_proj"), ("down_proj",)),
    "block_sparse_moe": (("w1", "w3"), ("w2",)),  # of Mixtral
    "feed_forward": (("w1", "w3"), ("w2",)),  # of LFM2
    "mixer": (("up_proj",), ("down_proj",)),  # of Nemotron-H
}
"""By the part of a layer that has experts: what the matrices of an expert's two products are called
there."""
_SIZES = (16, 32)
"""The blocks of 8-bit integers, of which the kernels have products. Those of 4-bit integers are any
multiple of the second."""


class StoredIntegers:
    """The quantized matrices of a checkpoint.

    Attributes:
        kept: the modules whose integers a graph has.
    """

    def __init__(
        self,
        matrices: Mapping[str, StoredMatrix],
        precision: str,
        head: tuple[str, str] | None = None,
    ) -> None:
        """Chooses what is kept.

        Args:
            matrices: of the checkpoint, by module.
            precision: with ``int8``, all integers are kept as 8 bits. With ``int4``, they are kept
                if some have 4 bits. With another one, none are.
            head: the output layer whose weight is that of another module, and that module.
        """
        found = dict(matrices)
        if head is not None and head[1] in found:
            found.setdefault(head[0], found[head[1]])
        has_nibbles = any(each.bits == 4 for each in found.values())
        keeps = precision == "int8" or (precision == "int4" and has_nibbles)
        self._matrices = found if keeps else {}
        self._bits: Literal[4, 8] = 4 if precision == "int4" else 8
        self.kept: set[str] = set()

    def names(self, modules: Sequence[str]) -> list[str]:
        """Those of some modules whose matrices are such."""
        return [name for name in modules if self._sources(name)]

    def _sources(self, module: str) -> list[str]:
        """The matrices, one below the other, that are a module's weight; none if some are floats.

        An expert's products are named otherwise than its matrices: gate and up are one.
        """
        found = _EXPERT.fullmatch(module)
        if found is None:
            return [module] if module in self._matrices else []
        layer, expert, part = found.groups()
        for block, names in _EXPERTS.items():
            sources = [f"{layer}.{block}.experts.{expert}.{name}" for name in names[int(part)]]
            if all(name in self._matrices for name in sources):
                return sources
        return []

    def find(self, modules: Sequence[str], weight: Floats) -> Blocks | None:
        """The integers of modules whose product is one, if they are exactly this weight.

        Args:
            modules: their names; the outputs of each follow those of the one before.
            weight: float32 (inputs, outputs).
        """
        sources = [self._sources(name) for name in modules]
        parts = [self._matrices[name].read() for names in sources for name in names]
        found = [part for part in parts if part is not None]
        if not all(sources) or len(found) < len(parts):
            return None
        blocks = joined(found, self._bits)
        if blocks is None:
            return None
        if not np.array_equal(blocks.weight(), weight):
            return None
        self.kept.update(modules)
        return blocks


def joined(parts: Sequence[StoredBlocks], bits: Literal[4, 8]) -> Blocks | None:
    """Matrices of the same inputs as one, whose outputs follow each other.

    With ``bits`` 4 it has integers of 4 bits if all of theirs fit. None if their blocks have no
    common size of which there are products.
    """
    size = min(part.block_size for part in parts)
    minima = any(part.minimum is not None for part in parts)
    nibbles = bits == 4 and all(part.bits <= 4 for part in parts) and size % 32 == 0
    if not nibbles:
        size = next((each for each in reversed(_SIZES) if size % each == 0), 0)
    if size == 0 or any(part.block_size % size for part in parts):
        return None
    pieces = [as_blocks(part, 4 if nibbles else 8, size, minima=minima) for part in parts]
    if len(pieces) == 1:
        return pieces[0]
    return Blocks(
        np.concatenate([piece.integers for piece in pieces]),
        np.concatenate([piece.scale for piece in pieces]),
        np.concatenate([piece.zero for piece in pieces]),
        parts[0].values.shape[1],
        _joined([piece.minimum for piece in pieces]),
        pieces[0].bits,
        _joined([piece.center for piece in pieces]),
    )


def _joined(parts: Sequence[NDArray[Value] | None]) -> NDArray[Value] | None:
    """Rows of several matrices; None where they have none."""
    found = [part for part in parts if part is not None]
    return np.concatenate(found) if found else None


def as_blocks(stored: StoredBlocks, bits: Literal[4, 8], size: int, *, minima: bool) -> Blocks:
    """A matrix with integers of some bits, in blocks of some size, with minima or without.

    Nibbles with minima have zeros of 0. Bytes have zeros of 128.
    """
    scale, minimum = stored.scale, stored.minimum
    values: NDArray[Any] = stored.values
    zero, times, center = stored.zero, stored.block_size // size, 0
    if bits == 8 and zero is not None:
        values = values.astype(np.int16) - np.repeat(zero, stored.block_size, axis=1)
    has_room = values.dtype == np.uint8 or values.min(initial=0) > -BYTE_ZERO
    # What follows is right modulo 256, and that is what bytes hold
    integers = values.astype(np.uint8, copy=False)
    zero = np.zeros(scale.shape, np.uint8) if zero is None else zero
    if bits == 8:
        if minimum is not None and stored.values.dtype == np.uint8:
            center = 2 ** (stored.bits - 1)
        if not minima and has_room and (scale < 0).any():
            # The kernel finds scales that are multiples of a step if they have no sign.
            signs = np.where(scale < 0, 255, 1).astype(np.uint8)
            integers, scale = integers * np.repeat(signs, stored.block_size, axis=1), np.abs(scale)
        integers, zero = integers + np.uint8(BYTE_ZERO), np.full(scale.shape, BYTE_ZERO, np.uint8)
    elif stored.values.dtype == np.int8:
        integers, zero = integers + np.uint8(NIBBLE_CENTER), zero + np.uint8(NIBBLE_CENTER)
    if minima and minimum is None:
        minimum = np.zeros_like(scale)
    if minima and bits == 4 and minimum is not None:
        minimum = minimum + scale * zero  # of Q4_0, beside Q4_1
        zero = np.zeros_like(zero)
    if times > 1:
        scale, zero = np.repeat(scale, times, axis=1), np.repeat(zero, times, axis=1)
        minimum = None if minimum is None else np.repeat(minimum, times, axis=1)
    return Blocks(
        integers.reshape(*scale.shape, size),
        scale,
        zero,
        integers.shape[1],
        minimum,
        bits,
        np.full(len(scale), center, np.uint8) if minima and bits == 8 else None,
    )
