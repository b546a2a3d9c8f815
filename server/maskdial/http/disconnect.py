"""Clients that leave before they have their reply: what runs for them is cancelled.

Starlette does not cancel a handler when its client disconnects; it has to watch for that itself.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.types import Receive

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection; nobody is left to answer."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Awaits work for a client whose body was read, and cancels it if the client disconnects.

    Raises:
        ClientGoneError: it did.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))

    def leave(_: object) -> None:
        if not gone.cancelled():
            gone.exception()  # otherwise asyncio logs one, as nobody retrieves it
            task.cancel()

    gone.add_done_callback(leave)
    try:
        return await task
    except (Exception, asyncio.CancelledError):
        # The watch may be cancelled with all other tasks, which says nothing of the client.
        if gone.done() and not gone.cancelled():
            raise ClientGoneError from None
        raise
    finally:
        gone.cancel()


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
