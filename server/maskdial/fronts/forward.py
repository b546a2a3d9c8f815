"""Forward: the application of a front end, which has another process answer."""

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from maskdial.errors import MaskdialError, UnavailableError
from maskdial.fronts.inputs import RESULTS, Asked, results_of
from maskdial.fronts.link import Kind, Link
from maskdial.fronts.reader import Reader, UnreadError
from maskdial.http.disconnect import cancel
from maskdial.http.exchange import Begun
from maskdial.http.keys import sent_hashes
from maskdial.http.replies import error_reply
from maskdial.masked.request import MaskedResult

_MAX_HELD_BYTES = 65_536  # of a reply whose client is slow, until its sender has to wait
# Most requests are answered before it is watched whether their clients leave.
_UNWATCHED_SECONDS = 0.05
_MAX_ADMITTED = 4096  # keys that are remembered
# What the guard says to who has no key, or more requests or texts than the server takes
_REFUSED = frozenset({401, 403, 429, 503})

_log = logging.getLogger("maskdial.fronts")

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


@dataclass(slots=True)
class _Request:
    """A client's request: as ASGI has it, and what has come of its body.

    Attributes:
        first: the part of the body that is awaited already, if any.
        body: the first part.
        more: whether more of it follows.
        keys: that it sends, as hashes, if it could be read here.
    """

    scope: Scope
    receive: Receive
    send: Send
    first: Begun[Message] | None = None
    body: bytes = b""
    more: bool = True
    keys: tuple[bytes, ...] | None = None


class _AnsweredError(Exception):
    """The owner has answered a request, so that it need not be read on."""


class _Forwarding:
    """One request that the owner answers.

    Args:
        number: of the request among those of its front end.
        link: to the owner.
        request: the client's.
    """

    def __init__(self, number: int, link: Link, request: _Request) -> None:
        self._number = number
        self._link = link
        self._receive = request.receive
        self._first = request.first
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
        self.reader: Reader | None = None
        """Reads requests to masked models; None: the owner does."""
        self._open: dict[int, _Forwarding] = {}
        self._last = 0
        self._admitted: dict[tuple[bytes, ...], None] = {}
        """The keys with which the owner took a request last, as hashes."""

    def take(self, kind: int, number: int, rest: tuple[Any, ...]) -> None:
        """Takes a frame about a request, which may have ended."""
        forwarding = self._open.get(number)
        if forwarding is not None:
            forwarding.take(kind, rest)

    def lose(self) -> None:
        """The owner is gone: nothing more comes."""
        self.link = None
        for forwarding in self._open.values():
            forwarding.take(Kind.BROKEN, ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _Request(scope, receive, send)
        if self.link is None:
            await _refuse(request)
            return
        # Reading has a client that awaits "100 Continue" send its body, which the owner may refuse.
        if not any(name == b"expect" for name, _ in scope["headers"]):
            request.first = Begun(receive())
            if request.first.is_done:
                message, request.first = await request.first, None
                if message["type"] == "http.disconnect":
                    return
                request.body, request.more = (
                    message.get("body", b""),
                    message.get("more_body", False),
                )
        reader = self.reader
        if reader is None or request.more or not reader.reads(scope, request.body):
            await self._pass_on(request)
            return
        # The owner knows keys and limits: nothing is read for whom it has just refused.
        request.keys = sent_hashes(scope)
        if request.keys in self._admitted:
            await self._read(request, reader)
        else:
            await self._pass_on(request)

    async def _read(self, request: _Request, reader: Reader) -> None:
        """Answers a request with results of the owner's engine."""
        began = time.perf_counter()
        added: list[tuple[bytes, bytes]] = []

        async def ask(asked: Asked) -> list[MaskedResult]:
            content = await self._pass_on(request, asked, added)
            if content is None:
                raise _AnsweredError
            return results_of(content)

        try:
            reply = await reader.answer(request.scope, request.body, ask)
        except _AnsweredError:
            return
        except (MaskdialError, UnreadError):
            # What is wrong, such as a field of the body, is told by the owner, who counts it.
            await self._pass_on(request)
            return
        except Exception:
            _log.exception("a front end could not read a request; the owner does")
            await self._pass_on(request)
            return
        seconds = f"{(time.perf_counter() - began) * 1e3:.3f}".encode()
        headers = [
            (name, seconds if name == b"x-total-time" else value)
            for name, value in added
            if name not in (b"content-length", b"content-type")
        ]
        reply.raw_headers += headers
        await reply(request.scope, request.receive, request.send)

    async def _pass_on(
        self,
        request: _Request,
        asked: Asked | None = None,
        added: list[tuple[bytes, bytes]] | None = None,
    ) -> bytes | None:
        """Has the owner answer.

        Args:
            request: the client's.
            asked: what is wanted of an engine; None: the reply.
            added: gets the headers of the results.

        Returns:
            The results; None if the client has a reply.
        """
        link = self.link
        if link is None:
            await _refuse(request)
            return None
        self._last = number = self._last + 1
        forwarding = self._open[number] = _Forwarding(number, link, request)
        packed = None if asked is None else asked.packed()
        link.send(Kind.REQUEST, number, head_of(request.scope), request.body, request.more, packed)
        timer = None
        if not request.more:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(_UNWATCHED_SECONDS, forwarding.read_on)
        has_ended = False
        try:
            results = await self._reply(forwarding, request, added)
            has_ended = True
            return results
        finally:
            if timer is not None:
                timer.cancel()
            del self._open[number]
            if not has_ended:
                link.send(Kind.GONE, number)
            await forwarding.close()

    async def _reply(
        self,
        forwarding: _Forwarding,
        request: _Request,
        added: list[tuple[bytes, bytes]] | None,
    ) -> bytes | None:
        """Passes on the reply, or returns the results that come in its place."""
        has_begun, results = False, None
        while True:
            kind, rest = await forwarding.next_frame()
            if kind == Kind.BROKEN:
                if not has_begun:
                    await _refuse(request)
                # Otherwise the reply breaks off: uvicorn closes the connection.
                return None
            if kind == Kind.START:
                status, headers = rest
                if request.keys is not None:
                    self._note(request.keys, status)
                if added is not None and (b"content-type", RESULTS) in headers:
                    added += headers
                    results = b""
                    continue
                has_begun = True
                message = {"type": "http.response.start", "status": status, "headers": headers}
                await request.send(message)
                continue
            content, more = rest
            if results is None:
                message = {"type": "http.response.body", "body": content, "more_body": more}
                await request.send(message)
            else:
                results += content
            if not more:
                return results

    def _note(self, keys: tuple[bytes, ...], status: int) -> None:
        """Remembers whether the owner takes requests with such keys."""
        self._admitted.pop(keys, None)
        if status in _REFUSED:
            return
        self._admitted[keys] = None
        if len(self._admitted) > _MAX_ADMITTED:
            del self._admitted[next(iter(self._admitted))]


async def _refuse(request: _Request) -> None:
    reply = error_reply(UnavailableError("the server has stopped; try another instance"))
    reply.headers["connection"] = "close"
    await reply(request.scope, request.receive, request.send)
