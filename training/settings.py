"""Shape and Settings: the size of a model, and how a run trains it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """Hidden width (a multiple of 64), number of layers, and vocabulary size."""

    width: int = 256
    layers: int = 6
    vocabulary: int = 8000


@dataclass(frozen=True, slots=True)
class Settings:
    """One run's paths and options. `out` has a folder per model."""

    corpus: Path
    out: Path
    minutes: float
    device: torch.device
    seed: int = 0
    threads: int = 1
    batch_tokens: int = 4096
    """Tokens of a decoder's batch."""
    resume: bool = False
    bf16: bool = False
    """bfloat16 matrix products in training; faster on processors that support them."""
    compile: bool = False
    """Compile the layers before training; needs a C++ compiler."""
    shape: Shape = field(default_factory=Shape)
    start: Path | None = None
    """An exported bundle whose weights the sentiment model or the hybrid starts from."""
    diffusion: bool = False
    """Train the hybrid with shares of hidden tokens from 0 to 1."""
    cloze: Path | None = None
    """Fill-in sentences to score, in the format of `cloze.read_cloze`."""
