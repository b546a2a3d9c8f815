"""RetryPolicy: whether a refused request is tried again, and when."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from maskdial_client.errors import ApiError, OverloadedError, UnavailableError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retries for status 429 and 503 alone: the server says that it did not start the work.

    The wait is the server's Retry-After and up to a quarter more, so that clients refused together
    do not come back together; without that header it doubles from ``first_delay`` seconds and is
    jittered over its upper half. A Retry-After above ``max_delay`` seconds is not waited for: the
    error is raised, since coming back earlier would only be refused again.
    """

    max_retries: int = 3
    first_delay: float = 0.5
    max_delay: float = 30.0
    uniform: Callable[[], float] = random.random

    def delay(self, attempt: int, error: ApiError) -> float | None:
        """Seconds to wait after failed attempt number ``attempt`` (from 0); None: give up."""
        if attempt >= self.max_retries or not isinstance(error, OverloadedError | UnavailableError):
            return None
        if error.retry_after is None:
            backoff: float = min(self.first_delay * 2**attempt, self.max_delay)
            return backoff * (0.5 + 0.5 * self.uniform())
        if error.retry_after > self.max_delay:
            return None
        return error.retry_after * (1.0 + 0.25 * self.uniform())


NO_RETRIES = RetryPolicy(max_retries=0)
