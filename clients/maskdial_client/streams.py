"""TokenStream and AsyncTokenStream: a text while it is generated."""

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
)
from contextlib import aclosing, closing
from types import TracebackType
from typing import Self

import httpx

from maskdial_client.results import StreamEvent
from maskdial_client.sse import StreamDecoder
from maskdial_client.transport import transport_errors


class TokenStream(Iterator[StreamEvent]):
    """A text as it is generated: an iterator of StreamEvent.

    The connection is closed, and so the server stops, when the text is complete, when a ``with``
    block around it ends, on ``close()``, and when a ``for`` loop over ``client.stream(...)`` is
    left early. A refused request is retried until the first byte of the text has come, never after.
    """

    def __init__(self, send: Callable[[], httpx.Response], base_url: str) -> None:
        self._connection = _Connection(send)
        # Not a method: a generator that holds its own stream would be a reference cycle, and the
        # connection would then stay open until the garbage collector's next round.
        self._events = _read_events(self._connection, base_url)

    @property
    def request_id(self) -> str | None:
        """The server's ``x-request-id``; None before the stream is open."""
        return self._connection.request_id

    def close(self) -> None:
        """Closes the connection; the stream has no more events."""
        self._events.close()
        self._connection.close()

    def __next__(self) -> StreamEvent:
        return next(self._events)

    def __enter__(self) -> Self:
        self._connection.open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Connection:
    """A streaming response that is asked for once, when it is first needed."""

    def __init__(self, send: Callable[[], httpx.Response]) -> None:
        self._send = send
        self._response: httpx.Response | None = None

    @property
    def request_id(self) -> str | None:
        return None if self._response is None else self._response.headers.get("x-request-id")

    def open(self) -> httpx.Response:
        if self._response is None:
            self._response = self._send()
        return self._response

    def close(self) -> None:
        if self._response is not None:
            self._response.close()


def _read_events(connection: _Connection, base_url: str) -> Generator[StreamEvent, None, None]:
    response = connection.open()
    decoder = StreamDecoder(response.headers)
    with closing(connection), transport_errors(base_url):
        for chunk in response.iter_bytes():
            yield from decoder.feed(chunk)
        decoder.finish()


class AsyncTokenStream(AsyncIterator[StreamEvent]):
    """A text as it is generated: an asynchronous iterator of StreamEvent.

    The connection is closed, and so the server stops, when the text is complete, when an ``async
    with`` block around it ends, on ``aclose()``, and when an ``async for`` loop over
    ``client.stream(...)`` is left early (at the event loop's next turn). A refused request is
    retried until the first byte of the text has come, never after.
    """

    def __init__(self, send: Callable[[], Awaitable[httpx.Response]], base_url: str) -> None:
        self._connection = _AsyncConnection(send)
        # Not a method: a generator that holds its own stream would be a reference cycle, and the
        # connection would then stay open until the garbage collector's next round.
        self._events = _read_events_async(self._connection, base_url)

    @property
    def request_id(self) -> str | None:
        """The server's ``x-request-id``; None before the stream is open."""
        return self._connection.request_id

    async def aclose(self) -> None:
        """Closes the connection; the stream has no more events."""
        await self._events.aclose()
        await self._connection.aclose()

    async def __anext__(self) -> StreamEvent:
        return await anext(self._events)

    async def __aenter__(self) -> Self:
        await self._connection.open()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()


class _AsyncConnection:
    """A streaming response that is asked for once, when it is first needed."""

    def __init__(self, send: Callable[[], Awaitable[httpx.Response]]) -> None:
        self._send = send
        self._response: httpx.Response | None = None

    @property
    def request_id(self) -> str | None:
        return None if self._response is None else self._response.headers.get("x-request-id")

    async def open(self) -> httpx.Response:
        if self._response is None:
            self._response = await self._send()
        return self._response

    async def aclose(self) -> None:
        if self._response is not None:
            await self._response.aclose()


async def _read_events_async(
    connection: _AsyncConnection, base_url: str
) -> AsyncGenerator[StreamEvent, None]:
    response = await connection.open()
    decoder = StreamDecoder(response.headers)
    async with aclosing(connection):
        with transport_errors(base_url):
            async for chunk in response.aiter_bytes():
                for event in decoder.feed(chunk):
                    yield event
        decoder.finish()
