"""Streams: the calls of one connection, and what each side may send of them."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from hyperframe.frame import DataFrame, RstStreamFrame, WindowUpdateFrame

from maskdial.rpc.call import Call, has_whole_messages
from maskdial.rpc.calls import DEADLINE_EXCEEDED, INTERNAL, OK, CallError, Calls
from maskdial.rpc.frames import (
    FIRST_WINDOW,
    MAX_FRAME_BYTES,
    MAX_WINDOW,
    Code,
    Header,
    ProtocolError,
    headers_frames,
)

MAX_STREAMS = 100
"""Calls that a connection may have at once."""

_MIN_BYTES_PER_SECOND = 1024
# Frames that move no message: as many at once, and more each second and with each frame of a
# message. What a client needs to cancel calls, to measure the line and to take replies is less.
_MAX_IDLE_FRAMES = 400.0
_IDLE_FRAMES_PER_SECOND = 100.0
_IDLE_FRAMES_PER_MESSAGE = 4.0
_SMALL_BYTES = 256  # of a frame that does not count as a part of a message, unless it is whole

_log = logging.getLogger("maskdial.connections")


class Service(Protocol):
    """Finds a call's method and answers it."""

    async def check(self, call: Call) -> None:
        """Whether a call has the key that it needs, before anything of it is taken."""

    async def answer(self, call: Call) -> None:
        """Answers a call: its messages, or the status of an error."""


class Line(Protocol):
    """What calls ask of their connection."""

    client: tuple[str, int] | None
    is_paused: bool
    """Whether the client takes nothing of any reply."""

    @property
    def is_overloaded(self) -> bool:
        """Whether first calls are to be refused."""

    def write(self, content: bytes) -> None:
        """Hands frames to the transport of the connection."""

    def note(self) -> None:
        """The number of calls has changed, or what they wait for."""

    def begin_unread(self) -> None:
        """A reply waits for its client."""

    def end_unread(self) -> None:
        """It does so no longer."""

    def give_up(self) -> None:
        """Closes the connection, whose client takes nothing."""


class Streams:
    """The calls of one connection.

    Args:
        line: the connection.
        calls: all calls of the server.
        service: answers them.
        write_timeout: seconds within which a client must take 1 KiB for each of them.
    """

    def __init__(self, line: Line, calls: Calls, service: Service, write_timeout: float) -> None:
        self._line = line
        self._calls = calls
        self._service = service
        self._write_timeout = write_timeout
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, Call] = {}
        self._num_waiting = 0
        self._last_id = 0
        self._first_window = FIRST_WINDOW  # of a reply
        self._window = FIRST_WINDOW  # of all replies
        self._num_received = 0  # bytes of messages since the client was allowed more
        self._idle_frames = _MAX_IDLE_FRAMES
        self._counted_at = self._loop.time()
        self.is_leaving = False
        """Whether new calls are refused."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def all_wait(self) -> bool:
        """Whether each call waits for the client."""
        return self._num_waiting >= len(self._open)

    @property
    def last_id(self) -> int:
        """The newest stream of the client."""
        return self._last_id

    def num_unsent(self) -> int:
        """Bytes of replies that the client does not take yet."""
        return sum(call.num_unsent for call in self._open.values())

    def count_idle(self) -> None:
        """Counts a frame that moves no message.

        Raises:
            ProtocolError: there were too many.
        """
        now = self._loop.time()
        more = (now - self._counted_at) * _IDLE_FRAMES_PER_SECOND
        self._counted_at = now
        self._idle_frames = min(self._idle_frames + more, _MAX_IDLE_FRAMES) - 1
        if self._idle_frames < 0:
            raise ProtocolError(Code.ENHANCE_YOUR_CALM, "too many frames move no message")

    def take_headers(self, stream_id: int, headers: Sequence[Header], *, ends: bool) -> None:
        """Begins a call, or ends what its client sends."""
        call = self._open.get(stream_id)
        if call is not None:
            if call.has_ended or not ends:
                raise ProtocolError(Code.PROTOCOL_ERROR, "headers come within a call")
            call.end()
        elif stream_id % 2 == 0:
            raise ProtocolError(Code.PROTOCOL_ERROR, "a client's streams have odd numbers")
        elif stream_id > self._last_id:
            self._last_id = stream_id
            self._begin(stream_id, headers, ends=ends)

    def take_data(self, stream_id: int, content: bytes, num_bytes: int, *, ends: bool) -> None:
        """Takes a part of a message, which had more bytes with its padding."""
        self._check_known(stream_id)
        self._num_received += num_bytes
        if self._num_received > FIRST_WINDOW:
            raise ProtocolError(Code.FLOW_CONTROL_ERROR, "more was sent than is allowed")
        if self._num_received > FIRST_WINDOW // 2:  # what is held at most, each call says
            self._line.write(WindowUpdateFrame(0, self._num_received).serialize())
            self._num_received = 0
        if num_bytes < _SMALL_BYTES and not ends and not has_whole_messages(content):
            self.count_idle()
        call = self._open.get(stream_id)
        if call is None:  # it was answered, which its client did not know
            return
        if call.has_ended:
            raise ProtocolError(Code.STREAM_CLOSED, "a call goes on after its end")
        if not call.receive(content, num_bytes):
            raise ProtocolError(Code.FLOW_CONTROL_ERROR, "more was sent than is allowed")
        if ends:
            call.end()

    def reset(self, stream_id: int) -> None:
        """The client wants no reply."""
        self._check_known(stream_id)
        call = self._open.pop(stream_id, None)
        if call is not None:
            self._cancel(call)
            self._line.note()

    def widen(self, stream_id: int, num_bytes: int) -> None:
        """The client takes more of one reply, or, as stream 0, of all."""
        if stream_id == 0:
            self._window += num_bytes
            _check_window(self._window)
            self.wake()
            return
        self._check_known(stream_id)
        call = self._open.get(stream_id)
        if call is not None:
            call.send_window += num_bytes
            _check_window(call.send_window)
            call.wake()

    def set_first_window(self, num_bytes: int) -> None:
        """What the client takes of each reply at first, also of those that have begun."""
        _check_window(num_bytes)
        for call in self._open.values():
            call.send_window += num_bytes - self._first_window
            _check_window(call.send_window)
        self._first_window = num_bytes
        self.wake()

    def wake(self) -> None:
        """Something may be sent again."""
        for call in self._open.values():
            call.wake()

    def close(self) -> None:
        """The client has left: nobody is to be answered."""
        calls, self._open = self._open, {}
        for call in calls.values():
            self._cancel(call)

    def allow(self, stream_id: int, num_bytes: int) -> None:
        """Lets the client send more of a call."""
        if stream_id in self._open:
            self._line.write(WindowUpdateFrame(stream_id, num_bytes).serialize())

    def send_headers(self, stream_id: int, headers: Sequence[Header], *, ends: bool) -> None:
        """Sends the head of a reply, or its end."""
        self._line.write(headers_frames(stream_id, headers, ends=ends))

    async def send(self, call: Call, content: bytes) -> None:
        """Sends a part of a reply, as fast as the client takes it.

        Raises:
            CallError: it takes too little.
        """
        rest = memoryview(content)
        deadline, num_then = 0.0, -1
        while rest:
            room = min(len(rest), call.send_window, self._window, MAX_FRAME_BYTES)
            if room > 0 and not self._line.is_paused:
                call.send_window -= room
                self._window -= room
                self._idle_frames += _IDLE_FRAMES_PER_MESSAGE
                self._line.write(DataFrame(call.id, bytes(rest[:room])).serialize())
                rest = rest[room:]
                continue
            if num_then < 0:
                deadline, num_then = self._loop.time() + self._write_timeout, len(rest)
            if not await self._is_taken(call, len(rest), deadline):
                if num_then - len(rest) < self._write_timeout * _MIN_BYTES_PER_SECOND:
                    raise self._give_up(call)
                num_then = -1

    async def _is_taken(self, call: Call, num_unsent: int, deadline: float) -> bool:
        """Waits for a client that takes nothing; False: until the deadline."""
        call.num_unsent = num_unsent
        self._line.begin_unread()
        try:
            async with asyncio.timeout_at(deadline):
                await call.wait()
        except TimeoutError:
            return False
        finally:
            call.num_unsent = 0
            self._line.end_unread()
        return True

    def _give_up(self, call: Call) -> CallError:
        """Ends a call whose client does not read."""
        if self._line.is_paused:
            self._line.give_up()
        elif self._open.pop(call.id, None) is not None:
            self._line.write(RstStreamFrame(call.id, Code.CANCEL).serialize())
            self._line.note()
        return CallError(408, "the client takes too little of the reply")

    def waits(self, *, more: bool) -> None:
        """Counts a call that waits for its client, or does so no longer."""
        self._num_waiting += 1 if more else -1
        self._line.note()

    def _begin(self, stream_id: int, headers: Sequence[Header], *, ends: bool) -> None:
        call = Call(self, stream_id, headers, self._calls, self._first_window, self._line.client)
        if self.is_leaving or len(self._open) >= MAX_STREAMS:
            self.count_idle()
            self._line.write(RstStreamFrame(stream_id, Code.REFUSED_STREAM).serialize())
        elif not call.is_grpc:
            self.count_idle()
            self.send_headers(stream_id, [(b":status", b"415")], ends=True)
        else:
            call.has_ended = ends
            self._open[stream_id] = call
            call.task = self._loop.create_task(self._serve(call))

    async def _serve(self, call: Call) -> None:
        code, sentence = OK, ""
        try:
            if call.id == 1 and self._line.is_overloaded:
                raise CallError(503, "connections come faster than the server takes them")
            async with asyncio.timeout_at(call.deadline):
                await self._service.check(call)
                with self._calls.admitted(call.place):
                    await self._service.answer(call)
        except CallError as error:
            code, sentence = error.code, error.sentence
        except TimeoutError:
            code, sentence = DEADLINE_EXCEEDED, "the deadline of the call is over"
        except Exception:
            _log.exception("a call failed")
            code, sentence = INTERNAL, "internal error; see the log of the server"
        if self._open.pop(call.id, None) is None:
            return  # the client has left
        call.finish(code, sentence)
        if not call.has_ended:
            self._line.write(RstStreamFrame(call.id, Code.NO_ERROR).serialize())
        self._idle_frames += _IDLE_FRAMES_PER_MESSAGE
        self._line.note()

    def _cancel(self, call: Call) -> None:
        if call.task is not None:
            call.task.cancel()

    def _check_known(self, stream_id: int) -> None:
        if not 0 < stream_id <= self._last_id:
            raise ProtocolError(Code.PROTOCOL_ERROR, "there was no such stream yet")


def _check_window(num_bytes: int) -> None:
    if num_bytes > MAX_WINDOW:
        raise ProtocolError(Code.FLOW_CONTROL_ERROR, "a window is too large")
