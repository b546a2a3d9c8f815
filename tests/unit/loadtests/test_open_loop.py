"""`loadtests.open_loop`: schedules, jobs, and the runner on a virtual clock with exact times."""

import asyncio
import selectors
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.open_loop import Run, Runner, Send, poisson_schedule
from loadtests.texts import SCENARIOS, Job, Kind, draw_jobs
from maskdial_client.errors import ConnectionFailedError, OverloadedError

JOB = Job(Kind.GENERATE, "Once", 0)


class VirtualSelector(selectors.SelectSelector):
    """Advances the clock where the loop would wait."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events and timeout is not None:
            self.now += max(timeout, 0.0)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run(
    send: Send,
    schedule: Sequence[float],
    *,
    timeout: float = 100.0,
    drain_timeout: float = 100.0,
    max_in_flight: int = 100,
) -> Run:
    with asyncio.Runner(loop_factory=VirtualLoop) as loop:
        runner = Runner(send, timeout, drain_timeout, max_in_flight, loop.get_loop().time)
        return loop.run(runner.run([JOB] * len(schedule), schedule, duration=schedule[-1] + 1))


def one_at_a_time(*seconds: float) -> Send:
    """A server that works on one request at a time, for the given seconds."""
    lock = asyncio.Lock()
    times = iter(seconds)

    async def send(job: Job, on_token: Callable[[], None]) -> None:
        async with lock:
            await asyncio.sleep(next(times))
            on_token()

    return send


def latencies(result: Run) -> list[float]:
    return [sample.ended - sample.intended for sample in result.samples]


def test_a_stall_is_seen_by_every_request_that_was_due_in_it() -> None:
    result = run(one_at_a_time(10, 1, 1, 1), [1, 2, 3, 4])
    # A closed loop would have reported one request of 10 s and three of 1 s.
    assert latencies(result) == pytest.approx([10, 10, 10, 10])
    assert [sample.sent for sample in result.samples] == pytest.approx([1, 2, 3, 4])
    assert result.peak_in_flight == 4


def test_waiting_for_a_place_in_flight_counts_as_latency() -> None:
    result = run(one_at_a_time(10, 1, 1, 1), [1, 2, 3, 4], max_in_flight=1)
    assert latencies(result) == pytest.approx([10, 10, 10, 10])
    assert [sample.sent for sample in result.samples] == pytest.approx([1, 11, 12, 13])
    assert result.peak_in_flight == 1


def test_tokens_are_timed_as_they_arrive() -> None:
    async def send(job: Job, on_token: Callable[[], None]) -> None:
        for _ in range(3):
            await asyncio.sleep(0.5)
            on_token()

    (sample,) = run(send, [2.0]).samples
    assert sample.tokens == pytest.approx((2.5, 3.0, 3.5))
    assert sample.failure is None
    assert sample.ended == pytest.approx(3.5)


def test_a_request_over_its_timeout_is_a_failure() -> None:
    (sample,) = run(one_at_a_time(50), [1], timeout=2).samples
    assert sample.failure is not None
    assert sample.failure.error_type == "client_timeout"
    assert sample.ended == pytest.approx(3)


def test_requests_open_after_the_drain_are_counted_even_if_never_sent() -> None:
    result = run(one_at_a_time(1, 50, 1), [1, 2, 3], drain_timeout=5, max_in_flight=1)
    failures = [sample.failure and sample.failure.error_type for sample in result.samples]
    assert failures == [None, "unfinished", "unfinished"]
    assert [sample.sent for sample in result.samples] == [1, 2, None]
    assert result.samples[-1].ended == pytest.approx(9)  # duration 4, drain 5


def test_errors_are_recorded_by_type_and_do_not_stop_the_run() -> None:
    errors = iter([OverloadedError("full"), ConnectionFailedError("gone"), RuntimeError("odd")])

    async def send(job: Job, on_token: Callable[[], None]) -> None:
        raise next(errors)

    failures = [sample.failure for sample in run(send, [1, 2, 3]).samples]
    assert [(f.error_type, f.status, f.message) for f in failures if f] == [
        ("overloaded", 429, "full"),
        ("connection_failed", None, "gone"),
        ("RuntimeError", None, "odd"),
    ]


@settings(max_examples=50)
@given(st.floats(0.1, 100), st.floats(0.1, 20), st.integers())
def test_a_schedule_ascends_within_the_duration(rate: float, duration: float, seed: int) -> None:
    schedule = poisson_schedule(rate, duration, seed)
    assert list(schedule) == sorted(schedule)
    assert all(0 <= time < duration for time in schedule)
    assert schedule == poisson_schedule(rate, duration, seed)


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    short, long = poisson_schedule(5, 10, 3), poisson_schedule(5, 100, 3)
    assert long[: len(short)] == short
    assert poisson_schedule(5, 10, 4) != short


def test_gaps_are_exponential_and_counts_are_poisson() -> None:
    rate, duration = 50.0, 400.0
    schedule = poisson_schedule(rate, duration, 0)
    gaps = [after - before for before, after in pairwise(schedule)]
    # Within four standard errors of the expected count; the seed is fixed.
    assert abs(len(schedule) - rate * duration) < 4 * (rate * duration) ** 0.5
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05)
    assert sum(gap > 1 / rate for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.014)
    counts = Counter(int(time) for time in schedule)
    per_second = [counts[second] for second in range(int(duration))]
    assert statistics.variance(per_second) == pytest.approx(rate, rel=0.3)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_jobs_are_reproducible_and_vary_in_length(scenario: str) -> None:
    jobs = draw_jobs(scenario, 200, 1)
    assert jobs == draw_jobs(scenario, 200, 1)
    assert jobs != draw_jobs(scenario, 200, 2)
    lengths = [len(job.text.split()) for job in jobs]
    assert max(lengths) > 4 * min(lengths)
    expected = set(Kind) if scenario == "mixed" else {Kind(scenario)}
    assert {job.kind for job in jobs} == expected
    for job in jobs:
        assert job.text.count("[MASK]") == (job.kind is Kind.FILL_MASK)
