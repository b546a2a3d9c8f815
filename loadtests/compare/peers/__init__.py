"""The peers, one module each, and what they share.

A module has ``open_runner(setup)``, which loads the model and returns a `Runner`, and
``prepare(setup)`` if it converts the checkpoint first. It runs in a process of its own.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from loadtests import LoadTestError
from loadtests.compare.work import Work

Times = list[float]
"""When a stream was requested, then when each token arrived, in seconds from any origin."""

_PROMPT_CHUNK = 128

SETTLING = 2
"""Steps that are left out before a measurement."""


class Runner(Protocol):
    """A model, loaded and warm."""

    def run(self, work: Work) -> float:
        """Seconds for a prefill, or on average for a step or pass."""
        ...

    def close(self) -> None:
        """Ends processes and threads of its own; memory goes with the process."""
        ...


def mean_seconds(
    run: Callable[[], object], repeats: int, wait: Callable[[], None] = lambda: None
) -> float:
    """The mean time of a call, after one that is not counted.

    ``wait`` returns when a device has finished what the calls queued.
    """
    run()
    wait()
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return (time.perf_counter() - started) / repeats


def num_lead(work: Work) -> int:
    """How many tokens the first stream may generate before the last prompt is read, and a few."""
    return work.batch * -(-work.length // _PROMPT_CHUNK) + 2 * SETTLING


def decode_seconds(streams: Sequence[Times], num_steps: int) -> float:
    """The mean time of the first ``num_steps`` steps in which all streams run.

    Raises:
        LoadTestError: a stream ended before the last one began.
    """
    begun = max(times[SETTLING] for times in streams)
    ended = min(times[-1] for times in streams)
    together = [time for time in streams[0][1:] if begun <= time <= ended][: num_steps + 1]
    if len(together) < 2:
        raise LoadTestError(f"{len(streams)} streams did not run at the same time")
    return (together[-1] - together[0]) / (len(together) - 1)
