"""Scores of models, and what sets them apart: as answers do not change from run to run, every
question that comes out otherwise was changed by the model.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskdial.offline.evaluate.answers import Outcome

_RESAMPLES = 2000
_INTERVAL = (2.5, 97.5)  # percentiles

Values = NDArray[np.float64]


def _mean(total: float) -> float:
    return total


def _perplexity(total: float) -> float:
    return math.exp(-total)


def _bits(total: float) -> float:
    return -total / math.log(2)


_FROM_MEAN: dict[str, Callable[[float], float]] = {
    "perplexity": _perplexity,
    "word_perplexity": _perplexity,
    "byte_perplexity": _perplexity,
    "bits_per_byte": _bits,
}
"""How a metric is made of the weighted mean of log-likelihoods; others are the mean."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A model's score in a metric; ``error`` is the standard error, of means only."""

    metric: str
    value: float
    error: float | None


@dataclass(frozen=True, slots=True)
class Difference:
    """How a model's score in a metric differs from another's on the same questions.

    Attributes:
        metric: the metric.
        value: its score less the other's.
        low, high: where 95% of resampled questions put that.
        lost, won: questions that only the other, or only it, has right; of counts only.
        probability: of a split at least as uneven if both were equal (McNemar's exact test).
    """

    metric: str
    value: float
    low: float
    high: float
    lost: int | None = None
    won: int | None = None
    probability: float | None = None


def figure(metric: str, outcomes: Sequence[Outcome]) -> Figure:
    """The score of all questions."""
    values, weights = _columns(metric, outcomes)
    score = _score(metric, values, weights)
    if metric in _FROM_MEAN:
        return Figure(metric, score, None)
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Figure(metric, score, float(error))


def difference(metric: str, ours: Sequence[Outcome], others: Sequence[Outcome]) -> Difference:
    """What sets two models apart, question by question."""
    values, weights = _columns(metric, ours)
    before, _ = _columns(metric, others)
    random = np.random.Generator(np.random.PCG64(0))
    drawn = random.integers(len(values), size=(_RESAMPLES, len(values)))
    resampled = [
        _score(metric, values[rows], weights[rows]) - _score(metric, before[rows], weights[rows])
        for rows in drawn
    ]
    low, high = np.percentile(resampled, _INTERVAL)
    value = _score(metric, values, weights) - _score(metric, before, weights)
    if metric in _FROM_MEAN:
        return Difference(metric, value, float(low), float(high))
    lost, won = int((before > values).sum()), int((values > before).sum())
    return Difference(metric, value, float(low), float(high), lost, won, mcnemar(lost, won))


def mcnemar(lost: int, won: int) -> float:
    """The probability of a split at least as uneven of so many questions, two-sided and exact."""
    total, least = lost + won, min(lost, won)
    tail = sum(math.comb(total, k) for k in range(least + 1))
    return min(1.0, 2.0 * tail / 2.0**total)


def _columns(metric: str, outcomes: Sequence[Outcome]) -> tuple[Values, Values]:
    values = np.array([each.values[metric] for each in outcomes], np.float64)
    return values, np.array([each.weights[metric] for each in outcomes], np.float64)


def _score(metric: str, values: Values, weights: Values) -> float:
    if metric not in _FROM_MEAN:
        return float(values.mean())
    return _FROM_MEAN[metric](float(values.sum() / weights.sum()))
