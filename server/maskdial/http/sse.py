"""Events and lines of JSON: a stream that ends when its client leaves, and says how it failed."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from maskdial.errors import MaskdialError
from maskdial.http.disconnect import ClientGoneError, cancel, disconnected
from maskdial.http.replies import encode_json

KEEP_ALIVE_SECONDS = 15.0

Frames = AsyncGenerator[bytes]
"""Events as they are sent: ``data:`` lines with the blank line that ends each event."""


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How a stream is written.

    Attributes:
        media_type: of the reply.
        keep_alive: is sent when nothing else was for ``KEEP_ALIVE_SECONDS``.
    """

    media_type: str
    keep_alive: bytes


EVENTS = StreamForm("text/event-stream", b": keep-alive\n\n")
"""Server-sent events, kept alive by comment lines."""

# Lines end there for Python's `str.splitlines`, by which httpx and others read streams.
_LINE_ENDS = {
    "\N{NEXT LINE}".encode(): rb"\u0085",
    "\N{LINE SEPARATOR}".encode(): rb"\u2028",
    "\N{PARAGRAPH SEPARATOR}".encode(): rb"\u2029",
}


def escape_line_ends(content: bytes) -> bytes:
    """JSON that is a single line for every reader."""
    for raw, escaped in _LINE_ENDS.items():
        content = content.replace(raw, escaped)
    return content


def data_frame(content: bytes) -> bytes:
    """An event with nothing but data: JSON, which must be a single line, or a word."""
    return b"data: " + escape_line_ends(content) + b"\n\n"


def event_frame(content: dict[str, Any]) -> bytes:
    """A server-sent event of JSON, named after its ``type``."""
    return named_frame(content["type"], encode_json(content))


def named_frame(name: str, content: bytes) -> bytes:
    """An event with a name; ``content`` is as for `data_frame`."""
    return f"event: {name}\n".encode() + data_frame(content)


async def stream_reply(
    request: Request,
    frames: Frames,
    error_frame: Callable[[MaskdialError], bytes],
    headers: dict[str, str],
    form: StreamForm = EVENTS,
) -> Response:
    """Waits for the first event, so that an error before it still has its status; then streams.

    Args:
        frames: the events; closed when the client leaves.
        error_frame: how a failure after the first byte is told.
        headers: sent beside those of every stream.
        form: how it is written.

    Raises:
        MaskdialError: what failed before the first event.
    """
    first = asyncio.ensure_future(anext(frames))
    try:
        # As long as a connection may be silent; a timeout does not cancel the first event.
        await asyncio.wait({first}, timeout=KEEP_ALIVE_SECONDS)
    except BaseException:
        await cancel(first)
        raise
    if first.done():
        first.result()
    return EventStream(request, first, frames, error_frame, headers, form)


class EventStream(Response):
    """A response of events; see `stream_reply`."""

    def __init__(
        self,
        request: Request,
        first: asyncio.Future[bytes],
        frames: Frames,
        error_frame: Callable[[MaskdialError], bytes],
        headers: dict[str, str],
        form: StreamForm,
    ) -> None:
        super().__init__(
            headers=headers | {"cache-control": "no-cache", "x-accel-buffering": "no"},
            media_type=form.media_type,
        )
        del self.headers["content-length"]
        self._request = request
        self._first = first
        self._frames = frames
        self._error_frame = error_frame
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._last_sent = asyncio.get_running_loop().time()
        gone = asyncio.ensure_future(disconnected(receive))
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
            await self._frames.aclose()

    async def _send_events(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            await self._send_chunk(send, await self._first)
            async for frame in self._frames:
                await self._send_chunk(send, frame)
        except MaskdialError as error:
            self._request.state.outcome = error.error_type
            await self._send_chunk(send, self._error_frame(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        while True:
            idle = loop.time() - self._last_sent
            if idle >= KEEP_ALIVE_SECONDS:
                await self._send_chunk(send, self._form.keep_alive)
            else:
                await asyncio.sleep(KEEP_ALIVE_SECONDS - idle)

    async def _send_chunk(self, send: Send, chunk: bytes) -> None:
        self._last_sent = asyncio.get_running_loop().time()
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
