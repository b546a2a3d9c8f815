"""Short work runs on the event loop, long work in a thread: a thread costs about 0.1 ms."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_MAX_INLINE_SECONDS = 0.002


async def offload(work: Callable[[], T], seconds: float) -> T:
    """Runs work here, or in a thread where it is estimated to take longer than 2 ms."""
    return work() if seconds <= _MAX_INLINE_SECONDS else await asyncio.to_thread(work)
