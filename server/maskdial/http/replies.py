"""What every route shares: reading bodies, noticing clients that leave, headers, event streams."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from maskdial.errors import MaskdialError

T = TypeVar("T")

KEEP_ALIVE_SECONDS = 15.0


class ClientGoneError(Exception):
    """The client closed its connection; nobody is left to answer."""


@dataclass(frozen=True, slots=True)
class Timings:
    """What the reply's headers tell: seconds in the queue and in passes, tokens computed, and
    tokens cut off.
    """

    queue_seconds: float
    inference_seconds: float
    compute_tokens: int
    truncated_tokens: int = 0

    def headers(self) -> dict[str, str]:
        """``x-queue-time`` and ``x-inference-time`` in milliseconds, ``x-compute-tokens``, and
        ``x-truncated-tokens`` where there are any.
        """
        return truncation_header(self.truncated_tokens) | {
            "x-queue-time": f"{self.queue_seconds * 1e3:.3f}",
            "x-inference-time": f"{self.inference_seconds * 1e3:.3f}",
            "x-compute-tokens": str(self.compute_tokens),
        }


def truncation_header(num_tokens: int) -> dict[str, str]:
    """``x-truncated-tokens`` of a reply, where tokens were cut off."""
    return {"x-truncated-tokens": str(num_tokens)} if num_tokens else {}


def encode(content: object) -> bytes:
    """JSON; numbers that it cannot spell, such as the logarithm of 0, are null."""
    return to_json(content, inf_nan_mode="null")


def json_reply(
    content: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A JSON response."""
    return Response(encode(content), status, headers, media_type="application/json")


def body_schema(schema: type[BaseModel]) -> dict[str, Any]:
    """What OpenAPI says of a route whose body is read by hand (`openapi_extra`).

    The schemas that it refers to are added by `app.py`.
    """
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}
    }


def error_content(error: MaskdialError) -> dict[str, str]:
    """An error as the native API spells it."""
    return {"error": error.message, "error_type": error.error_type}


def error_reply(error: MaskdialError) -> Response:
    """An error as a response, with Retry-After where the class has it."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    return json_reply(error_content(error), status=error.status, headers=headers)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Awaits work on behalf of a client whose body was read, and cancels it if the client leaves.

    Raises:
        ClientGoneError: it left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        await cancel(task)
        await cancel(gone)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancels a task, waits until it has cleaned up after itself, and forgets how it ended."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # asyncio logs an error that nobody looked at


class EventStream(Response):
    """Server-sent events, closed at once when the client leaves.

    ``events`` gives the payloads; ``first`` is the task of its first one, which the route waited
    for so that a failure before it could still choose the status. A comment line is sent when
    nothing else was for ``KEEP_ALIVE_SECONDS``. ``headers`` are sent beside those of every stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Task[bytes],
        events: AsyncGenerator[bytes],
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers=headers | {"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._last_sent = asyncio.get_running_loop().time()
        gone = asyncio.ensure_future(_disconnected(receive))
        sending = asyncio.ensure_future(self._send_events(send))
        keeping_alive = asyncio.ensure_future(self._keep_alive(send))
        try:
            await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise ClientGoneError
            sending.result()
        finally:
            for task in (gone, keeping_alive, sending, self._first):
                await cancel(task)
            await self._events.aclose()

    async def _send_events(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        await self._send_chunk(send, b"data: " + await self._first + b"\n\n")
        async for event in self._events:
            await self._send_chunk(send, b"data: " + event + b"\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            idle = loop.time() - self._last_sent
            if idle >= KEEP_ALIVE_SECONDS:
                await self._send_chunk(send, b": keep-alive\n\n")
            else:
                await asyncio.sleep(KEEP_ALIVE_SECONDS - idle)

    async def _send_chunk(self, send: Send, chunk: bytes) -> None:
        self._last_sent = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
