"""Scores of models, and what sets them apart: as answers do not change from run to run, every
question that comes out otherwise was changed by the model.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.card import Difference, Figure
from maskdial.offline.evaluate.answers import Outcome

_RESAMPLES = 2000
_INTERVAL = (2.5, 97.5)  # percentiles

Values = NDArray[np.float64]


def _mean(total: float) -> float:
    return total


def _perplexity(total: float) -> float:
    try:
        return math.exp(-total)
    except OverflowError:  # of one long word, as texts without spaces are
        return math.inf


def _bits(total: float) -> float:
    return -total / math.log(2)


_FROM_MEAN: dict[str, Callable[[float], float]] = {
    "perplexity": _perplexity,
    "word_perplexity": _perplexity,
    "byte_perplexity": _perplexity,
    "bits_per_byte": _bits,
}
"""How a metric is made of the weighted mean of log-likelihoods; others are the mean."""


def macro_f1(found: Values, right: Values) -> float:
    """The mean over all labels that occur of twice the hits by what is found and what is there, as
    scikit-learn's ``f1_score(average="macro")``.
    """
    labels = np.union1d(found, right)[:, None]
    is_found, is_right = found == labels, right == labels
    hits = (is_found & is_right).sum(axis=1)
    return float((2 * hits / (is_found.sum(axis=1) + is_right.sum(axis=1))).mean())


def pearson(one: Values, other: Values) -> float:
    """The correlation; 0 where one of them does not vary."""
    one, other = one - one.mean(), other - other.mean()
    length = math.sqrt(float(one @ one) * float(other @ other))
    return float(one @ other) / length if length else 0.0


def spearman(one: Values, other: Values) -> float:
    """The correlation of the ranks, of which equal values have their mean."""
    return pearson(_ranks(one), _ranks(other))


def _ranks(values: Values) -> Values:
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[where]


_OF_PAIRS: dict[str, Callable[[Values, Values], float]] = {
    "f1_macro": macro_f1,
    "spearman": spearman,
    "pearson": pearson,
}
"""Metrics of what was found, with what is right as the weight."""


def figure(metric: str, outcomes: Sequence[Outcome]) -> Figure:
    """The score of all questions."""
    values, weights = _columns(metric, outcomes)
    score = _score(metric, values, weights)
    if metric in _FROM_MEAN or metric in _OF_PAIRS:
        return Figure(metric=metric, value=score, error=None)
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Figure(metric=metric, value=score, error=float(error))


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
    with np.errstate(invalid="ignore"):  # infinite ones have no difference
        low, high = np.percentile(resampled, _INTERVAL)
    value = _score(metric, values, weights) - _score(metric, before, weights)
    found = Difference(metric=metric, value=value, low=float(low), high=float(high))
    if metric in _FROM_MEAN or metric in _OF_PAIRS:
        return found
    lost, won = int((before > values).sum()), int((values > before).sum())
    counts = {"lost": lost, "won": won, "probability": mcnemar(lost, won)}
    return found.model_copy(update=counts)


def mcnemar(lost: int, won: int) -> float:
    """The probability of a split at least as uneven of so many questions, two-sided and exact."""
    total, least = lost + won, min(lost, won)
    tail = sum(math.comb(total, k) for k in range(least + 1))
    return min(1.0, 2 * tail / (1 << total))  # of whole numbers, which may be larger than any float


def _columns(metric: str, outcomes: Sequence[Outcome]) -> tuple[Values, Values]:
    values = np.array([each.values[metric] for each in outcomes], np.float64)
    return values, np.array([each.weights[metric] for each in outcomes], np.float64)


def _score(metric: str, values: Values, weights: Values) -> float:
    if metric in _OF_PAIRS:
        return _OF_PAIRS[metric](values, weights)
    if metric not in _FROM_MEAN:
        return float(values.mean())
    return _FROM_MEAN[metric](float(values.sum() / weights.sum()))
