"""SharedWork: work in a thread, done once for all who ask for it at the same time."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedWork(Generic[T]):
    """Runs work in a thread. Used on one event loop only.

    However many ask, it takes one thread, so that they cannot starve the requests.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._running: asyncio.Task[T] | None = None

    async def result(self) -> T:
        """The result of the work that runs, or of new work; its errors are raised to all."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(asyncio.to_thread(self._work))
        return await asyncio.shield(self._running)
