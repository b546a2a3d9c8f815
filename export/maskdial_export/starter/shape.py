"""The size of a model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Hidden width (a multiple of 64), number of layers, tokens in the vocabulary."""

    width: int = 256
    layers: int = 6
    vocabulary: int = 8000
