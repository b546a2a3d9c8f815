"""Short work runs on the event loop, long work in a thread: a thread costs about 0.1 ms."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from maskdial.requests.timing import Deadline

T = TypeVar("T")

_MAX_INLINE_SECONDS = 0.002


async def offload(work: Callable[[], T], seconds: float, deadline: Deadline | None = None) -> T:
    """Runs work here, or in a thread if it is estimated to take longer than 2 ms.

    Raises:
        DeadlineError: the thread took longer than the ``deadline`` allows; its result is dropped.
    """
    if seconds <= _MAX_INLINE_SECONDS:
        return work()
    if deadline is None:
        return await asyncio.to_thread(work)
    async with deadline.enforced():
        return await asyncio.to_thread(work)
