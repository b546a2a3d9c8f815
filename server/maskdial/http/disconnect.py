"""Clients that leave before they have their reply: what runs for them is cancelled.

Starlette does not cancel a handler when its client disconnects; it has to watch for that itself.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.types import Receive

T = TypeVar("T")

_UNWATCHED_SECONDS = 0.05


class ClientGoneError(Exception):
    """The client closed its connection; nobody is left to answer."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Awaits work for a client whose body was read, and cancels it if the client disconnects.

    Most requests are answered before the watch begins, so they need no task of their own for it.

    Raises:
        ClientGoneError: it did.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    watch: asyncio.Task[None] | None = None
    is_gone = has_ended = False

    def leave(watch: asyncio.Task[None]) -> None:
        nonlocal is_gone
        if watch.cancelled():
            return
        watch.exception()  # otherwise asyncio logs one, as nobody retrieves it
        # The work may have ended between the client's leaving and this call, which could not be
        # taken back any more: the task is busy with something else by now.
        if not has_ended:
            is_gone = True
            task.cancel()

    def begin() -> None:
        nonlocal watch
        watch = loop.create_task(disconnected(request.receive))
        watch.add_done_callback(leave)

    timer = loop.call_later(_UNWATCHED_SECONDS, begin)
    try:
        return await work
    except (Exception, asyncio.CancelledError):
        if is_gone:
            raise ClientGoneError from None
        raise
    finally:
        has_ended = True
        timer.cancel()
        if is_gone:
            task.uncancel()
        if watch is not None:
            watch.cancel()


async def disconnected(receive: Receive) -> None:
    """Waits until the client disconnects; its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancels a task, waits for its clean-up, and drops its result."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # otherwise asyncio logs an exception that nobody retrieved
