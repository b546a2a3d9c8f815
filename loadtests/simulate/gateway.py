"""Gateway: the proxy before the replicas, which takes some time for each request."""

import heapq


class Gateway:
    """A queue before workers that each handle one request at a time, all in the same time.

    Args:
        seconds: that a request takes, the relaying of its reply included.
        workers: processes or threads that work at the same time.
    """

    def __init__(self, seconds: float, workers: int = 1) -> None:
        self.busy_seconds = 0.0
        """Of all workers together."""
        self._seconds = seconds
        self._free_at = [0.0] * workers  # a heap

    def delay(self, now: float) -> float:
        """Takes a request; returns the seconds after which it leaves. Times must not decrease."""
        if not self._seconds:
            return 0.0
        start = max(now, self._free_at[0])
        heapq.heapreplace(self._free_at, start + self._seconds)
        self.busy_seconds += self._seconds
        return start + self._seconds - now
