"""Short work runs on the event loop, long work in a thread: a thread costs about 0.1 ms."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

from maskdial.engine.timing import Deadline
from maskdial.runtime.memory import return_free_memory

T = TypeVar("T")

_MAX_INLINE_SECONDS = 0.002
_LONG_SECONDS = 0.1
# Texts of megabytes take hundreds of bytes a token while they are tokenized. So that their sum is
# bounded, and they leave the other threads to short texts, only two are worked on at once.
_LONG_WORK = ThreadPoolExecutor(2, thread_name_prefix="long-work")
# After which time without long work its memory is given back.
_TRIM_SECONDS = 5.0


async def offload(work: Callable[[], T], seconds: float, deadline: Deadline | None = None) -> T:
    """Runs work here, or in a thread if it is estimated to take longer than 2 ms.

    Work of more than 0.1 s waits for one of two threads.

    Raises:
        DeadlineError: the thread took longer than the ``deadline`` allows; its result is dropped.
    """
    if seconds <= _MAX_INLINE_SECONDS:
        return work()
    executor: Executor | None = None
    if seconds > _LONG_SECONDS:
        executor = _LONG_WORK
        _TRIMMER.start()
    running = asyncio.get_running_loop().run_in_executor(executor, work)
    if deadline is None:
        return await running
    async with deadline.enforced():
        return await running


class _Trimmer:
    """Gives memory back to the system some time after long work: glibc keeps it otherwise, several
    hundred megabytes after a text of 2 MB.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins the time, or begins it again."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(
            _TRIM_SECONDS, loop.run_in_executor, _LONG_WORK, return_free_memory
        )


_TRIMMER = _Trimmer()
