"""Link: one end of the connection between a front end and the process with the engines.

Both ends are the same program on the same machine: one has started the other and has given it its
end of a pair of Unix sockets, which nobody else can reach. A frame is its length in four bytes, and
a tuple as `marshal` writes it: its kind, the number of the request, and what the kind needs.

==========  =========  ==================================================================
``REQUEST``  to owner   head, first part of the body, whether more of it follows
``BODY``     to owner   part of the body, whether more follows
``GONE``     to owner   the client has left
``PAUSE``    to owner   the client is slower than its reply
``RESUME``   to owner   it has caught up
``COUNTS``   to owner   open connections, and by reason those that a limit has ended
``NEED``     to front   the next part of the body is awaited
``START``    to front   status, headers
``PART``     to front   part of the reply's body, whether more follows
``BROKEN``   to front   there is no more of the reply
``RELOAD``   to front   the certificate may have changed
``STOP``     to front   no further connections; end when the open ones have their replies
==========  =========  ==================================================================
"""

import asyncio
import marshal
from collections.abc import Callable
from enum import IntEnum
from typing import Any

_LENGTH_BYTES = 4
_READ_BYTES = 262_144
_MAX_BUFFERED = 1_000_000  # bytes on their way, until senders wait


class Kind(IntEnum):
    """What a frame is; see the module."""

    REQUEST = 0
    BODY = 1
    GONE = 2
    PAUSE = 3
    RESUME = 4
    COUNTS = 5
    NEED = 6
    START = 7
    PART = 8
    BROKEN = 9
    RELOAD = 10
    STOP = 11


class Link(asyncio.BufferedProtocol):
    """One end.

    Args:
        take: is called with each frame: kind, number, and a tuple of the rest.
        lost: is called when the other end is gone.
    """

    def __init__(
        self, take: Callable[[int, int, tuple[Any, ...]], None], lost: Callable[[], None]
    ) -> None:
        self._take = take
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(_READ_BYTES)
        self._received = bytearray()
        self._pending: list[bytes] = []
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.set_write_buffer_limits(_MAX_BUFFERED)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._writable.set()
        self._lost()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        received = self._received
        received += memoryview(self._buffer)[:nbytes]
        start = 0
        while len(received) - start >= _LENGTH_BYTES:
            begin = start + _LENGTH_BYTES
            end = begin + int.from_bytes(received[start:begin], "big")
            if len(received) < end:
                break
            kind, number, *rest = marshal.loads(received[begin:end])
            start = end
            self._take(kind, number, tuple(rest))
        del received[:start]

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def send(self, kind: Kind, number: int, *rest: Any) -> None:
        """Sends a frame, with all others of this turn of the loop in one call of the system."""
        if self._transport is None:
            return
        content = marshal.dumps((int(kind), number, *rest))
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending += len(content).to_bytes(_LENGTH_BYTES, "big"), content

    async def drained(self) -> None:
        """Waits until the other end has taken most of what was sent."""
        if not self._writable.is_set():
            await self._writable.wait()

    def close(self) -> None:
        """Ends the link when what was sent is written."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending and self._transport is not None:
            self._transport.write(b"".join(pending))
