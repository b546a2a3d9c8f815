"""BeamSearch: several texts for one source, of which the most likely are kept step by step.

It is transformers' search (`GenerationMixin._beam_search`, 5.23), with its scores in float32 and
its rules for when to stop.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How a beam search goes; `maskdial.requests.text_to_text.Writing` describes the settings."""

    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
