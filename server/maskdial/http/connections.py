"""Connections: what all connections of a server share, and which of them make room for others."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from maskdial.http.overload import Overload
from maskdial.metrics import ConnectionEnd, Metrics

# Connections beyond the limit that are told so before they are closed; others just are.
_MAX_REFUSED = 64
# Clients that send a body, or take a reply, keep their place for so long.
_SLOW_SECONDS = 1.0
_LINE_SECONDS = 10.0  # between two lines of the log about the limit

_log = logging.getLogger("maskdial.connections")

Admission = Literal["admitted", "refused", "closed"]
Activity = Literal["busy", "idle", "slow"]
"""What a connection waits for: the server, its client's next request, or a body or reply of it."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What connections may hold: counts, bytes, and seconds."""

    max_connections: int
    max_header_bytes: int
    max_unsent_bytes: int
    header_timeout: float
    body_timeout: float
    write_timeout: float


class Place:
    """The place of one connection among all of a server, from accept on, TLS handshake included.

    Attributes:
        abort: closes the connection at once, for this reason.
        num_unsent: bytes of replies that wait for the client.
    """

    __slots__ = ("abort", "activity", "admission", "num_unsent", "waiting_since")

    def __init__(self, abort: Callable[[ConnectionEnd], None]) -> None:
        self.abort = abort
        self.num_unsent: Callable[[], int] = _no_bytes
        self.admission: Admission | None = None
        self.activity: Activity = "busy"
        self.waiting_since = 0.0

    def forget(self) -> None:
        """Lets go of the connection, which need not wait for the garbage collector then."""
        self.abort = _nothing
        self.num_unsent = _no_bytes


class Connections:
    """The connections of a server: their limits, their number, and those that wait for a client.

    A connection beyond the limit takes the place of the one that has waited for its client for
    longest, so that nobody keeps others out with connections that do nothing. It is refused where
    all others are at work.
    """

    def __init__(self, limits: ConnectionLimits, metrics: Metrics) -> None:
        self.limits = limits
        self.overload = Overload()
        self._gauge = metrics.connections
        self._ended = metrics.connections_ended
        self._num_admitted = 0
        self._num_refused = 0
        # Those that wait for a client, each the first that has waited for longest.
        self._queues: dict[Activity, OrderedDict[Place, None]] = {
            "idle": OrderedDict(),
            "slow": OrderedDict(),
        }
        self._unread: dict[Place, float] = {}
        self._num_beyond = 0
        self._next_line = 0.0

    def ended(self, why: ConnectionEnd) -> None:
        """Counts a connection that a limit has ended."""
        self._ended.labels(why).inc()

    def enter(self, place: Place, loop: asyncio.AbstractEventLoop) -> Admission:
        """Counts a connection that was accepted, until it leaves.

        Returns:
            "refused" if the client is to be told so, "closed" if there are too many even for that.
        """
        now = loop.time()
        self._gauge.inc()
        self.overload.opened(loop)
        place.admission = "admitted"
        if self._num_admitted >= self.limits.max_connections:
            self._tell_of_limit(now)
            longest = self._longest_waiting(now)
            if longest is not None:
                longest.abort("displaced")
                self.leave(longest)
            else:
                place.admission = "refused" if self._num_refused < _MAX_REFUSED else "closed"
        if place.admission == "admitted":
            self._num_admitted += 1
            self.note(place, "idle", now)
        elif place.admission == "refused":
            self._num_refused += 1
        return place.admission

    def leave(self, place: Place) -> None:
        """The connection has ended, or is about to."""
        if place.admission is None:
            return
        if place.activity != "busy":
            del self._queues[place.activity][place]
            place.activity = "busy"
        self._unread.pop(place, None)
        self._num_admitted -= place.admission == "admitted"
        self._num_refused -= place.admission == "refused"
        place.admission = None
        place.forget()
        self._gauge.dec()
        self.overload.closed()

    def note(self, place: Place, activity: Activity, now: float) -> None:
        """What an admitted connection waits for from now on; time counts from the first call."""
        if place.activity == activity or place.admission != "admitted":
            return
        if place.activity != "busy":
            del self._queues[place.activity][place]
        place.activity = activity
        place.waiting_since = now
        if activity != "busy":
            self._queues[activity][place] = None

    def begin_unread(self, place: Place, now: float) -> None:
        """A client is slower than its reply.

        What all replies hold is bounded: those are ended that held most for longest.
        """
        self._unread[place] = now
        while len(self._unread) > 1:
            sizes = {each: each.num_unsent() for each in self._unread}
            if sum(sizes.values()) <= self.limits.max_unsent_bytes:
                break
            worst = max(sizes, key=lambda each: sizes[each] * (now - self._unread[each]))
            del self._unread[worst]
            worst.abort("unsent")

    def end_unread(self, place: Place) -> None:
        """The client has caught up."""
        self._unread.pop(place, None)

    def _longest_waiting(self, now: float) -> Place | None:
        """The connection that makes room; None if none does."""
        firsts = [next(iter(queue)) for queue in self._queues.values() if queue]
        candidates = [
            place
            for place in firsts
            if place.activity == "idle" or now - place.waiting_since >= _SLOW_SECONDS
        ]
        return min(candidates, key=lambda place: place.waiting_since, default=None)

    def _tell_of_limit(self, now: float) -> None:
        self._num_beyond += 1
        if now < self._next_line:
            return
        _log.warning(
            "%d connections are open (--max-connections): those that waited for their clients for "
            "longest make room for others, or the others are refused (%d since the last line)",
            self.limits.max_connections,
            self._num_beyond,
        )
        self._num_beyond = 0
        self._next_line = now + _LINE_SECONDS


def _nothing(why: ConnectionEnd) -> None:
    pass


def _no_bytes() -> int:
    return 0
