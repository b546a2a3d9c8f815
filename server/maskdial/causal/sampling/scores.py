"""ScoreReader: what decision models have in place of a sampler."""

import math
from collections.abc import Iterable

import numpy as np

from maskdial.causal.sampling.sampler import Sample
from maskdial.causal.sequence import Sequence
from maskdial.errors import MaskdialError
from maskdial.runtime.logits import Logits


class ScoreReader:
    """Reads the scores that a head gives the options of questions after a prompt.

    A sequence has one token, which means nothing. Its ``top`` has the scores of the columns that
    ``scored_tokens`` names, as the head gives them: no distribution is taken over all columns.
    """

    def sample(self, logits: Logits, sequences: Iterable[Sequence]) -> list[Sample | MaskdialError]:
        """See `TokenSampler`; scores in a device's memory are copied to the host.

        Args:
            logits: float32 (num_sequences, num_scores).
            sequences: in the order of the rows.
        """
        return [
            _read(row, sequence.params.scored_tokens)
            for row, sequence in zip(np.asarray(logits).tolist(), sequences, strict=True)
        ]


def _read(row: list[float], columns: tuple[int, ...]) -> Sample:
    scores = tuple((column, row[column]) for column in columns)
    is_finite = all(math.isfinite(score) for _, score in scores)
    return Sample(0, 0.0 if is_finite else math.nan, scores)
