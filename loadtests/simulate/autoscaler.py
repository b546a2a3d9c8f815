"""Autoscaler: how many replicas Kubernetes would want, by what waits and what runs.

The arithmetic is that of the HorizontalPodAutoscaler, which KEDA uses, too; the defaults are those
of the chart in ``deploy/helm``.
"""

import math
from collections import deque
from dataclasses import dataclass

_TOLERANCE = 0.1
_MOST_GROWTH = 2.0
_GROWTH_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """Settings of an autoscaler; times in seconds.

    Attributes:
        waiting: target of waiting requests per replica.
        running: target of running requests per replica; None for none.
        least, most: replicas.
        interval: between two decisions. Each uses the numbers of the one before it: they come by
            way of a scraped metric.
        start_delay: from the decision until a new replica gets requests.
        down_after: how long fewer replicas have to be enough before one is removed.
        down_interval: between two removals.
    """

    waiting: float = 16.0
    running: float | None = 4.0
    least: int = 2
    most: int = 8
    interval: float = 15.0
    start_delay: float = 30.0
    down_after: float = 300.0
    down_interval: float = 120.0


class Autoscaler:
    """Decides, and remembers what it has decided. To be asked every ``interval`` seconds."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling
        self._wanted: deque[tuple[float, int]] = deque()  # within `down_after`
        self._sizes: deque[tuple[float, int]] = deque()  # within `_GROWTH_SECONDS`
        self._removed_at = -math.inf

    def decide(self, now: float, replicas: int, waiting: int, running: int) -> int:
        """How many replicas there should be.

        Args:
            now: in seconds.
            replicas: those that there are, the ones that start included.
            waiting: requests in all queues.
            running: requests in all slots.
        """
        scaling = self._scaling
        wanted = self._for_target(waiting, scaling.waiting, replicas)
        if scaling.running is not None:
            wanted = max(wanted, self._for_target(running, scaling.running, replicas))
        wanted = min(max(wanted, scaling.least), scaling.most)
        _remember(self._wanted, now, wanted, scaling.down_after)
        _remember(self._sizes, now, replicas, _GROWTH_SECONDS)
        if wanted > replicas:
            before = min(size for _, size in self._sizes)
            return max(min(wanted, math.floor(_MOST_GROWTH * before)), replicas)
        stable = min(max(number for _, number in self._wanted), replicas)
        if stable < replicas and now - self._removed_at >= scaling.down_interval:
            self._removed_at = now
            return replicas - 1
        return replicas

    @staticmethod
    def _for_target(total: int, target: float, replicas: int) -> int:
        """As many as bring the mean to the target, unless it is within 10% of it."""
        if abs(total / (target * replicas) - 1) <= _TOLERANCE:
            return replicas
        return math.ceil(total / target)


def _remember(values: deque[tuple[float, int]], now: float, value: int, seconds: float) -> None:
    values.append((now, value))
    while values[0][0] < now - seconds:
        values.popleft()
