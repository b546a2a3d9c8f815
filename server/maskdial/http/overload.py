"""Overload: notices that connections come faster than the event loop takes them."""

import asyncio
import os
import socket
import sys

# Fewer connections than this are no crowd, and are not looked at.
_MIN_CONNECTIONS = 256
# Those that the system has made and the event loop has not taken: about 0.1 s of its work.
_MAX_WAITING = 128
_LOOK_SECONDS = 0.05
_UNACKED = slice(24, 28)  # the bytes of ``tcpi_unacked`` in the kernel's ``struct tcp_info``


class Overload:
    """Says when the first requests of connections are to be refused unread. For one event loop.

    Connections that the loop does not take wait in the system's queue, which nobody sees, and when
    it is full, for the next attempt of the client's system, for up to a minute. A refusal here
    costs a fifth of one by an engine whose queue is full. Linux tells the length of its queue;
    elsewhere, nothing is refused.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._listeners: list[socket.socket] = []
        self._num_connections = 0
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, descriptor: int) -> None:
        """Looks at a listening socket, beside others, until `close`."""
        if sys.platform != "linux":
            return
        listener = socket.socket(fileno=os.dup(descriptor))
        if listener.family == socket.AF_UNIX:  # the system does not tell the length of its queue
            listener.close()
        else:
            self._listeners.append(listener)

    def close(self) -> None:
        """Stops watching the event loop."""
        for listener in self._listeners:
            listener.close()
        self._listeners = []

    def opened(self, loop: asyncio.AbstractEventLoop) -> None:
        """There is one more connection."""
        self._num_connections += 1
        if self._num_connections >= _MIN_CONNECTIONS and self._timer is None:
            self._look(loop)

    def closed(self) -> None:
        """There is one connection less."""
        self._num_connections -= 1
        if self._num_connections < _MIN_CONNECTIONS and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.is_on = False

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self.is_on = any(_num_waiting(each) > _MAX_WAITING for each in self._listeners)
        self._timer = loop.call_later(_LOOK_SECONDS, self._look, loop)


def _num_waiting(listener: socket.socket) -> int:
    """Connections that wait to be accepted: what the field means for a listening socket."""
    info = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED.stop)
    return int.from_bytes(info[_UNACKED], sys.byteorder)
