"""Passes of a masked model, timed."""

import time
from collections.abc import Callable


def mean_seconds(
    run: Callable[[], object], repeats: int, wait: Callable[[], None] = lambda: None
) -> float:
    """The time of one of several calls, after one that is not counted.

    ``wait`` returns when all is done that calls have left to a device.
    """
    run()
    wait()
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return (time.perf_counter() - started) / repeats
