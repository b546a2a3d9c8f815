"""Lifecycle: loading, serving, draining; and the requests in progress."""

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator
from enum import Enum

from maskdial.errors import UnavailableError

_LAST_BODIES_SECONDS = 1.0


class Phase(Enum):
    """Where the server is in its life."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


class Lifecycle:
    """The server's phase and its number of unanswered requests. Used on the event loop only."""

    def __init__(self) -> None:
        self.phase = Phase.LOADING
        self.num_requests = 0
        """Requests that are not answered yet."""
        self.body_deadline = math.inf
        """When bodies that have not arrived are given up, in the event loop's time."""
        self.bodies: set[asyncio.Timeout] = set()
        """The timeouts of those that are being received; a shutdown shortens them."""
        self._num_pages = 0
        self._idle_since = 0.0
        self._idle = asyncio.Event()
        self._idle.set()

    def serve(self) -> None:
        """The models are loaded: take requests, unless draining has begun."""
        if self.phase is Phase.LOADING:
            self.phase = Phase.SERVING

    async def drain(self, grace_seconds: float) -> int:
        """Takes no new requests, and waits until the running ones are answered or time is up.

        Requests whose bodies have not arrived after a second are given up: nothing runs for them,
        and their senders may be slow for as long as the grace period lasts.

        Returns:
            How many are still running, downloads and pages left out.
        """
        self.phase = Phase.DRAINING
        self.body_deadline = min(
            self.body_deadline, asyncio.get_running_loop().time() + _LAST_BODIES_SECONDS
        )
        for timeout in self.bodies:
            timeout.reschedule(min(timeout.when() or math.inf, self.body_deadline))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_seconds)
        return self.num_requests

    def check_accepting(self) -> None:
        """Raises UnavailableError unless the server takes requests."""
        if self.phase is Phase.LOADING:
            raise UnavailableError("the server is still loading its models; try again soon")
        if self.phase is Phase.DRAINING:
            raise UnavailableError("the server is shutting down; try another instance")

    def begin_request(self) -> None:
        """One more request to answer."""
        self.num_requests += 1
        self._idle.clear()

    def end_request(self) -> None:
        """A request was answered, or its client left."""
        self.num_requests -= 1
        if self.num_requests == 0:
            self._idle_since = time.monotonic()
        self._note_end()

    @contextlib.contextmanager
    def replying(self) -> Iterator[None]:
        """A reply for which no model is asked, such as a download: the drain waits for it as well,
        but the server is no less idle.
        """
        self._num_pages += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_pages -= 1
            self._note_end()

    def _note_end(self) -> None:
        if not (self.num_requests or self._num_pages):
            self._idle.set()

    @property
    def idle_seconds(self) -> float:
        """For how long there has been no request to answer; 0 while there is one."""
        return 0.0 if self.num_requests else time.monotonic() - self._idle_since
