"""The closed loop: clients who each send their next request when the last was answered."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

Client = Callable[[str], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Throughput:
    """What some clients got; CPU times are those of all threads of a process, in seconds.

    ``server_cpu`` is 0 where no server took part.
    """

    requests: int
    units: int
    seconds: float
    own_cpu: float
    server_cpu: float = 0.0

    @property
    def per_second(self) -> float:
        return self.units / self.seconds


async def drive(
    clients: Sequence[Client],
    texts: Sequence[str],
    seconds: float,
    server_cpu: Callable[[], float] = lambda: 0.0,
) -> Throughput:
    """Lets every client send texts, in turn from ``texts``, for so many seconds.

    Requests that are open then are waited for, and their time counts.
    """
    supply = itertools.cycle(texts)
    started, own, server = time.perf_counter(), time.process_time(), server_cpu()

    async def send_on(client: Client) -> list[int]:
        replies = []
        while True:
            replies.append(await client(next(supply)))
            if time.perf_counter() - started >= seconds:
                return replies

    replies = [units for each in await asyncio.gather(*map(send_on, clients)) for units in each]
    return Throughput(
        len(replies),
        sum(replies),
        time.perf_counter() - started,
        time.process_time() - own,
        server_cpu() - server,
    )
