"""SharedWork: work in a thread, done once for all callers at about the same time."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

_REST = 10.0  # the work takes less than a tenth of the time

T = TypeVar("T")


class SharedWork(Generic[T]):
    """Runs work in a thread. Used on one event loop only.

    However many ask, and however often, it takes one thread and a bounded share of the
    interpreter's time, so that they cannot starve the requests.

    Args:
        work: what to do.
        seconds: for how long a result is given to further callers, or ten times as long as the work
            took, if that is more; 0: only while it runs.
    """

    def __init__(self, work: Callable[[], T], seconds: float) -> None:
        self._work = work
        self.seconds = seconds
        self._task: asyncio.Task[T] | None = None
        self._fresh_until = 0.0

    async def result(self) -> T:
        """The result of work done just now, of the work that runs, or of new work; its errors are
        raised in all waiting callers.
        """
        if self._task is None or (self._task.done() and not self._is_fresh(self._task)):
            self._task = asyncio.create_task(asyncio.to_thread(self._work))
            self._task.add_done_callback(partial(self._note, time.monotonic()))
        return await asyncio.shield(self._task)

    def _is_fresh(self, task: "asyncio.Task[T]") -> bool:
        failed = task.cancelled() or task.exception() is not None
        return not failed and time.monotonic() < self._fresh_until

    def _note(self, began: float, task: "asyncio.Task[T]") -> None:
        now = time.monotonic()
        rest = max(self.seconds, _REST * (now - began)) if self.seconds else 0.0
        self._fresh_until = now + rest
