"""Streams: a text token by token, while the server generates it."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, Unpack

import httpx

from maskdial_client._async.caller import AsyncCaller
from maskdial_client._async.generate import (
    Messages,
    SamplingParameters,
    Token,
    parse_token,
    parse_tokens,
    prompt_inputs,
)
from maskdial_client.call import Request, task_body, unexpected_reply
from maskdial_client.errors import StreamEndedError, api_error_class
from maskdial_client.sse import EventParser
from maskdial_client.transport import transport_errors


@dataclass(frozen=True, slots=True)
class StreamDetails:
    """How a streamed text ended. ``finish_reason`` is length, eos_token or stop_sequence."""

    finish_reason: str
    generated_tokens: int
    seed: int | None
    input_length: int | None


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """A generated token; the last event also has the whole text and its details.

    With ``top_n_tokens``, ``top_tokens`` are the most likely tokens at this position.
    """

    index: int
    token: Token
    generated_text: str | None
    details: StreamDetails | None
    top_tokens: tuple[Token, ...] = ()

    @property
    def text(self) -> str:
        """The text that this event adds: the token's, or nothing for a special token."""
        return "" if self.token.special else self.token.text


class AsyncStream(AsyncCaller):
    """The method for /generate with streaming."""

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[SamplingParameters],
    ) -> "AsyncTokenStream":
        """Continues a prompt or answers a conversation, token by token.

        The request is not sent until the stream is entered or read.
        """
        body = task_body(prompt_inputs(prompt, messages), model, parameters)
        request = Request("POST", "/generate", {**body, "stream": True})
        return AsyncTokenStream(
            lambda: self._exchange(request, timeout, stream=True), self.base_url
        )


class AsyncTokenStream(AsyncIterator[StreamEvent]):
    """A text while it is generated: an asynchronous iterator over StreamEvent.

    Closing the connection stops the generation. It is closed when the text is complete, by
    ``aclose()``, at the end of an ``async with`` block over the stream, and when an ``async for``
    loop over ``client.stream(...)`` is left early (at the event loop's next turn).

    A refused request is retried; a stream that has started is not.
    """

    def __init__(self, send: Callable[[], Awaitable[httpx.Response]], base_url: str) -> None:
        self._connection = _AsyncConnection(send)
        # A generator method would hold a reference to the stream that holds it, and the connection
        # would stay open until the garbage collector breaks that cycle.
        self._events = _async_read_events(self._connection, base_url)

    @property
    def request_id(self) -> str | None:
        """The ``x-request-id`` of the response; None before the request is sent."""
        return self._connection.request_id

    async def aclose(self) -> None:
        """Closes the connection. The stream yields no more events."""
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
    """A streaming response, requested once, when it is first needed."""

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


async def _async_read_events(
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


class StreamDecoder:
    """Decodes one stream: chunks of bytes in, StreamEvent out."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._parser = EventParser()
        self._request_id = headers.get("x-request-id")
        self._complete = False

    def feed(self, chunk: bytes) -> Iterator[StreamEvent]:
        """Yields the events that ``chunk`` completes. Raises the ApiError of an error event."""
        for data in self._parser.feed(chunk):
            event = parse_event(data, self._request_id)
            self._complete = event.details is not None
            yield event

    def finish(self) -> None:
        """To be called after the last chunk. Raises StreamEndedError if the text is incomplete."""
        if not self._complete:
            raise StreamEndedError(
                "the stream ended before the text was complete: the server stopped, or a proxy "
                "closed the connection"
            )


def parse_event(data: str, request_id: str | None) -> StreamEvent:
    """Parses the data of one event. Raises the ApiError of an error event."""
    try:
        document = json.loads(data)
        if "error" not in document:
            return _event(document)
        error_type = document.get("error_type")
        message = str(document["error"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise unexpected_reply("POST /generate with stream", error) from error
    raise api_error_class(error_type, None)(message, error_type=error_type, request_id=request_id)


def _event(document: Any) -> StreamEvent:
    details = document.get("details")
    return StreamEvent(
        index=int(document["index"]),
        token=parse_token(document["token"]),
        generated_text=document.get("generated_text"),
        details=None if details is None else _details(details),
        top_tokens=parse_tokens(document.get("top_tokens")),
    )


def _details(details: Mapping[str, Any]) -> StreamDetails:
    return StreamDetails(
        finish_reason=str(details["finish_reason"]),
        generated_tokens=int(details["generated_tokens"]),
        seed=details.get("seed"),
        input_length=details.get("input_length"),
    )
