"""Throughput: how much is done in a second, as measured of late."""

import time
from collections.abc import Callable

_KEPT = 0.9  # of the weight of what was measured before, with each measurement
_STALE_SECONDS = 600.0


class Throughput:
    """A rate, weighted by time and with more weight for the newest.

    It forgets what is old: a decision that rests on it is tried again now and then, as a disk that
    was slow may have been busy.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._measured = 0.0, 0.0, 0.0
        """The weighted sums, and when they were last added to. One thread adds, others read."""

    def add(self, amount: float, seconds: float) -> None:
        """Notes that so much was done in so many seconds."""
        amounts, durations, _ = self._measured
        kept = 0.0 if self.per_second is None else _KEPT
        duration = durations * kept + max(seconds, 1e-9)
        self._measured = amounts * kept + amount, duration, self._clock()

    @property
    def per_second(self) -> float | None:
        """None if it was not measured in the last minutes."""
        amounts, durations, measured_at = self._measured
        if not durations or self._clock() - measured_at > _STALE_SECONDS:
            return None
        return amounts / durations
