"""How long a request may take, and how long it took."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from maskdial.config import Config
from maskdial.engine.fairness import current_usage
from maskdial.errors import DeadlineError


@dataclass(frozen=True, slots=True)
class Timings:
    """What a reply reports: seconds in the queue and in passes, the tokens of its texts, how many
    were truncated, and how many of the others are those of texts whose answers were kept.
    """

    queue_seconds: float
    inference_seconds: float
    compute_tokens: int
    truncated_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def beside(cls, each: Sequence["Timings"]) -> "Timings":
        """Those of pieces of a request at the same time: the slowest one's."""
        return cls(
            max(one.queue_seconds for one in each),
            max(one.inference_seconds for one in each),
            sum(one.compute_tokens for one in each),
            sum(one.truncated_tokens for one in each),
            sum(one.cached_tokens for one in each),
        )

    def __add__(self, other: "Timings") -> "Timings":
        """Those of two pieces of a request, one after the other."""
        return Timings(
            self.queue_seconds + other.queue_seconds,
            self.inference_seconds + other.inference_seconds,
            self.compute_tokens + other.compute_tokens,
            self.truncated_tokens + other.truncated_tokens,
            self.cached_tokens + other.cached_tokens,
        )


class Deadline:
    """When a request has to be finished: after its own timeout or the server's, whichever is
    shorter; one in the background has none. To be created in a running event loop, when the
    request's body has arrived.
    """

    def __init__(self, timeout: float | None, config: Config) -> None:
        timeouts = [each for each in (timeout, config.request_timeout) if each is not None]
        self._timeout = None if current_usage().background else min(timeouts, default=None)
        self._started = asyncio.get_running_loop().time()

    def remaining(self) -> float | None:
        """Seconds left, possibly none; None without a timeout."""
        if self._timeout is None:
            return None
        elapsed = asyncio.get_running_loop().time() - self._started
        return max(0.0, self._timeout - elapsed)

    @contextlib.asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """Cancels what runs in the block when the time is up.

        Raises:
            DeadlineError: it was.
        """
        try:
            async with asyncio.timeout(self.remaining()):
                yield
        except TimeoutError as error:
            raise self.missed() from error

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Has a DeadlineError from an engine, which knows what was left, name the whole timeout."""
        try:
            yield
        except DeadlineError as error:
            raise self.missed() from error

    def missed(self) -> DeadlineError:
        """The error of a request that takes too long; it names the whole timeout."""
        return DeadlineError(
            f"the request did not finish within its timeout of {self._timeout:g} seconds"
        )


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """What a request gets: the task's answer, and the reply's timings."""

    content: T
    timings: Timings
