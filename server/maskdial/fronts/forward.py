"""Forward: the application of a front end, which has another process answer."""

import asyncio
from collections import deque
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from maskdial.errors import UnavailableError
from maskdial.fronts.link import Kind, Link
from maskdial.http.begun import Begun
from maskdial.http.disconnect import cancel
from maskdial.http.replies import error_reply

_MAX_HELD_BYTES = 65_536  # of a reply whose client is slow, until its sender has to wait
# Most requests are answered before it is watched whether their clients leave.
_UNWATCHED_SECONDS = 0.05

Head = tuple[Any, ...]


def head_of(scope: Scope) -> Head:
    """What a request's frame says of it beside its body."""
    return (
        scope["method"],
        scope["path"],
        scope["raw_path"],
        scope["query_string"],
        scope["headers"],
        scope["client"],
        scope["server"],
        scope["scheme"],
        scope["http_version"],
        scope["root_path"],
    )


class Exchange:
    """One request that the owner answers.

    Args:
        number: of the request among those of its front end.
        link: to the owner.
        receive: as in ASGI, of the client's connection.
        first: the first part of the body, if it is awaited already.
    """

    def __init__(
        self, number: int, link: Link, receive: Receive, first: Begun[Message] | None
    ) -> None:
        self._number = number
        self._link = link
        self._receive = receive
        self._first = first
        self._frames: deque[tuple[int, tuple[Any, ...]]] = deque()
        self._num_held = 0
        self._is_paused = False
        self._arrived = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    def take(self, kind: int, rest: tuple[Any, ...]) -> None:
        """Takes a frame of the owner's."""
        if kind == Kind.NEED:
            self.read_on()
            return
        if kind == Kind.PART:
            self._num_held += len(rest[0])
            if self._num_held > _MAX_HELD_BYTES and not self._is_paused:
                self._is_paused = True
                self._link.send(Kind.PAUSE, self._number)
        self._frames.append((kind, rest))
        self._arrived.set()

    async def next_frame(self) -> tuple[int, tuple[Any, ...]]:
        """The next frame of the reply: `START`, `PART` or `BROKEN`."""
        while not self._frames:
            self._arrived.clear()
            await self._arrived.wait()
        kind, rest = self._frames.popleft()
        if kind == Kind.PART:
            self._num_held -= len(rest[0])
            if self._is_paused and self._num_held < _MAX_HELD_BYTES // 2:
                self._is_paused = False
                self._link.send(Kind.RESUME, self._number)
        return kind, rest

    def read_on(self) -> None:
        """Begins to pass on the next part of the body; behind the last one, that the client has
        left.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._send_part())

    async def close(self) -> None:
        """Stops reading from the client."""
        if self._reading is not None:
            await cancel(self._reading)

    async def _send_part(self) -> None:
        while True:
            first, self._first = self._first, None
            message = await (self._receive() if first is None else first)
            if message["type"] == "http.disconnect":
                self._link.send(Kind.GONE, self._number)
                return
            more = message.get("more_body", False)
            self._link.send(Kind.BODY, self._number, message.get("body", b""), more)
            if more:
                return


class Forward:
    """As an ASGI application: sends each request to the owner, and its reply to the client."""

    def __init__(self) -> None:
        self.link: Link | None = None
        """To the owner; None: it is gone."""
        self._exchanges: dict[int, Exchange] = {}
        self._last = 0

    def take(self, kind: int, number: int, rest: tuple[Any, ...]) -> None:
        """Takes a frame about an exchange, which may have ended."""
        exchange = self._exchanges.get(number)
        if exchange is not None:
            exchange.take(kind, rest)

    def lose(self) -> None:
        """The owner is gone: nothing more comes."""
        self.link = None
        for exchange in self._exchanges.values():
            exchange.take(Kind.BROKEN, ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.link is None:
            await _refuse(scope, receive, send)
            return
        self._last = number = self._last + 1
        first, body, more = None, b"", True
        # Reading has a client that awaits "100 Continue" send its body, which the owner may refuse.
        if not any(name == b"expect" for name, _ in scope["headers"]):
            first = Begun(receive())
            if first.is_done:
                message, first = await first, None
                if message["type"] == "http.disconnect":
                    return
                body, more = message.get("body", b""), message.get("more_body", False)
        exchange = self._exchanges[number] = Exchange(number, self.link, receive, first)
        self.link.send(Kind.REQUEST, number, head_of(scope), body, more)
        timer = None
        if not more:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(_UNWATCHED_SECONDS, exchange.read_on)
        has_ended = False
        try:
            has_ended = await self._reply(exchange, scope, receive, send)
        finally:
            if timer is not None:
                timer.cancel()
            del self._exchanges[number]
            if not has_ended and self.link is not None:
                self.link.send(Kind.GONE, number)
            await exchange.close()

    async def _reply(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> bool:
        """Passes on the reply; whether all of it came."""
        has_begun = False
        while True:
            kind, rest = await exchange.next_frame()
            if kind == Kind.START:
                has_begun = True
                status, headers = rest
                await send({"type": "http.response.start", "status": status, "headers": headers})
            elif kind == Kind.PART:
                content, more = rest
                await send({"type": "http.response.body", "body": content, "more_body": more})
                if not more:
                    return True
            else:
                if not has_begun:
                    await _refuse(scope, receive, send)
                # Otherwise the reply breaks off: uvicorn closes the connection.
                return True


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    reply = error_reply(UnavailableError("the server has stopped; try another instance"))
    reply.headers["connection"] = "close"
    await reply(scope, receive, send)
