"""SharedWork: one thread and a tenth of the time, however many ask; nothing old, no old errors."""

import asyncio
import threading

import pytest

from maskdial.http import shared
from maskdial.http.shared import SharedWork


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(shared, "time", clock)
    return clock


def counted(clock: Clock, seconds: float, took: float = 0.0) -> tuple[SharedWork[int], list[int]]:
    calls: list[int] = []

    def work() -> int:
        calls.append(1)
        clock.now += took
        return len(calls)

    return SharedWork(work, seconds), calls


def test_all_who_ask_within_a_second_get_one_result(clock: Clock) -> None:
    work, calls = counted(clock, 1.0)

    async def ask() -> None:
        assert await asyncio.gather(*(work.result() for _ in range(20))) == [1] * 20
        await asyncio.sleep(0)
        for _ in range(20):
            clock.now += 0.04
            assert await work.result() == 1
        clock.now += 0.3
        assert await work.result() == 2

    asyncio.run(ask())
    assert len(calls) == 2


def test_long_work_rests_for_ten_times_as_long(clock: Clock) -> None:
    work, calls = counted(clock, 1.0, took=3.0)

    async def ask() -> None:
        for _ in range(60):
            await work.result()
            await asyncio.sleep(0)
            clock.now += 1.0

    asyncio.run(ask())
    assert len(calls) == 2
    assert clock.now == 60 + 2 * 3


def test_an_error_is_not_kept(clock: Clock) -> None:
    calls: list[int] = []

    def fail_once() -> int:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no memory")
        return 7

    work = SharedWork(fail_once, 1.0)

    async def ask() -> None:
        with pytest.raises(RuntimeError, match="no memory"):
            await work.result()
        assert await work.result() == 7

    asyncio.run(ask())


def test_one_who_leaves_takes_nothing_from_the_others(clock: Clock) -> None:
    go_on = threading.Event()
    work = SharedWork(lambda: go_on.wait(30), 1.0)

    async def ask() -> None:
        leaving, waiting = (asyncio.create_task(work.result()) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait({leaving})
        go_on.set()
        assert await waiting is True

    asyncio.run(ask())


def test_without_seconds_only_those_who_ask_meanwhile_share(clock: Clock) -> None:
    work, calls = counted(clock, 0.0)

    async def ask() -> None:
        assert await asyncio.gather(*(work.result() for _ in range(2))) == [1, 1]
        assert await work.result() == 2

    asyncio.run(ask())
    assert len(calls) == 2
