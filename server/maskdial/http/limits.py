"""ClientLimits: what one client may have open at once, and compute in a minute."""

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from maskdial.config import Config
from maskdial.engine.fairness import ClientUsage, usage_of_request
from maskdial.errors import OverloadedError

_MINUTE = 60.0


class ClientLimits:
    """Counts the requests and tokens of each client. Used on the event loop only.

    A client's tokens are a budget that refills steadily, up to a minute's worth. What a request
    computes is only known in the end, so a request is admitted while there is any budget left, and
    may overdraw it; the next ones wait until that is made up for.
    """

    def __init__(self, config: Config) -> None:
        self._max_requests = config.max_requests_per_client
        self._tokens_per_minute = config.max_tokens_per_minute
        self._open: Counter[str] = Counter()
        # When the budget of each client that has used some is full again, in monotonic seconds.
        self._full_at: dict[str, float] = {}

    @contextmanager
    def admit(
        self, client: str, key: str = "", *, unlimited: bool = False
    ) -> Iterator[ClientUsage]:
        """Counts a request of a client while it is handled, and then what it has used.

        Args:
            client: its sender.
            key: the name of its key, if it needs one.
            unlimited: whether its sender is this process, whom nothing else refuses either.

        Raises:
            OverloadedError: the client is over one of its limits.
        """
        if not unlimited:
            self._check(client)
        usage = ClientUsage(client, key, unlimited=unlimited)
        token = usage_of_request.set(usage)
        self._open[client] += 1
        try:
            yield usage
        finally:
            usage_of_request.reset(token)
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]
            self._charge(usage)

    def _check(self, client: str) -> None:
        if self._max_requests is not None and self._open[client] >= self._max_requests:
            raise OverloadedError(
                f"this client has {self._open[client]} requests open; it may have "
                f"{self._max_requests} (--max-requests-per-client); wait for one to finish"
            )
        if self._tokens_per_minute is None:
            return
        # There is budget left if it is full again within the time that fills it.
        wait = self._full_at.get(client, 0.0) - time.monotonic() - _MINUTE
        if wait >= 0:
            seconds = math.floor(wait) + 1
            raise OverloadedError(
                f"this client has used its {self._tokens_per_minute:,} tokens a minute "
                f"(--max-tokens-per-minute); try again in {seconds} s",
                retry_after=seconds,
            )

    def _charge(self, usage: ClientUsage) -> None:
        if self._tokens_per_minute is None or not usage.tokens:
            return
        now = time.monotonic()
        if len(self._full_at) > 2 * len(self._open) + 1000:
            self._full_at = {client: at for client, at in self._full_at.items() if at > now}
        begun = max(self._full_at.get(usage.client, now), now)
        self._full_at[usage.client] = begun + usage.tokens * _MINUTE / self._tokens_per_minute
