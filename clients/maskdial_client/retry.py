"""RetryPolicy: whether and when a refused request is sent again."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from maskdial_client.errors import ApiError, OverloadedError, UnavailableError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retries for status 429 and 503 only: with these the server has not started on the request.

    The delay is the server's Retry-After plus up to 25%, so that clients refused together do not
    return together. Without that header it doubles from ``first_delay`` seconds, up to
    ``max_delay``, and its upper half is random. A Retry-After above ``max_delay`` is not waited
    for, since an earlier attempt would only be refused: the error is raised instead. ``uniform``
    draws a random number from [0, 1).
    """

    max_retries: int = 3
    first_delay: float = 0.5
    max_delay: float = 30.0
    uniform: Callable[[], float] = random.random

    def delay(self, attempt: int, error: ApiError) -> float | None:
        """Seconds to wait after attempt number ``attempt``, from 0; None to give up."""
        if attempt >= self.max_retries or not isinstance(error, OverloadedError | UnavailableError):
            return None
        if error.retry_after is None:
            backoff: float = min(self.first_delay * 2**attempt, self.max_delay)
            return backoff * (0.5 + 0.5 * self.uniform())
        if error.retry_after > self.max_delay:
            return None
        return error.retry_after * (1.0 + 0.25 * self.uniform())


NO_RETRIES = RetryPolicy(max_retries=0)
