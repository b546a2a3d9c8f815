"""Weights by the names that Llama has for them: what a reference reads of another family."""

import re
from collections.abc import Mapping

from maskdial_export.checkpoint.blocks import StoredBlocks
from maskdial_export.direct.decoder import Floats
from maskdial_export.direct.weights import Weights

Renaming = tuple[tuple[str, str], ...]
"""Expressions, and what each becomes, one after the other."""


class RenamedWeights:
    """A checkpoint's weights by other names."""

    def __init__(self, weights: Weights, renaming: Renaming) -> None:
        self.name = weights.name
        self._weights = weights
        self._theirs = {_renamed(name, renaming): name for name in weights.shapes()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self._weights.shapes()
        return {ours: shapes[theirs] for ours, theirs in self._theirs.items()}

    def values(self, name: str, rows: slice | None = None) -> Floats:
        return self._weights.values(self._theirs[name], rows)

    def bits(self, name: str) -> int | None:
        return self._weights.bits(self._theirs[name])

    def blocks(self, name: str, rows: slice | None = None) -> StoredBlocks | None:
        return self._weights.blocks(self._theirs[name], rows)


def _renamed(name: str, renaming: Renaming) -> str:
    for theirs, ours in renaming:
        name = re.sub(theirs, ours, name)
    return name
