"""InProcess: requests to the application that come over no connection of its own."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive

_LEAVING_SECONDS = 1.0


@dataclass(slots=True)
class Reply:
    """A whole reply: status, headers in lower case, body."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


class InProcess:
    """Asks an application, whose lifespan has begun, in its own event loop.

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Iterable[tuple[str, str]] = (),
        client: tuple[str, int] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> Reply:
        """The reply to a request; a stream comes as a whole.

        Args:
            method: of HTTP.
            path: without a query.
            body: of the request.
            headers: in lower case.
            client: the address and port that it comes from; None: this process.
            state: of the request, which no request from outside can set.
        """
        reply, parts = Reply(), []
        async for message in self.stream(method, path, body, headers, client, state):
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = headers_of(message)
            else:
                parts.append(message.get("body", b""))
        reply.body = b"".join(parts)
        return reply

    async def stream(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Iterable[tuple[str, str]] = (),
        client: tuple[str, int] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[Message]:
        """The messages of a reply as they come. The client leaves when the caller does."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        scope = scope_of(method, path, headers, client) | {"state": dict(state or {})}
        answering = asyncio.ensure_future(self._app(scope, receiving(body, gone), send))
        answering.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
            answering.result()
        finally:
            if not answering.done():
                gone.set()
                await asyncio.wait({answering}, timeout=_LEAVING_SECONDS)
                answering.cancel()
                await asyncio.wait({answering})


def headers_of(message: Message) -> dict[str, str]:
    """The headers of a reply, in lower case."""
    return {
        name.decode("latin-1").lower(): value.decode("latin-1")
        for name, value in message["headers"]
    }


def scope_of(
    method: str,
    path: str,
    headers: Iterable[tuple[str, str]] = (),
    client: tuple[str, int] | None = None,
) -> dict[str, Any]:
    """The ASGI scope of a request with a JSON body."""
    given = {"host": "local", "content-type": "application/json"} | dict(headers)
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
        "client": client,
        "server": None,
    }


def receiving(body: bytes, gone: asyncio.Event) -> Receive:
    """Gives the body to the route, and tells it when the client is gone."""
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await gone.wait()
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
