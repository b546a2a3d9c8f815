"""The runner on a clock of its own, so that every expected time is exact."""

import asyncio
import selectors
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from loadtests.open_loop import Limits, Progress, Run, Runner, Send
from loadtests.texts import Job, Kind
from maskdial_client.errors import ConnectionFailedError, OverloadedError

OPEN = Limits(timeout=100.0, drain=100.0, max_in_flight=100)
JOB = Job(Kind.GENERATE, "Once", 0)


class VirtualSelector(selectors.SelectSelector):
    """Where a loop would wait, its clock moves on instead."""

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
    limits: Limits = OPEN,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Run:
    runner = Runner(send, limits, on_progress)
    with asyncio.Runner(loop_factory=VirtualLoop) as loop:
        return loop.run(runner.run([JOB] * len(schedule), schedule, duration=schedule[-1] + 1))


def one_at_a_time(*seconds: float) -> Send:
    """A server that works on one request at a time, for so long on each."""
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
    limits = Limits(timeout=100, drain=100, max_in_flight=1)
    result = run(one_at_a_time(10, 1, 1, 1), [1, 2, 3, 4], limits)
    assert latencies(result) == pytest.approx([10, 10, 10, 10])
    assert [sample.sent for sample in result.samples] == pytest.approx([1, 11, 12, 13])
    assert result.peak_in_flight == 1


def test_tokens_are_stamped_as_they_come() -> None:
    async def send(job: Job, on_token: Callable[[], None]) -> None:
        for _ in range(3):
            await asyncio.sleep(0.5)
            on_token()

    (sample,) = run(send, [2.0]).samples
    assert sample.tokens == pytest.approx((2.5, 3.0, 3.5))
    assert sample.failure is None
    assert sample.ended == pytest.approx(3.5)


def test_a_request_over_its_timeout_is_a_failure() -> None:
    limits = Limits(timeout=2, drain=100, max_in_flight=10)
    (sample,) = run(one_at_a_time(50), [1], limits).samples
    assert sample.failure is not None
    assert sample.failure.error_type == "client_timeout"
    assert sample.ended == pytest.approx(3)


def test_what_the_drain_leaves_is_counted_also_if_never_sent() -> None:
    limits = Limits(timeout=100, drain=5, max_in_flight=1)
    seen: list[Progress] = []
    result = run(one_at_a_time(1, 50, 1), [1, 2, 3], limits, seen.append)
    failures = [sample.failure and sample.failure.error_type for sample in result.samples]
    assert failures == [None, "unfinished", "unfinished"]
    assert [sample.sent for sample in result.samples] == [1, 2, None]
    assert result.samples[-1].ended == pytest.approx(9)  # duration 4, drain 5
    assert seen[-1] == Progress(in_flight=0, ended=3, failed=2)


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
