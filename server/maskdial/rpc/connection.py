"""Connection: HTTP/2 for gRPC, with the limits of HTTP's connections."""

import asyncio
import logging
from typing import Any, Literal, cast

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    PushPromiseFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from maskdial.http.connections import Activity, Connections, Place
from maskdial.metrics import ConnectionEnd
from maskdial.rpc.calls import Calls
from maskdial.rpc.frames import Code, FrameReader, ProtocolError
from maskdial.rpc.streams import MAX_STREAMS, Service, Streams

MAX_HEADER_BYTES = 16_384
"""Of a call's metadata: Python takes 0.6 ms for a KiB of coded strings."""

_MAX_BUFFERED = 65_536  # of replies, until the client counts as one that does not read

_log = logging.getLogger("maskdial.connections")

_Awaited = Literal["headers", "call"] | None


class Connection(asyncio.Protocol):
    """One client's connection.

    Args:
        connections: all of the server, HTTP's among them.
        calls: all calls of the server.
        service: answers them.
        keep_alive: seconds until a connection without calls is closed.
        siblings: the connections of this port.
    """

    def __init__(
        self,
        connections: Connections,
        calls: Calls,
        service: Service,
        keep_alive: float,
        siblings: set[Any],
    ) -> None:
        self.client: tuple[str, int] | None = None
        self.is_paused = False
        self.has_ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection is closed."""
        self._all = connections
        self._limits = connections.limits
        self._keep_alive = keep_alive
        self._siblings = siblings
        self._loop = asyncio.get_running_loop()
        self._place = Place(self.abort)
        self._reader = FrameReader()
        self._max_header_bytes = min(MAX_HEADER_BYTES, self._limits.max_header_bytes)
        self._decoder = Decoder(self._max_header_bytes)
        self._streams = Streams(self, calls, service, self._limits.write_timeout)
        self._transport: asyncio.Transport
        self._block: tuple[HeadersFrame, bytearray] | None = None  # headers that go on
        self._has_settings = False
        self._is_closed = False
        self._num_unread = 0
        self._awaited: _Awaited = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_overloaded(self) -> bool:
        """Whether connections come faster than they are taken."""
        return self._all.overload.is_on

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._all.enter(self._place, self._loop)
        self._begin(transport)

    def take_over(self, transport: asyncio.Transport, place: Place, received: bytes) -> None:
        """Follows a TLS handshake; see `maskdial.http.connection.Connection`."""
        self._place = place
        place.abort = self.abort
        self._begin(transport)
        if received:
            self.data_received(received)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closed = True
        self._stop_timer()
        self.has_ended.set_result(None)
        self._siblings.discard(self)
        self._streams.close()
        self._all.leave(self._place)

    def data_received(self, data: bytes) -> None:
        if self._is_closed:
            return
        try:
            for each in self._reader.feed(data):
                self._take(each)
                if self._is_closed:
                    return
        except ProtocolError as error:
            self._fail("malformed", error.code, error)
        except OversizedHeaderListError as error:
            self._fail("header_bytes", Code.ENHANCE_YOUR_CALM, error)
        except HPACKError as error:  # the client's table of headers is no longer known
            self._fail("malformed", Code.COMPRESSION_ERROR, error)

    def pause_writing(self) -> None:
        self.is_paused = True
        self.begin_unread()

    def resume_writing(self) -> None:
        self.is_paused = False
        self.end_unread()
        self._streams.wake()

    def abort(self, why: ConnectionEnd) -> None:
        """Closes the connection at once; what was not sent is dropped."""
        self._all.ended(why)
        self.shutdown()

    def shutdown(self) -> None:
        """Closes the connection at once, with the server."""
        self._is_closed = True
        self._transport.abort()

    def leave(self) -> None:
        """Takes no more calls, and closes the connection when those that there are have ended."""
        if not self._is_closed and not self._streams.is_leaving:
            self._streams.is_leaving = True
            self.write(self._goaway(Code.NO_ERROR))
            self.note()

    def write(self, content: bytes) -> None:
        """Hands frames to the transport of the connection."""
        if not self._transport.is_closing():
            self._transport.write(content)

    def note(self) -> None:
        """Tells what the connection waits for: it may have to make room for another."""
        if self._is_closed:
            return
        if not len(self._streams):
            if self._streams.is_leaving:
                self._close()
                return
            self._all.note(self._place, "idle", self._loop.time())
            self._await("call" if self._has_settings and self._block is None else "headers")
            return
        activity: Activity = "slow" if self._streams.all_wait else "busy"
        self._all.note(self._place, activity, self._loop.time())
        self._await(None if self._block is None else "headers")

    def begin_unread(self) -> None:
        """A reply waits for its client."""
        self._num_unread += 1
        if self._num_unread == 1:
            self._all.begin_unread(self._place, self._loop.time())

    def end_unread(self) -> None:
        """It does so no longer."""
        self._num_unread -= 1
        if not self._num_unread:
            self._all.end_unread(self._place)

    def give_up(self) -> None:
        """Closes the connection, whose client takes nothing."""
        _log.info("a client took too little of its replies in time; closing its connection")
        self.abort("write")

    def _begin(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is of no class of asyncio's
        self._transport = transport
        transport.set_write_buffer_limits(_MAX_BUFFERED)
        name = transport.get_extra_info("peername")
        self.client = (str(name[0]), int(name[1])) if name else None
        self._siblings.add(self)
        self._place.num_unsent = self._num_unsent
        if self._place.admission != "admitted":
            self.abort("limit")
            return
        limits = {
            SettingsFrame.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
            SettingsFrame.MAX_HEADER_LIST_SIZE: self._max_header_bytes,
        }
        self.write(SettingsFrame(0, settings=limits).serialize())
        self.note()

    def _take(self, given: Frame) -> None:
        """Takes a frame.

        Raises:
            ProtocolError: it, or what it says, must not be.
            HPACKError: headers are none, or too large.
        """
        if not self._has_settings and not isinstance(given, SettingsFrame):
            raise ProtocolError(Code.PROTOCOL_ERROR, "the first frame has no settings")
        if self._block is not None:
            self._continue_headers(*self._block, given)
        elif isinstance(given, DataFrame):
            size, ends = given.flow_controlled_length, "END_STREAM" in given.flags
            self._streams.take_data(given.stream_id, given.data, size, ends=ends)
        elif isinstance(given, HeadersFrame):
            complete = "END_HEADERS" in given.flags
            self._take_headers(given, bytearray(given.data), complete=complete)
        else:
            self._streams.count_idle()
            self._take_other(given)

    def _take_other(self, given: Frame) -> None:
        if isinstance(given, WindowUpdateFrame):
            self._streams.widen(given.stream_id, given.window_increment)
        elif isinstance(given, RstStreamFrame):
            self._streams.reset(given.stream_id)
        elif isinstance(given, SettingsFrame):
            self._take_settings(given)
        elif isinstance(given, PingFrame):
            if "ACK" not in given.flags:
                self.write(PingFrame(0, given.opaque_data, flags=["ACK"]).serialize())
        elif isinstance(given, PushPromiseFrame | ContinuationFrame):
            raise ProtocolError(Code.PROTOCOL_ERROR, "a client sends no such frame here")
        # Others say nothing that matters here: PRIORITY, GOAWAY, and what is yet to be invented.

    def _take_settings(self, given: SettingsFrame) -> None:
        window = given.settings.get(SettingsFrame.INITIAL_WINDOW_SIZE)
        if window is not None:
            self._streams.set_first_window(window)
        if "ACK" not in given.flags:
            self.write(SettingsFrame(0, flags=["ACK"]).serialize())
        if not self._has_settings:
            self._has_settings = True
            self.note()

    def _continue_headers(self, first: HeadersFrame, block: bytearray, given: Frame) -> None:
        if not isinstance(given, ContinuationFrame) or given.stream_id != first.stream_id:
            raise ProtocolError(Code.PROTOCOL_ERROR, "headers are interrupted")
        self._streams.count_idle()
        block += given.data
        self._block = None
        self._take_headers(first, block, complete="END_HEADERS" in given.flags)

    def _take_headers(self, first: HeadersFrame, block: bytearray, *, complete: bool) -> None:
        if len(block) > self._max_header_bytes:
            raise OversizedHeaderListError("headers are too large")
        if complete:
            headers = [
                (bytes(name), bytes(value))
                for name, value in self._decoder.decode(bytes(block), raw=True)
            ]
            ends = "END_STREAM" in first.flags
            self._streams.take_headers(first.stream_id, headers, ends=ends)
        else:
            self._block = (first, block)
        self.note()

    def _num_unsent(self) -> int:
        return self._transport.get_write_buffer_size() + self._streams.num_unsent()

    def _goaway(self, code: Code) -> bytes:
        return GoAwayFrame(0, self._streams.last_id, code).serialize()

    def _fail(self, why: ConnectionEnd, code: Code, error: Exception) -> None:
        """Ends the connection of a client that breaks the rules."""
        _log.debug("a gRPC connection ends: %s", error)
        self._all.ended(why)
        self.write(self._goaway(code))
        self._streams.close()
        self._close()

    def _close(self) -> None:
        """Closes the connection when the client has taken what is unsent, which has its time."""
        self._is_closed = True
        self._transport.close()
        self._stop_timer()
        self._timer = self._loop.call_later(self._limits.write_timeout, self._transport.abort)

    def _await(self, what: _Awaited) -> None:
        """Starts, keeps or stops the timer of what the client has to send next."""
        if what == self._awaited:
            return
        self._awaited = what
        self._stop_timer()
        if what is not None:
            seconds = self._limits.header_timeout if what == "headers" else self._keep_alive
            self._timer = self._loop.call_later(seconds, self._received_too_little)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _received_too_little(self) -> None:
        if self._awaited == "headers":
            self.abort("headers")
        else:
            self.leave()
