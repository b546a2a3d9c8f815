"""Connection: HTTP/1.1 with as little of this process's time as Python allows.

The load shares the cores with the server, so what the client computes is missing there. This one
sends bytes that were made beforehand and keeps the reply as it comes.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import httptools

from loadtests.errors import LoadTestError


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply. Of an event stream, ``body`` is all events with their line ends."""

    status: int
    body: bytes


def post(path: str, content: bytes) -> bytes:
    """A request with a JSON body."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class Connection(asyncio.Protocol):
    """One connection that is kept open, with one request at a time on it."""

    def __init__(self) -> None:
        self._reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._body: list[bytes] = []
        self._on_body: Callable[[bytes], None] | None = None

    @classmethod
    async def open(cls, port: int) -> "Connection":
        """Connects to a port of this machine."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, "127.0.0.1", port)
        return connection

    @property
    def closed(self) -> bool:
        """Whether either side closed it; the server does so when it is idle for some seconds."""
        return self._transport.is_closing()

    async def send(self, request: bytes, on_body: Callable[[bytes], None] | None = None) -> Reply:
        """Sends a request and waits for its whole reply.

        Args:
            request: as `post` makes it.
            on_body: called with each piece of the body as it comes.

        Raises:
            LoadTestError: the server closed the connection.
        """
        if self.closed:
            raise LoadTestError("the server closed a connection before a request was sent")
        self._parser = httptools.HttpResponseParser(self)
        self._reply = asyncio.get_running_loop().create_future()
        self._body = []
        self._on_body = on_body
        self._transport.write(request)
        return await self._reply

    def close(self) -> None:
        """Closes the connection."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no such class

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        if not self._reply.done():
            self._reply.set_exception(LoadTestError("the server closed a connection"))
            self._reply.exception()  # nobody may be waiting

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._body.append(data)
        if self._on_body is not None:
            self._on_body(data)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if not self._reply.done():
            self._reply.set_result(Reply(self._parser.get_status_code(), b"".join(self._body)))
