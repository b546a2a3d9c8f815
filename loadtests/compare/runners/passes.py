"""Passes of a masked model, timed."""

import time
from collections.abc import Callable


def mean_seconds(run: Callable[[], object], repeats: int) -> float:
    """The time of one of several calls, after one that is not counted."""
    run()
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - started) / repeats
