"""Integers that a GGUF file has, kept as they are in a bundle of int4 or int8."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from maskdial_export.checkpoint.gguf.blocks import READABLE
from maskdial_export.checkpoint.gguf.blocks import Blocks as FileBlocks
from maskdial_export.checkpoint.gguf.convert import read_contents
from maskdial_export.checkpoint.gguf.weights import Weight
from maskdial_export.quantize.int4 import INT4, Blocks

Floats = NDArray[np.float32]

_SIZE = INT4["int4"].block_size
_MIDDLE, _MIDDLE8 = 8, 128
_NIBBLES = frozenset({"Q4_0", "Q4_1", "Q4_K"})


class StoredIntegers:
    """The quantized matrices of a file.

    Attributes:
        kept: the modules whose integers a graph has.
    """

    def __init__(
        self,
        parts: Sequence[Path] = (),
        *,
        precision: str = "int8",
        head: tuple[str, str] | None = None,
    ) -> None:
        """Reads where the weights are.

        Args:
            parts: the GGUF files of the model; none have no integers to keep.
            precision: with ``int8``, all integers are kept as 8 bits. With ``int4``, they are kept
                if some have 4 bits. With another one, none are.
            head: the output layer whose weight is that of another module, and that module.
        """
        weights = read_contents(parts).weights if parts else ()
        found = {each.name.removesuffix(".weight"): each for each in weights}
        if head is not None and head[1] in found:
            found.setdefault(head[0], found[head[1]])
        kinds = set().union(*(weight.kinds for weight in found.values()))
        keeps = precision == "int8" or (precision == "int4" and not kinds.isdisjoint(_NIBBLES))
        self._weights: Mapping[str, Weight] = found if keeps else {}
        self._bits: Literal[4, 8] = 4 if precision == "int4" else 8
        self.kept: set[str] = set()

    def names(self, modules: Sequence[str]) -> list[str]:
        """Those of some modules whose matrices are such."""
        stored = self._weights
        return [name for name in modules if name in stored and stored[name].kinds <= READABLE]

    def find(self, modules: Sequence[str], weight: Floats) -> Blocks | None:
        """The integers of modules whose product is one, if they are exactly this weight.

        Args:
            modules: their names; the outputs of each follow those of the one before.
            weight: float32 (inputs, outputs).
        """
        parts = [self._weights[name].blocks() for name in self.names(modules)]
        found = [part for part in parts if part is not None]
        if len(found) < len(modules):
            return None
        size = min(part.block_size for part in found)
        nibbles = self._bits == 4 and size == _SIZE and all(part.bits <= 4 for part in found)
        minima = any(part.minimum is not None for part in found)
        pieces = [as_blocks(part, 4 if nibbles else 8, size, minima=minima) for part in found]
        blocks = Blocks(
            np.concatenate([piece.integers for piece in pieces]),
            np.concatenate([piece.scale for piece in pieces]),
            np.concatenate([piece.zero for piece in pieces]),
            len(weight),
            np.concatenate([piece.minimum for piece in pieces if piece.minimum is not None])
            if minima
            else None,
            pieces[0].bits,
        )
        if not np.array_equal(blocks.weight(), weight):
            return None
        self.kept.update(modules)
        return blocks


def as_blocks(stored: FileBlocks, bits: Literal[4, 8], size: int, *, minima: bool) -> Blocks:
    """A file's matrix with integers of some bits, in blocks of some size, with minima or without.

    Nibbles with minima have zeros of 0. The zero of others is in the middle.
    """
    values, scale, minimum = stored.values.astype(np.int16), stored.scale, stored.minimum
    times = stored.block_size // size
    if minimum is None and minima:
        minimum = np.zeros_like(scale)
    if bits == 8:
        zero = _MIDDLE8
        if minimum is None:
            # The kernel finds scales that are multiples of a step if they have no sign.
            signs = np.where(scale < 0, -1, 1).astype(np.int16)
            if values.min(initial=0) >= -127:
                values = values * np.repeat(signs, stored.block_size, axis=1)
                scale = np.abs(scale)
    else:
        zero = 0 if minima else _MIDDLE
        if minima and stored.minimum is None:  # of Q4_0, beside Q4_1
            values = values + _MIDDLE
            minimum = scale * np.float32(_MIDDLE)
    integers = (values + zero).astype(np.uint8)
    scale = np.repeat(scale, times, axis=1)
    return Blocks(
        integers.reshape(*scale.shape, size),
        scale,
        np.full(scale.shape, zero, np.uint8),
        values.shape[1],
        None if minimum is None else np.repeat(minimum, times, axis=1),
        bits,
    )
