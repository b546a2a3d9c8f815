"""Short work runs on the event loop, long work in a thread: a thread costs about 0.1 ms."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

from maskdial.requests.timing import Deadline

T = TypeVar("T")

_MAX_INLINE_SECONDS = 0.002
_LONG_SECONDS = 0.1
# Texts of megabytes take hundreds of bytes a token while they are tokenized. So that their sum is
# bounded, and they leave the other threads to short texts, only two are worked on at once.
_LONG_WORK = ThreadPoolExecutor(2, thread_name_prefix="long-work")


async def offload(work: Callable[[], T], seconds: float, deadline: Deadline | None = None) -> T:
    """Runs work here, or in a thread if it is estimated to take longer than 2 ms.

    Work of more than 0.1 s waits for one of two threads.

    Raises:
        DeadlineError: the thread took longer than the ``deadline`` allows; its result is dropped.
    """
    if seconds <= _MAX_INLINE_SECONDS:
        return work()
    executor: Executor | None = _LONG_WORK if seconds > _LONG_SECONDS else None
    running = asyncio.get_running_loop().run_in_executor(executor, work)
    if deadline is None:
        return await running
    async with deadline.enforced():
        return await running
