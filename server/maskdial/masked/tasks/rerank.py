"""Reranking: texts in the order of how well a cross-encoder finds that they answer a query."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskdial.errors import InferenceError


@dataclass(frozen=True, slots=True)
class Rank:
    """A text by its index among those sent, and its score."""

    index: int
    score: float


def rerank(logits: Sequence[NDArray[np.float32]], *, raw_scores: bool = False) -> list[Rank]:
    """The texts with their scores, best first; equal ones in the order sent.

    The order is that of the logits, also where their sigmoids are equal.

    Args:
        logits: (1,) float32 for each text.
        raw_scores: the score is the logit, not its sigmoid.

    Raises:
        InferenceError: the logits are not numbers.
    """
    values = np.concatenate(logits).astype(np.float64)
    if not np.isfinite(values).all():
        raise InferenceError("the model's logits are not finite numbers for one of the texts")
    scores = values if raw_scores else np.exp(-np.logaddexp(0.0, -values))
    order = np.argsort(-values, kind="stable")
    return [Rank(int(index), float(scores[index])) for index in order]
