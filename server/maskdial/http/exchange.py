"""Exchange: one request and its reply on the wire."""

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

from fastapi import Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope, Send

from maskdial.errors import MaskdialError, SlowBodyError, TooLargeError, UnavailableError
from maskdial.http.disconnect import ClientGoneError
from maskdial.http.ignored import Ignored
from maskdial.http.lifecycle import Lifecycle, Phase
from maskdial.http.transcript import Transcript
from maskdial.receipts.receipt import HEADER

T = TypeVar("T")

ErrorReply = Callable[[MaskdialError], Response]

_NO_HEADERS = Headers()
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# What is read of a refused body, so that its sender gets to read the reply: one that writes all of
# it first would meet a reset connection.
_DISCARD_BYTES = 32_000_000
_DISCARD_SECONDS = 2.0
_MAX_LENGTH_DIGITS = 19
_MAX_FORM_BYTES = 16_384  # of what surrounds a file
# Request ids are no secrets. A call of the system for each of them would let go of the interpreter,
# and wait for the engine's thread to get it back.
_RECEIPT = HEADER.encode()
_IDS = random.Random()


class Exchange:
    """One request and its reply, with the limits of its body.

    Args:
        scope: of the request; ``state`` is added where a server gives none.
        receive: as in ASGI.
        send: as in ASGI.
        error_reply: how the route's dialect writes errors.
        lifecycle: says until when bodies are awaited.
        max_body_bytes: maximum size of the body, unless it holds a file.
        max_file_bytes: maximum size of that; None: the body holds none.
        body_timeout: seconds until the body must have arrived, or as many bytes of one with a file
            as another may have.
        transcript: gets the bodies as they pass.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        error_reply: ErrorReply,
        *,
        lifecycle: Lifecycle,
        max_body_bytes: int,
        max_file_bytes: int | None = None,
        body_timeout: float,
        transcript: Transcript | None = None,
    ) -> None:
        given, declared, self._awaits_continue = "", b"", False
        self.receipt = b""
        """The header that asks for a receipt; empty if there is none."""
        for name, value in scope["headers"]:
            if name == b"content-length":
                declared = value
            elif name == b"x-request-id":
                given = value.decode("latin-1")
            elif name == b"expect":
                self._awaits_continue = True
            elif name == _RECEIPT:
                self.receipt = value
        # The client's own request id if it is a plain one, otherwise a new one.
        self.request_id = given if _REQUEST_ID.fullmatch(given) else f"{_IDS.getrandbits(128):032x}"
        # Python reads no number of thousands of digits; one of these is too large in any case.
        digits = declared.lstrip(b"0")[:_MAX_LENGTH_DIGITS]
        self._declared_bytes = int(digits) if digits.isdigit() else 0
        self.outcome = "ok"
        self.status = 0
        """Of the reply; 0 until it begins."""
        self.reply_headers: Headers = _NO_HEADERS
        self.trace_response = ""
        """Header of the reply that names its span; empty if the request is not traced."""
        self.transcript = transcript
        self._scope = scope
        self._receive = receive
        self._send = send
        self._error_reply = error_reply
        self._lifecycle = lifecycle
        self._max_body_bytes = max_body_bytes
        self._max_file_bytes = max_file_bytes
        self._body_timeout = body_timeout
        self._body_deadline: float | None = None
        self._body_bytes = 0
        self._body_ended = False
        self._start_time = time.perf_counter()
        scope.setdefault("state", {})

    def elapsed(self) -> float:
        """Seconds since the request's headers arrived."""
        return time.perf_counter() - self._start_time

    async def receive(self) -> Message:
        """The next part of the body, as long as the body is not too large and not too slow.

        Raises:
            TooLargeError: it is too large.
            SlowBodyError: it has not arrived in time.
            UnavailableError: it has not arrived, and the server shuts down.
            ClientGoneError: the client left before it had sent all of it.
        """
        if self._declared_bytes > self._limit:
            raise self._too_large()
        if self._body_ended:
            return await self._receive()  # which is how handlers wait for a disconnect
        message = await self._receive_part()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self._body_ended = not message.get("more_body", False)
        self._body_bytes += len(message.get("body", b""))
        if self._body_bytes > self._limit:
            raise self._too_large()
        if self.transcript is not None:
            self.transcript.add_request(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        """Passes the reply on, with its headers completed."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.status >= 400 and self.outcome == "ok":
                self.outcome = _outcome(self.status)
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self.request_id
            if self.trace_response:
                headers["traceresponse"] = self.trace_response
            headers["x-total-time"] = f"{self.elapsed() * 1e3:.3f}"
            if policy := self._scope["state"].get("policy"):
                headers["x-policy"] = policy
            ignored: Ignored | None = self._scope["state"].get("ignored")
            if ignored is not None:
                headers.update(ignored.headers)
            self.reply_headers = headers
        elif self.transcript is not None:
            self.transcript.add_reply(message.get("body", b""))
        await self._send(message)

    async def fail(self, error: MaskdialError) -> None:
        """Replies with an error, unless the reply has begun."""
        self.outcome = error.error_type
        if self.status:
            return
        reply = self._error_reply(error)
        if not isinstance(error, TooLargeError | UnavailableError | SlowBodyError):
            await reply(self._scope, self._receive, self.send)
            return
        # The rest of the body is not read, so the connection cannot carry another request.
        reply.headers["connection"] = "close"
        await self.send(
            {
                "type": "http.response.start",
                "status": reply.status_code,
                "headers": reply.raw_headers,
            }
        )
        await self.send({"type": "http.response.body", "body": reply.body, "more_body": True})
        was_awaited = self._body_deadline is not None and not isinstance(error, TooLargeError)
        if not (was_awaited or self._awaits_continue):
            await self._discard_body()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _receive_part(self) -> Message:
        if self._body_deadline is None:
            self._body_deadline = asyncio.get_running_loop().time() + self._body_timeout
        part = Begun(self._receive())
        if part.is_done:  # most bodies come in one piece with their headers
            return await part
        # A file has as long for each part of it as another body of that size.
        more = 0 if self._max_file_bytes is None else self._body_bytes // self._max_body_bytes
        deadline = self._body_deadline + more * self._body_timeout
        deadline = min(deadline, self._lifecycle.body_deadline)
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                self._lifecycle.bodies.add(timeout)
                try:
                    return await part
                finally:
                    self._lifecycle.bodies.discard(timeout)
        except TimeoutError:
            if self._lifecycle.phase is Phase.DRAINING:
                raise UnavailableError(
                    "the server is shutting down; try another instance"
                ) from None
            raise SlowBodyError(
                f"the body has not arrived within {self._body_timeout:g} seconds (--body-timeout)"
            ) from None

    async def _discard_body(self) -> None:
        num_bytes = 0
        try:
            async with asyncio.timeout(_DISCARD_SECONDS):
                while not self._body_ended and num_bytes <= _DISCARD_BYTES:
                    message = await self._receive()
                    num_bytes += len(message.get("body", b""))
                    self._body_ended = not message.get("more_body", False)
        except TimeoutError:
            pass

    @property
    def _limit(self) -> int:
        """The largest body that this request may have, in bytes."""
        if self._max_file_bytes is None:
            return self._max_body_bytes
        return self._max_file_bytes + _MAX_FORM_BYTES

    def _too_large(self) -> TooLargeError:
        size = max(self._declared_bytes, self._body_bytes)
        limit, flag = self._max_body_bytes, "--max-body-bytes"
        if self._max_file_bytes is not None:
            limit, flag = self._max_file_bytes, "--batch-max-file-bytes"
        return TooLargeError(
            f"the body has {size:,} bytes or more; this server accepts at most {limit:,} ({flag})"
        )


class Begun(Generic[T]):
    """What is awaited, as far as it gets without waiting.

    Most of what a request awaits is there already. Then nothing has to be set up for the wait: no
    task, no timeout.

    Args:
        awaitable: runs until it has to wait; what it raises until then is raised here.

    Attributes:
        is_done: whether it did not have to wait at all.
    """

    __slots__ = ("_result", "_step", "_steps", "is_done")

    def __init__(self, awaitable: Awaitable[T]) -> None:
        self._steps: Generator[Any, Any, T] = awaitable.__await__()
        self.is_done = False
        self._step: Any = None
        self._result: Any = None
        try:
            self._step = next(self._steps)
        except StopIteration as end:
            self.is_done, self._result = True, end.value

    def __await__(self) -> Generator[Any, None, T]:
        while not self.is_done:
            try:
                yield self._step
            except BaseException as error:
                try:
                    self._step = self._steps.throw(error)
                except StopIteration as end:
                    self.is_done, self._result = True, end.value
            else:
                self._result = yield from self._steps
                self.is_done = True
        result: T = self._result
        return result


def route_path(scope: Scope) -> str:
    """A request's path without its ``root_path``, exactly as Starlette routes it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    rest = path.removeprefix(root)
    return rest if rest[:1] in ("", "/") else path


def _outcome(status: int) -> str:
    """The outcome of a reply that is an error but was not raised as one of ours."""
    return "internal" if status >= 500 else "not_found" if status == 404 else "validation"
