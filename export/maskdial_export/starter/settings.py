"""The settings of one run, shared by the three recipes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


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
