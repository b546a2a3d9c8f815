"""Integers that a GGUF file has, kept as they are in a bundle of int4."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maskdial_export.checkpoint.gguf.convert import read_contents
from maskdial_export.checkpoint.gguf.weights import Weight
from maskdial_export.quantize.int4 import INT4, Blocks

_BITS = 4
_SIZE = INT4["int4"].block_size
_MIDDLE = 8


class StoredIntegers:
    """The matrices of a file whose blocks are those of int4: Q4_0, Q4_1 and Q4_K.

    Attributes:
        kept: the modules whose integers a graph has.
    """

    def __init__(self, parts: Sequence[Path] = ()) -> None:
        """``parts``: the GGUF files of the model; none have no integers to keep."""
        weights = read_contents(parts).weights if parts else ()
        self._weights: Mapping[str, Weight] = {each.name: each for each in weights}
        self.kept: set[str] = set()

    def names(self, modules: Sequence[str]) -> list[str]:
        """Those of some modules whose matrices are such."""
        return [name for name in modules if self._fits(name)]

    def find(self, modules: Sequence[str], weight: NDArray[np.float32]) -> Blocks | None:
        """The integers of modules whose product is one, if they are exactly this weight.

        Args:
            modules: their names; the outputs of each follow those of the one before.
            weight: float32 (inputs, outputs).
        """
        parts = [self._read(name) for name in modules]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts) or len({part.minimum is None for part in found}) > 1:
            return None
        minima = [part.minimum for part in found if part.minimum is not None]
        blocks = Blocks(
            np.concatenate([part.integers for part in found]),
            np.concatenate([part.scale for part in found]),
            np.concatenate([part.zero for part in found]),
            len(weight),
            np.concatenate(minima) if minima else None,
        )
        if not np.array_equal(blocks.weight(), weight):
            return None
        self.kept.update(modules)
        return blocks

    def _fits(self, module: str) -> bool:
        stored = self._weights.get(f"{module}.weight")
        return stored is not None and stored.kinds <= {"Q4_0", "Q4_1", "Q4_K"}

    def _read(self, module: str) -> Blocks | None:
        if not self._fits(module):
            return None
        stored = self._weights[f"{module}.weight"].blocks()
        if stored is None or stored.bits != _BITS or stored.block_size != _SIZE:
            return None
        middle = _MIDDLE if stored.minimum is None else 0
        values = (stored.values.astype(np.int16) + middle).astype(np.uint8)
        return Blocks(
            values.reshape(*stored.scale.shape, _SIZE),
            stored.scale,
            np.full(stored.scale.shape, middle, np.uint8),
            values.shape[1],
            stored.minimum,
        )
