"""Connection: uvicorn's HTTP protocol with limits on what a client may hold, and for how long."""

import asyncio
import logging
from typing import Any, Literal, NoReturn

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from maskdial.config import UNIX_CLIENT
from maskdial.http.connections import Activity, Admission, Connections, Place
from maskdial.http.replies import encode_json
from maskdial.metrics import ConnectionEnd

# As HTTP/2 counts them (RFC 9113, 6.5.2), so that many short headers are not free.
_HEADER_OVERHEAD = 32
_MAX_PIPELINED = 16
_MAX_LENGTH_DIGITS = 19
_MIN_BYTES_PER_SECOND = 1024
# For how long what a refused client still sends is read, or it might not see the reply.
_LINGER_SECONDS = 1.0
# For how long a client that sends no more may still wait for the head of its reply. One that has
# left looks the same until something is written to it.
_HALF_CLOSED_SECONDS = 0.5
_JOINED_BYTES = 65536  # of a body that is copied behind its head
_MAX_BUFFERED = 65536  # of a reply, until its client counts as one that does not read

_log = logging.getLogger("maskdial.connections")


class _QuietLog(logging.LoggerAdapter[logging.Logger]):
    """Logs malformed input at DEBUG; a metric counts it."""

    @property
    def level(self) -> int:
        return self.logger.level

    def warning(self, msg: object, *args: object, **kwargs: Any) -> None:
        self.debug(msg, *args, **kwargs)


# Why, with which status, in which words, and the name of the error.
_Refusal = tuple[ConnectionEnd, int, str, str]
_MALFORMED: _Refusal = ("malformed", 400, "the request is not valid HTTP", "validation")
_BUSY: _Refusal = (
    "overload",
    503,
    "connections come faster than the server takes them; try again later",
    "unavailable",
)
_NO_UPGRADE = "the server takes no upgrades; send the body without the header Upgrade"
_BODY_HEADERS = (b"content-length", b"transfer-encoding")

_Awaited = Literal["headers", "body"] | None


class _Writer:
    """A transport, as far as one reply needs it, that may be closed.

    Between the end of a connection and the call that tells of it, uvloop's own raises an error on
    `write`; asyncio's does nothing, as here.

    uvicorn writes a reply's head apart from its body, and uvloop writes at once. Here the head
    waits for the body, which mostly follows in the same turn of the loop: one system call and one
    packet less. The head of a stream waits until the end of the turn.

    Args:
        transport: of the connection.
        loop: that runs it.
        has_body: whether something follows the head.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, *, has_body: bool
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._is_head = has_body
        self._held = b""

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if self._is_head:
            self._is_head = False
            self._held = data
            self._loop.call_soon(self._flush)
            return
        head, self._held = self._held, b""
        parts = [head + data] if len(data) <= _JOINED_BYTES else [head, data]
        for part in parts:
            if part and not self._transport.is_closing():
                self._transport.write(part)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._held:
            self.write(b"")


class Connection(HttpToolsProtocol):
    """One client's connection.

    Beside what uvicorn does: refuses connections beyond the limit (503), or closes those that wait
    for their clients to make room, bounds a request's headers (431) and the time for headers and
    bodies, drops trailers, and closes connections whose clients do not read. The guard answers slow
    bodies before they are closed here.

    Args:
        connections: shared by all.
        arguments: uvicorn's own.
    """

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.logger: Any = _QuietLog(self.logger)
        self._all = connections
        self._limits = connections.limits
        self._place = Place(self.abort)
        self._refused = False
        self._refusal: _Refusal = _MALFORMED
        self._fed_bytes = 0
        self._header_bytes = 0
        self._in_message = False
        self._headers_complete = False
        self._awaited: _Awaited = None
        self._receive_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._name_client()
        self._begin(self._all.enter(self._place, self.loop))

    def take_over(self, transport: asyncio.Transport, place: Place, received: bytes) -> None:
        """Follows a TLS handshake.

        Args:
            transport: encrypts.
            place: that the connection has since it was accepted.
            received: since the handshake.
        """
        # TLS would hold eight times as much before it says that a client does not read.
        transport.set_write_buffer_limits(_MAX_BUFFERED)
        self._place = place
        place.abort = self.abort
        super().connection_made(transport)
        self._name_client()
        self._begin(place.admission)
        if received:
            self.data_received(received)

    def connection_lost(self, exc: Exception | None) -> None:
        self._refused = True
        self._await(None)
        self._stop_write_timer()
        self._all.leave(self._place)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if not self._headers_complete:
            # The parser reports nothing of a header that does not end.
            self._fed_bytes += len(data)
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if self._in_message and self._headers_complete:
            self._await("body")
        elif not self._in_message and self._is_answering():
            self._await(None)
        elif self._fed_bytes > self._limits.max_header_bytes:
            self._refuse(*self._large_headers())
        else:
            self._await("headers")
        self._note_activity()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection for the reply to a request that is complete; TLS has no such state.

        The work for a client that has left is cancelled a moment later, or when a write fails.
        """
        if self._refused or self._in_message or not self._is_answering() or self.scheme == "https":
            return False
        self._is_half_closed = True
        self.loop.call_later(_HALF_CLOSED_SECONDS, self._give_up_half_closed)
        return True

    def _give_up_half_closed(self) -> None:
        if not (
            self.transport.is_closing() or (self._is_answering() and self.cycle.response_started)
        ):
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True
        self._header_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + _HEADER_OVERHEAD)
        if not self._headers_complete:  # otherwise it is a trailer, which must not become a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._headers_complete = True
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._fail(("malformed", 400, "too many pipelined requests", "validation"))
        if self._is_ambiguous():
            self._fail(_MALFORMED)
        if self._all.overload.is_on and self._is_first_post():
            self._fail(_BUSY)
        upgrades = self.parser.should_upgrade()
        # The parser takes what follows for another protocol, also a body.
        if upgrades and any(name in _BODY_HEADERS for name, _ in self.headers):
            self._fail(("malformed", 400, _NO_UPGRADE, "validation"))
        super().on_headers_complete()
        has_body = self.cycle.scope["method"] != "HEAD"
        writer = _Writer(self.transport, self.loop, has_body=has_body)
        self.cycle.transport = writer  # type: ignore[assignment]
        if upgrades:
            self.cycle.keep_alive = False
            self._refused = True

    def on_message_complete(self) -> None:
        self._in_message = False
        self._headers_complete = False
        self._fed_bytes = 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._all.begin_unread(self._place, self.loop.time())
        self._note_activity()
        self._start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._all.end_unread(self._place)
        self._note_activity()
        if not self.transport.is_closing():
            self._stop_write_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_activity()
        if self.transport.is_closing() or (self._is_half_closed and not self._is_answering()):
            self._end()

    def timeout_keep_alive_handler(self) -> None:
        self._end()

    def send_400_response(self, msg: str) -> None:
        self._refuse(*self._refusal)

    def abort(self, why: ConnectionEnd) -> None:
        """Closes the connection at once; what was not sent is dropped."""
        self._refused = True
        self._all.ended(why)
        self.transport.abort()

    def _count_header(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > self._limits.max_header_bytes:
            self._fail(self._large_headers())

    def _fail(self, refusal: _Refusal) -> NoReturn:
        """Ends the parser's work from one of its callbacks; `send_400_response` follows."""
        self._refusal = refusal
        raise ValueError(refusal)

    def _is_ambiguous(self) -> bool:
        """Whether a proxy could read the headers in another way (RFC 9112, 3.2 and 6.1), although
        the parser accepts them.
        """
        num_hosts, codings = 0, []
        for name, value in self.headers:
            if name == b"host":
                num_hosts += 1
            elif name == b"transfer-encoding":
                codings.append(value.strip().lower())
            elif name == b"content-length" and len(value) > _MAX_LENGTH_DIGITS:
                return True  # leading zeros, as the parser takes no such number
        if self.parser.get_http_version() == "1.0":
            return num_hosts > 1 or bool(codings)
        return num_hosts != 1 or codings not in ([], [b"chunked"])

    def _is_first_post(self) -> bool:
        """Connections that were taken before keep their place, and health checks are cheap."""
        return self.cycle is None and self.parser.get_method() == b"POST"

    def _name_client(self) -> None:
        """Clients of a Unix socket have no address, but one that may be believed as a proxy."""
        if self.client is None and self.server is not None and self.server[1] is None:
            self.client = (UNIX_CLIENT, 0)

    def _begin(self, admission: Admission | None) -> None:
        self._place.num_unsent = self._num_unsent
        if admission == "admitted":
            self._await("headers")
        elif admission == "refused":
            self._refuse("limit", 503, "too many connections; try again later", "unavailable")
        else:
            self.abort("limit")

    def _num_unsent(self) -> int:
        return self.transport.get_write_buffer_size()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _note_activity(self) -> None:
        """Tells what the connection waits for: it may have to make room for another."""
        activity: Activity = "busy"
        if not self._is_answering():
            activity = "idle"
        elif self._awaited == "body" or self.flow.write_paused:
            activity = "slow"
        self._all.note(self._place, activity, self.loop.time())

    def _end(self) -> None:
        """Closes the connection when its client has taken what is still unsent, for which it has
        as long as within a reply.
        """
        self.transport.close()
        if self._num_unsent() and self._write_timer is None:
            self._start_write_timer()

    def _await(self, what: _Awaited) -> None:
        """Starts, keeps or stops the timer of what the client has to send next."""
        if what == self._awaited:
            return
        self._awaited = what
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None
        if what is not None:
            seconds = (
                self._limits.header_timeout if what == "headers" else self._limits.body_timeout
            )
            self._receive_timer = self.loop.call_later(seconds, self._received_too_little)

    def _received_too_little(self) -> None:
        awaited, self._awaited, self._receive_timer = self._awaited, None, None
        if not self._is_answering():
            self._all.ended("headers" if awaited == "headers" else "body")
            if self._num_unsent():
                self._end()
            else:
                self.transport.abort()  # under TLS, the end would wait for the client once more
        elif awaited == "headers":
            self.cycle.keep_alive = False  # of the request before, which is still being answered

    def _start_write_timer(self) -> None:
        self._write_timer = self.loop.call_later(
            self._limits.write_timeout, self._check_progress, self._num_unsent()
        )

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _check_progress(self, num_unsent: int) -> None:
        taken = num_unsent - self._num_unsent()
        if taken >= self._limits.write_timeout * _MIN_BYTES_PER_SECOND:
            self._start_write_timer()
            return
        _log.info("a client took %d bytes of its reply in time; closing its connection", taken)
        self.abort("write")

    def _large_headers(self) -> _Refusal:
        limit = self._limits.max_header_bytes
        message = f"the headers have more than {limit:,} bytes (--max-header-bytes)"
        return "header_bytes", 431, message, "too_large"

    def _refuse(self, why: ConnectionEnd, status: int, message: str, error_type: str) -> None:
        """Replies, if nothing else is being answered, and closes the connection."""
        self._all.ended(why)
        self._refused = True
        self._await(None)
        self._all.note(self._place, "idle", self.loop.time())
        if self._is_answering():
            if not self._headers_complete or self.cycle.response_started or self.pipeline:
                self._end()  # or the error would end up within another reply
                return
            # The request is the one at fault: a reader of its body learns that it ends.
            self.cycle.waiting_for_100_continue = False
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = encode_json({"error": message, "error_type": error_type})
        head = STATUS_LINE[status] + (
            b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body)
        )
        retry = b"retry-after: 1\r\n" if status == 503 else b""
        self.transport.write(head + retry + b"connection: close\r\n\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.abort)
