"""Settings of a training run, and Shape: the size of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """Hidden width (a multiple of 64), number of layers, tokens in the vocabulary."""

    width: int = 256
    layers: int = 6
    vocabulary: int = 8000


@dataclass(frozen=True, slots=True)
class Settings:
    """Where to read and write, and how long. `out` holds a folder for each model."""

    corpus: Path
    out: Path
    minutes: float
    device: torch.device
    seed: int = 0
    threads: int = 1
    resume: bool = False
    bf16: bool = False
    """bfloat16 matrix products in pretraining; faster where the processor has them."""
    compile: bool = False
    """Compile the layers in pretraining; needs a C++ compiler."""
    shape: Shape = field(default_factory=Shape)
    cloze: Path | None = None
    """Sentences to fill in, as `cloze.read_cloze` reads them."""
