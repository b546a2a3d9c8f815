"""Runner: sends jobs at the times of a schedule, however slow the answers are.

The load is open-loop: a request's start does not wait for the ones before it, and its latency is
measured from the time the schedule gave it. Where a start is late nonetheless (too many
requests in flight, a busy machine), the wait is part of the latency, so a stalled server cannot
make itself look fast by stalling the test (coordinated omission: Gil Tene, "How NOT to Measure
Latency").
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from loadtests.samples import Failure, Sample
from loadtests.scenarios import Job
from loadtests.sender import failure_of

Send = Callable[[Job, Callable[[], None]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a run; times in seconds.

    ``timeout`` is for one request, from when it is sent; ``drain`` is how long the run goes on
    after its last arrival was due. A request that finds ``max_in_flight`` others waits its turn.
    """

    timeout: float
    drain: float
    max_in_flight: int


@dataclass(frozen=True, slots=True)
class Progress:
    """A running test, as the terminal shows it."""

    in_flight: int
    ended: int
    failed: int


@dataclass(frozen=True, slots=True)
class Run:
    """A sample for every job, in the schedule's order, and the most requests in flight at once."""

    samples: tuple[Sample, ...]
    peak_in_flight: int


class Runner:
    """One run. Times come from the event loop's clock."""

    def __init__(
        self,
        send: Send,
        limits: Limits,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self._send = send
        self._limits = limits
        self._on_progress = on_progress
        self._samples: list[Sample] = []
        self._in_flight = 0
        self._peak_in_flight = 0
        self._failed = 0

    async def run(self, jobs: Sequence[Job], schedule: Sequence[float], duration: float) -> Run:
        """Sends ``jobs[i]`` at ``schedule[i]``; over by ``duration`` and ``limits.drain``."""
        self._started = asyncio.get_running_loop().time()
        self._slots = asyncio.Semaphore(self._limits.max_in_flight)
        tasks: list[asyncio.Task[None]] = []
        for job, intended in zip(jobs, schedule, strict=True):
            await asyncio.sleep(intended - self._now())
            tasks.append(asyncio.create_task(self._run_job(job, intended)))
        if tasks:
            _, unfinished = await asyncio.wait(
                tasks, timeout=duration + self._limits.drain - self._now()
            )
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*tasks)
        samples = sorted(self._samples, key=lambda sample: sample.intended)
        return Run(tuple(samples), self._peak_in_flight)

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._started

    async def _run_job(self, job: Job, intended: float) -> None:
        sent: float | None = None
        tokens: list[float] = []
        failure: Failure | None = None
        try:
            async with self._slots:
                sent = self._now()
                self._count_in_flight(1)
                try:
                    async with asyncio.timeout(self._limits.timeout):
                        await self._send(job, lambda: tokens.append(self._now()))
                finally:
                    self._count_in_flight(-1)
        except asyncio.CancelledError:
            # Only run() cancels, when the drain is over: the request is counted and not lost.
            failure = Failure("unfinished", None, "still waiting when the run was ended")
        except TimeoutError:
            failure = Failure(
                "client_timeout", None, f"not complete after {self._limits.timeout:g} s"
            )
        except Exception as error:
            failure = failure_of(error)
        self._failed += failure is not None
        self._samples.append(Sample(job.kind, intended, sent, self._now(), tuple(tokens), failure))
        self._report_progress()

    def _count_in_flight(self, change: int) -> None:
        self._in_flight += change
        self._peak_in_flight = max(self._peak_in_flight, self._in_flight)
        self._report_progress()

    def _report_progress(self) -> None:
        self._on_progress(Progress(self._in_flight, len(self._samples), self._failed))
