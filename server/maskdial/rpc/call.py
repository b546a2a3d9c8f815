"""Call: one remote procedure call on a stream of HTTP/2, as gRPC writes it."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import quote

from maskdial.rpc.calls import CallError, Calls, Place
from maskdial.rpc.frames import FIRST_WINDOW, Header

_PREFIX_BYTES = 5  # before each message: whether it is compressed, and its length
_MAX_SENTENCE = 2048
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])", re.ASCII)
_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


class Wire(Protocol):
    """What a call asks of its connection."""

    def allow(self, stream_id: int, num_bytes: int) -> None:
        """Lets the client send more of a stream."""

    async def send(self, call: "Call", content: bytes) -> None:
        """Sends a part of the reply, as fast as the client takes it."""

    def send_headers(self, stream_id: int, headers: Sequence[Header], *, ends: bool) -> None:
        """Sends the head of a reply, or its end."""

    def waits(self, *, more: bool) -> None:
        """Counts a call that waits for its client, or does so no longer."""


class Call:
    """One call. Messages are bytes here.

    Args:
        wire: the connection.
        stream_id: of the stream.
        headers: as the client sent them.
        calls: all of the server, with their limits.
        window: bytes of a reply that the client takes at first.
        client: its address and port.

    Attributes:
        path: of the method.
        is_grpc: whether it is a call at all.
        deadline: when the client gives up, in the event loop's time.
        trailing: metadata for the end of the reply.
        send_window: bytes of the reply that the client takes now.
        num_unsent: bytes of the message that is being sent.
        has_ended: the client sends no more.
        has_replied: the reply has begun.
    """

    def __init__(
        self,
        wire: Wire,
        stream_id: int,
        headers: Sequence[Header],
        calls: Calls,
        window: int,
        client: tuple[str, int] | None,
    ) -> None:
        self.id = stream_id
        self.client = client
        self.headers = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in headers
        ]
        given = dict(self.headers)
        self.path = given.get(":path", "")
        kind = given.get("content-type", "")
        self.is_grpc = given.get(":method") == "POST" and kind.startswith("application/grpc")
        self.deadline = _deadline(given.get("grpc-timeout", ""))
        self.trailing: list[tuple[str, str]] = []
        self.send_window = window
        self.num_unsent = 0
        self.has_ended = False
        self.has_replied = False
        self.place = Place()
        self.task: asyncio.Task[None] | None = None
        self._wire = wire
        self._calls = calls
        self._received = bytearray()
        self._allowed = FIRST_WINDOW
        self._wake: asyncio.Future[None] | None = None

    def time_remaining(self) -> float | None:
        """Seconds until the deadline; None: there is none."""
        if self.deadline is None:
            return None
        return max(self.deadline - asyncio.get_running_loop().time(), 0.0)

    def receive(self, content: bytes, num_bytes: int) -> bool:
        """Takes a part of a message, which had more bytes with its padding.

        Returns:
            False if the client was not allowed to send it.
        """
        self._allowed -= num_bytes
        self._received += content
        self.wake()
        return self._allowed >= 0

    def end(self) -> None:
        """The client sends no more."""
        self.has_ended = True
        self.wake()

    def wake(self) -> None:
        """Something came from the client, or can be sent to it."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def wait(self) -> None:
        """Waits for that."""
        self._wake = asyncio.get_running_loop().create_future()
        self._wire.waits(more=True)
        try:
            await self._wake
        finally:
            self._wire.waits(more=False)
            self._wake = None

    async def read(self) -> bytes | None:
        """The next message; None after the last one.

        Raises:
            CallError: it is too large, compressed or cut off, or has not come in time.
        """
        message = self._next()
        if message is not None or self.has_ended:
            return message
        async with self._calls.awaited(self.place):
            while message is None and not self.has_ended:
                await self.wait()
                message = self._next()
            return message

    async def read_only(self) -> bytes:
        """The message of a call that has one.

        Raises:
            CallError: as `read`, and if there is none.
        """
        content = await self.read()
        if content is None:
            raise CallError(400, "the call has no message")
        return content

    def take(self) -> bytes | None:
        """The next message if it has come already; otherwise the client may send it.

        Raises:
            CallError: as `read`.
        """
        return self._next()

    async def until(self, work: asyncio.Future[Any]) -> None:
        """Waits until some work is done, or something comes from the client."""
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({work, self._wake}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._wake = None

    def _next(self) -> bytes | None:
        """The next message if all of it is there; otherwise the client may send the rest."""
        received, needed = self._received, _PREFIX_BYTES
        if len(received) >= _PREFIX_BYTES:
            if received[0]:
                raise CallError(501, "messages must not be compressed")
            size, limit = int.from_bytes(received[1:needed], "big"), self._calls.max_message_bytes
            if size > limit:
                raise CallError(
                    413,
                    f"the message has {size:,} bytes; this server accepts at most {limit:,} "
                    "(--max-body-bytes, and a little for what surrounds it)",
                )
            needed += size
        if len(received) >= needed:
            message = bytes(received[_PREFIX_BYTES:needed])
            del received[:needed]
            self._allow(FIRST_WINDOW // 2, FIRST_WINDOW)
            return message
        if self.has_ended and received:
            raise CallError(400, "the call ends within a message")
        missing = needed - len(received)
        self._allow(missing, max(missing, FIRST_WINDOW))
        return None

    def _allow(self, least: int, num_bytes: int) -> None:
        """Lets the client send so many bytes if it may send fewer than the least now."""
        if self._allowed < least and not self.has_ended:
            self._wire.allow(self.id, num_bytes - self._allowed)
            self._allowed = num_bytes

    async def write(self, message: bytes) -> None:
        """Sends a message of the reply.

        Raises:
            CallError: the client takes too little of it.
        """
        if not self.has_replied:
            self.has_replied = True
            self._wire.send_headers(self.id, _head(), ends=False)
        await self._wire.send(self, b"\x00" + len(message).to_bytes(4, "big") + message)

    def finish(self, code: int, sentence: str) -> None:
        """Ends the reply with its trailers, which carry the status."""
        found = [] if self.has_replied else _head()
        self.has_replied = True
        found.append((b"grpc-status", str(code).encode()))
        if sentence:
            encoded = quote(sentence[:_MAX_SENTENCE], safe=_PRINTABLE).encode()
            found.append((b"grpc-message", encoded))
        found += [(name.encode(), value.encode("latin-1")) for name, value in self.trailing]
        self._wire.send_headers(self.id, found, ends=True)


def has_whole_messages(content: bytes) -> bool:
    """Whether a frame has messages, and no part of another: streams may consist of small ones."""
    at = 0
    while at + _PREFIX_BYTES <= len(content):
        at += _PREFIX_BYTES + int.from_bytes(content[at + 1 : at + _PREFIX_BYTES], "big")
    return at == len(content) > 0


def _head() -> list[Header]:
    return [
        (b":status", b"200"),
        (b"content-type", b"application/grpc"),
        (b"grpc-accept-encoding", b"identity"),
    ]


def _deadline(timeout: str) -> float | None:
    """Of the header `grpc-timeout`; one that is none is no limit."""
    match = _TIMEOUT.fullmatch(timeout)
    if match is None:
        return None
    return asyncio.get_running_loop().time() + int(match[1]) * _UNITS[match[2]]
