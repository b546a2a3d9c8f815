"""The open loop: requests are sent at scheduled times, however slow the answers are.

A request does not wait for the ones before it, and its latency counts from the time the schedule
gave it. If it starts late anyway (too many requests in flight, a busy machine), the delay is part
of its latency, so a server cannot look fast by stalling the load generator (coordinated omission:
Gil Tene, "How NOT to Measure Latency").
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from loadtests.texts import Job, Kind
from maskdial_client import NO_RETRIES, AsyncClient
from maskdial_client.errors import ApiError, ConnectionFailedError, ProtocolError, StreamEndedError

Send = Callable[[Job, Callable[[], None]], Awaitable[None]]
_TEMPERATURE = 0.8


def poisson_schedule(rate: float, duration: float, seed: int) -> tuple[float, ...]:
    """Start times in seconds from the start of the run, ascending, all below ``duration``.

    A Poisson process of ``rate`` requests per second: the gaps are independent and exponential, as
    with many independent clients. The same seed gives the same schedule.
    """
    rng = random.Random(seed)
    times: list[float] = []
    time = rng.expovariate(rate)
    while time < duration:
        times.append(time)
        time += rng.expovariate(rate)
    return tuple(times)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed.

    ``error_type`` is the server's, or ``connection_failed``, ``stream_ended``, ``bad_reply``,
    ``client_timeout`` (--timeout expired) or ``unfinished`` (still open when the run ended).
    ``status`` is None if no HTTP status arrived.
    """

    error_type: str
    status: int | None
    message: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. All times are in seconds from the start of the run.

    ``intended`` is the scheduled start, which every latency counts from. ``sent`` is the actual
    start, None if it was never sent. ``ended`` is when the reply was complete or the request
    failed. ``tokens`` has the arrival time of each generated token.
    """

    kind: Kind
    intended: float
    sent: float | None
    ended: float
    tokens: tuple[float, ...]
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class Run:
    """One sample per job, in schedule order, and the peak number of requests in flight."""

    samples: tuple[Sample, ...]
    peak_in_flight: int


class Runner:
    """Sends jobs on schedule.

    Args:
        send: sends one.
        timeout: seconds for one request, from when it is sent.
        drain_timeout: seconds for all open requests, after the run's duration.
        max_in_flight: open requests; others wait.
        clock: gives seconds; that of uvloop would give milliseconds.
    """

    def __init__(
        self,
        send: Send,
        timeout: float,
        drain_timeout: float,
        max_in_flight: int = 1000,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._send = send
        self._timeout = timeout
        self._drain_timeout = drain_timeout
        self._slots = asyncio.Semaphore(max_in_flight)
        self._samples: list[Sample] = []
        self.num_failed = 0
        self.in_flight = 0
        self._peak_in_flight = 0

    async def run(self, jobs: Sequence[Job], schedule: Sequence[float], duration: float) -> Run:
        """Sends ``jobs[i]`` at ``schedule[i]``; ends by ``duration`` + ``drain_timeout``."""
        self._started = self._clock()
        tasks: list[asyncio.Task[None]] = []
        for job, intended in zip(jobs, schedule, strict=True):
            await asyncio.sleep(intended - self._now())
            tasks.append(asyncio.create_task(self._run_job(job, intended)))
        if tasks:
            _, unfinished = await asyncio.wait(
                tasks, timeout=duration + self._drain_timeout - self._now()
            )
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*tasks)
        samples = sorted(self._samples, key=lambda sample: sample.intended)
        return Run(tuple(samples), self._peak_in_flight)

    def _now(self) -> float:
        return self._clock() - self._started

    @property
    def num_ended(self) -> int:
        return len(self._samples)

    async def _run_job(self, job: Job, intended: float) -> None:
        sent: float | None = None
        tokens: list[float] = []
        failure: Failure | None = None
        try:
            async with self._slots:
                sent = self._now()
                self.in_flight += 1
                self._peak_in_flight = max(self._peak_in_flight, self.in_flight)
                try:
                    async with asyncio.timeout(self._timeout):
                        await self._send(job, lambda: tokens.append(self._now()))
                finally:
                    self.in_flight -= 1
        except asyncio.CancelledError:
            # Only run() cancels, at the end of the drain; the request must still be counted.
            failure = Failure("unfinished", None, "still open when the run ended")
        except TimeoutError:
            late = f"not complete after {self._timeout:g} s"
            failure = Failure("client_timeout", None, late)
        except Exception as error:
            failure = failure_of(error)
        self.num_failed += failure is not None
        self._samples.append(Sample(job.kind, intended, sent, self._now(), tuple(tokens), failure))


def load_client(url: str) -> AsyncClient:
    """A client that neither retries nor queues: both would hide what the server does."""
    return AsyncClient(url, timeout=None, retry=NO_RETRIES, max_connections=None)


class Sender:
    """Sends jobs. Generation is always streamed, and sampled with the job's own seed."""

    def __init__(self, client: AsyncClient, *, model: str | None, max_new_tokens: int) -> None:
        self._client = client
        self._model = model
        self._max_new_tokens = max_new_tokens

    async def __call__(self, job: Job, on_token: Callable[[], None]) -> None:
        """Sends a job and reads the whole reply; calls ``on_token`` at each token."""
        if job.kind is Kind.FILL_MASK:
            await self._client.fill_mask(job.text, model=self._model)
        elif job.kind is Kind.CLASSIFY:
            await self._client.classify(job.text, model=self._model)
        else:
            async with self._client.stream(
                job.text,
                model=self._model,
                max_new_tokens=self._max_new_tokens,
                temperature=_TEMPERATURE,
                seed=job.seed,
            ) as stream:
                async for _ in stream:
                    on_token()


def failure_of(error: Exception) -> Failure:
    """Classifies the exception of a request."""
    if isinstance(error, ApiError):
        return Failure(error.error_type or "unknown", error.status, error.message)
    names: dict[type[Exception], str] = {
        ConnectionFailedError: "connection_failed",
        StreamEndedError: "stream_ended",
        ProtocolError: "bad_reply",
    }
    return Failure(names.get(type(error), type(error).__name__), None, str(error))
