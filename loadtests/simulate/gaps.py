"""Gaps: how long readers waited from one token to the next."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

_STEP = math.log(1.01)


class Gaps:
    """A histogram of times in seconds, whose classes are 1% wide."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float, number: int) -> None:
        """Counts ``number`` gaps of the same length."""
        if number and seconds > 0:
            self._counts[round(math.log(seconds) / _STEP)] += number

    @classmethod
    def sum(cls, parts: Iterable["Gaps"]) -> "Gaps":
        """All gaps of several histograms."""
        whole = cls()
        for part in parts:
            whole._counts.update(part._counts)
        return whole

    def spread(self, factors: Sequence[float]) -> "Gaps":
        """The gaps if each were multiplied by one of the factors, all of them equally often."""
        whole = Gaps()
        for factor in factors:
            shift = round(math.log(factor) / _STEP)
            for index, number in self._counts.items():
                whole._counts[index + shift] += number
        return whole

    def percentile(self, percent: float) -> float:
        """A percentile, in seconds; 0 without gaps."""
        left = self._counts.total() * percent / 100
        for index, number in sorted(self._counts.items()):
            left -= number
            if left <= 0:
                return math.exp(index * _STEP)
        return 0.0
