"""The closed loop: clients that each send the next request when the last is answered."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from loadtests import LoadTestError
from loadtests.server import Connection, Reply, count_tokens, post
from maskdial.bundle.bundle import Bundle

Client = Callable[[str], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Throughput:
    """What the clients achieved within a window of time, during which all of them were busy.

    A request counts by the share of its time that lies in the window, and so do its units. CPU
    times are of all threads of a process, in seconds. ``server_cpu`` is 0 without a server.
    """

    requests: float
    units: float
    seconds: float
    own_cpu: float
    server_cpu: float = 0.0

    @property
    def per_second(self) -> float:
        return self.units / self.seconds


@dataclass(frozen=True, slots=True)
class _Answered:
    """A request, with its times in seconds."""

    began: float
    ended: float
    units: int

    def share(self, end: float) -> float:
        """The share of its time before ``end``, at which it was open or already answered."""
        if self.ended <= end:
            return 1.0
        return (end - self.began) / (self.ended - self.began)


async def drive(
    clients: Sequence[Client],
    texts: Sequence[str],
    seconds: float,
    server_cpu: Callable[[], float] = lambda: 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Throughput:
    """Lets every client send texts, taken in turn from ``texts``.

    The window ends with the first reply after ``seconds``. All clients go on until the requests
    that were open then are answered: with fewer clients, those would be answered sooner, but fewer
    at a time. What is sent after the window does not count.
    """
    supply = itertools.cycle(texts)
    started, own, server = clock(), time.process_time(), server_cpu()
    answered: list[_Answered] = []
    window: Throughput | None = None
    num_open = len(clients)

    async def send_on(client: Client) -> None:
        nonlocal window, num_open
        while window is None:
            began = clock()
            units = await client(next(supply))
            answered.append(_Answered(began, clock(), units))
            if window is None and answered[-1].ended - started >= seconds:
                window = Throughput(
                    requests=0.0,
                    units=0.0,
                    seconds=answered[-1].ended - started,
                    own_cpu=time.process_time() - own,
                    server_cpu=server_cpu() - server,
                )
        num_open -= 1
        while num_open:
            await client(next(supply))

    await asyncio.gather(*map(send_on, clients))
    assert window is not None, "every client has had a reply after its end"
    shares = [each.share(started + window.seconds) for each in answered]
    units = sum(share * each.units for share, each in zip(shares, answered, strict=True))
    return replace(window, requests=sum(shares), units=units)


class Work(Protocol):
    """What a model is asked for. One text is one request; ``unit`` is what throughput counts."""

    unit: str

    def request(self, text: str) -> bytes:
        """The HTTP request."""
        ...

    def count(self, reply: Reply) -> int:
        """The number of units in the reply; raises LoadTestError if any are missing."""
        ...


class Generation(Work):
    """Greedy streams of a fixed number of tokens."""

    unit = "tokens"

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def request(self, text: str) -> bytes:
        parameters = {"max_new_tokens": self._num_tokens, "ignore_eos": True}
        body = {"inputs": text, "parameters": parameters, "stream": True}
        return post("/generate", json.dumps(body).encode())

    def count(self, reply: Reply) -> int:
        num_events = count_tokens(reply.body)
        if not reply.ok or num_events != self._num_tokens:
            raise LoadTestError(f"a stream ended after {num_events} tokens: {reply}")
        return num_events


class Classification(Work):
    """One text per request."""

    unit = "requests"

    def request(self, text: str) -> bytes:
        return post("/classify", json.dumps({"inputs": text}).encode())

    def count(self, reply: Reply) -> int:
        if not reply.ok:
            raise LoadTestError(f"a request failed: {reply}")
        return 1


def work_of(bundle: Bundle, num_tokens: int) -> Work:
    """Chooses generation, of ``num_tokens`` per text, or classification by the model's task.

    Raises:
        LoadTestError: the model does neither.
    """
    task = bundle.manifest.task
    if task == "generate":
        return Generation(num_tokens)
    if task == "classify":
        return Classification()
    raise LoadTestError(f"the task of {bundle.path} is {task}; this needs generate or classify")


@asynccontextmanager
async def http_clients(
    work: Work, texts: Sequence[str], port: int, num_clients: int
) -> AsyncIterator[list[Client]]:
    """Clients with a connection each; all requests are encoded beforehand."""
    requests = {text: work.request(text) for text in texts}
    connections = await asyncio.gather(*(Connection.open(port) for _ in range(num_clients)))

    async def send(connection: Connection, text: str) -> int:
        return work.count(await connection.send(requests[text]))

    try:
        yield [partial(send, connection) for connection in connections]
    finally:
        for connection in connections:
            connection.close()
