"""Calls: how many a server answers at once, and how long it waits for their messages."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping

from maskdial.http.lifecycle import Lifecycle, Phase

OK, DEADLINE_EXCEEDED, INTERNAL = 0, 4, 13
# gRPC's codes of HTTP's statuses; others are INTERNAL.
_CODES: Mapping[int, int] = {
    400: 3,
    401: 16,
    403: 7,
    404: 5,
    408: 4,
    413: 8,
    422: 3,
    429: 8,
    501: 12,
    503: 14,
    504: 4,
}
_SLOW_SECONDS = 1.0  # for so long, a call that waits for its client keeps its place


class CallError(Exception):
    """A call that cannot be answered: the status, as of HTTP, and the sentence of its reply."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = _CODES.get(status, INTERNAL)
        self.sentence = sentence


class Place:
    """The place of a call among all of a server.

    Attributes:
        timeout: of the message that it waits for; None: it waits for none.
        waiting_since: in the event loop's time.
        was_displaced: another call has its place.
    """

    __slots__ = ("timeout", "waiting_since", "was_displaced")

    def __init__(self) -> None:
        self.timeout: asyncio.Timeout | None = None
        self.waiting_since = 0.0
        self.was_displaced = False


class Calls:
    """The calls of a server.

    One beyond the limit takes the place of the one that has waited for its client for longest, so
    that nobody keeps others out with calls that send nothing. It is refused where all others are at
    work.

    Args:
        max_calls: at once.
        max_message_bytes: of a message.
        body_timeout: seconds until a message must have come.
        lifecycle: says until when messages are awaited.
    """

    def __init__(
        self, max_calls: int, max_message_bytes: int, body_timeout: float, lifecycle: Lifecycle
    ) -> None:
        self.max_message_bytes = max_message_bytes
        self._max_calls = max_calls
        self._body_timeout = body_timeout
        self._lifecycle = lifecycle
        self._places: set[Place] = set()
        self._waiting: dict[Place, None] = {}  # the first has waited for longest

    @contextlib.contextmanager
    def admitted(self, place: Place) -> Iterator[None]:
        """Counts a call while it is answered.

        Raises:
            CallError: there is no room for it.
        """
        if len(self._places) >= self._max_calls:
            self._make_room()
        self._places.add(place)
        try:
            yield
        finally:
            self._places.discard(place)

    @contextlib.asynccontextmanager
    async def awaited(self, place: Place) -> AsyncIterator[None]:
        """Bounds the wait for a message.

        Raises:
            CallError: it has not come in time.
        """
        now = asyncio.get_running_loop().time()
        deadline = min(now + self._body_timeout, self._lifecycle.body_deadline)
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                place.timeout, place.waiting_since = timeout, now
                self._waiting[place] = None
                self._lifecycle.bodies.add(timeout)
                try:
                    yield
                finally:
                    self._lifecycle.bodies.discard(timeout)
                    self._waiting.pop(place, None)
                    place.timeout = None
        except TimeoutError:
            raise self._late(place) from None

    def _make_room(self) -> None:
        longest = next(iter(self._waiting), None)
        now = asyncio.get_running_loop().time()
        if longest is None or now - longest.waiting_since < _SLOW_SECONDS:
            raise CallError(503, "too many calls; try again later")
        assert longest.timeout is not None, "it waits"
        longest.was_displaced = True
        longest.timeout.reschedule(now)
        del self._waiting[longest]
        self._places.discard(longest)

    def _late(self, place: Place) -> CallError:
        if place.was_displaced:
            return CallError(503, "another call needed the place of this one, which sent nothing")
        if self._lifecycle.phase is Phase.DRAINING:
            return CallError(503, "the server is shutting down; try another instance")
        return CallError(
            408, f"no message has arrived within {self._body_timeout:g} seconds (--body-timeout)"
        )
