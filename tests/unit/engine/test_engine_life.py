"""The life that both engines share: start, warm-up, draining, death, and how replies are told."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maskdial.engine.life import Engine, describe, publish
from maskdial.errors import DeviceLostError, UnavailableError
from maskdial.masked.request import MaskedInput
from tests.unit import scripted_model, scripted_session
from tests.unit.scripted_session import WAIT, until


class Gate:
    """Stands before each pass: lets it through, holds it until it is opened, or fails it."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._closed = threading.Event()
        self._reached = threading.Semaphore(0)
        self._opened = threading.Event()

    def close(self) -> None:
        self._closed.set()

    def open(self) -> None:
        self._opened.set()

    async def reached(self) -> None:
        """Waits until a pass stands before the closed gate."""
        assert await asyncio.to_thread(self._reached.acquire, timeout=WAIT)

    def enter(self) -> None:
        if self._closed.is_set():
            self._reached.release()
            assert self._opened.wait(WAIT)
        if self.error is not None:
            raise self.error


class GatedSession(scripted_session.ScriptedSession):
    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self._gate_before = gate

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        self._gate_before.enter()
        return super().run(feeds)


@dataclass(frozen=True)
class Subject:
    """An engine whose first request holds up the later ones.

    ``send`` makes a request of that number in a task; ``expected`` is what the task returns.
    """

    engine: Engine
    gate: Gate
    send: Callable[[int], "asyncio.Task[object]"]
    expected: Callable[[int], object]
    value: Callable[..., int]

    async def start(self) -> None:
        self.engine.start()
        await self.engine.warm_up()

    async def stop(self, grace: float = WAIT) -> None:
        await asyncio.to_thread(self.engine.stop, grace)


def causal(overlaps: bool) -> Subject:
    gate, runner = Gate(), scripted_model.FakeRunner(slots=1)
    runner.on_pass = lambda kind: gate.enter()
    bench = scripted_model.Bench(runner, overlaps=overlaps)

    async def read(stream: Any) -> object:
        return [event.token_id async for event in stream]

    def send(number: int) -> "asyncio.Task[object]":
        stream = bench.engine.stream(scripted_model.make_sequence([number], 3))
        return asyncio.create_task(read(stream))

    def expected(number: int) -> object:
        return scripted_model.expected_tokens([number], 3)

    return Subject(bench.engine, gate, send, expected, bench.value)


def masked() -> Subject:
    gate = Gate()
    # Two tokens a pass: one text.
    bench = scripted_session.Bench(GatedSession(gate), max_batch_tokens=2)

    async def submit(number: int) -> object:
        (result,) = await bench.engine.submit_many([MaskedInput((number, 2), (0,))])
        return result.logits.tolist()

    def send(number: int) -> "asyncio.Task[object]":
        return asyncio.create_task(submit(number))

    return Subject(
        bench.engine, gate, send, lambda number: [[number, 2, number + 2, 0]], bench.value
    )


@pytest.fixture(params=["masked", "causal", "causal overlapping"])
def subject(request: pytest.FixtureRequest) -> Subject:
    return masked() if request.param == "masked" else causal("overlapping" in request.param)


async def refused(subject: Subject, message: str) -> None:
    with pytest.raises(UnavailableError, match=message):
        await subject.send(1)


def test_it_serves_from_its_warm_up_until_it_is_stopped(subject: Subject) -> None:
    async def main() -> None:
        assert not subject.engine.ready
        assert subject.value("engine_up") == 0
        await subject.start()
        assert subject.engine.ready
        assert subject.value("engine_up") == 1
        answers = await asyncio.gather(*map(subject.send, range(1, 6)))
        assert answers == [subject.expected(number) for number in range(1, 6)]
        await subject.stop()
        assert not subject.engine.ready
        assert subject.value("engine_up") == 0
        await refused(subject, "shutting down")
        with pytest.raises(RuntimeError, match="cannot start again"):
            subject.engine.start()
        await subject.stop()

    asyncio.run(main())


def test_requests_before_the_warm_up_wait_for_it(subject: Subject) -> None:
    async def main() -> None:
        waiting = subject.send(1)
        await until(lambda: subject.value("queue_size") == 1)
        await subject.start()
        assert await waiting == subject.expected(1)
        await subject.stop()

    asyncio.run(main())


def test_no_metric_counts_the_warm_up(subject: Subject) -> None:
    async def main() -> None:
        await subject.start()
        for name in ("batch_size", "inference_duration_seconds", "queue_duration_seconds"):
            assert subject.value(f"{name}_count") == 0
        assert subject.value("prompt_tokens_total") == 0
        await subject.stop()

    asyncio.run(main())


def test_a_model_that_cannot_run_never_becomes_ready(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        subject.gate.error = RuntimeError("no such kernel")
        waiting = subject.send(1)
        await until(lambda: subject.value("queue_size") == 1)
        with pytest.raises(subject.engine.failure, match="no such kernel"):
            await subject.start()
        with pytest.raises(subject.engine.failure, match="no such kernel"):
            await waiting
        assert not subject.engine.ready
        assert subject.value("engine_up") == 0
        await refused(subject, "died")
        await subject.stop()
        await refused(subject, "died")

    with caplog.at_level(logging.CRITICAL + 1):
        asyncio.run(main())


def test_a_failed_pass_is_not_the_end_of_it(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        await subject.start()
        subject.gate.error = RuntimeError("bad_alloc\n  in node MatMul_7")
        message = r"^a pass of model '\w+' failed \(RuntimeError: bad_alloc\)$"
        with pytest.raises(subject.engine.failure, match=message):
            await subject.send(1)
        subject.gate.error = None
        assert subject.engine.ready
        assert await subject.send(2) == subject.expected(2)
        await subject.stop()

    with caplog.at_level(logging.CRITICAL + 1):
        asyncio.run(main())


def test_stop_lets_the_waiting_and_the_running_finish(subject: Subject) -> None:
    async def main() -> None:
        await subject.start()
        subject.gate.close()
        requests = [subject.send(number) for number in range(1, 4)]
        await subject.gate.reached()
        await until(lambda: subject.value("queue_size") >= 2)
        stopping = asyncio.create_task(subject.stop())
        await until(lambda: not subject.engine.ready)
        await refused(subject, "shutting down")
        assert not stopping.done()
        subject.gate.open()
        for number, request in enumerate(requests, 1):
            assert await request == subject.expected(number)
        await stopping
        assert subject.value("cancelled_total", reason="shutdown") == 0
        assert not threads()

    asyncio.run(main())


def test_stop_fails_what_outlives_the_grace(subject: Subject) -> None:
    async def main() -> None:
        await subject.start()
        subject.gate.close()
        requests = [subject.send(number) for number in range(1, 4)]
        await subject.gate.reached()
        await until(lambda: subject.value("queue_size") >= 2)
        stopping = asyncio.create_task(subject.stop(grace=0))
        for request in requests:
            with pytest.raises(UnavailableError, match="shut down before"):
                await request
        subject.gate.open()
        await stopping
        assert not threads()
        assert subject.value("cancelled_total", reason="shutdown") == 3
        assert subject.value("queue_size") == subject.value("requests_running") == 0

    asyncio.run(main())


def test_an_engine_dies_with_its_device(subject: Subject, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        await subject.start()
        subject.gate.error = DeviceLostError("the GPU is lost; restart the server")
        with pytest.raises(subject.engine.failure, match=r"died \(DeviceLostError: the GPU"):
            await subject.send(1)
        assert not subject.engine.ready
        assert subject.value("engine_up") == 0
        await subject.stop()

    asyncio.run(main())
    assert "died" in caplog.text


def test_when_the_thread_dies_everyone_hears_at_once(
    subject: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        await subject.start()
        subject.gate.close()
        requests = [subject.send(number) for number in range(1, 4)]
        await subject.gate.reached()
        await until(lambda: subject.value("queue_size") >= 2)
        subject.gate.error = SystemExit("bus error\nsecond line")
        subject.gate.open()
        for request in requests:
            with pytest.raises(subject.engine.failure, match=r"died \(SystemExit: bus error\)$"):
                await request
        assert not subject.engine.ready
        await refused(
            subject, r"died \(SystemExit: bus error\); load it again or restart the server$"
        )
        await subject.stop()
        assert subject.value("engine_up") == 0
        assert subject.value("cancelled_total", reason="shutdown") == 0

    with caplog.at_level(logging.CRITICAL + 1):
        asyncio.run(main())


def test_an_engine_may_be_stopped_before_it_starts(subject: Subject) -> None:
    async def main() -> None:
        waiting = subject.send(1)
        await until(lambda: subject.value("queue_size") == 1)
        await subject.stop()
        with pytest.raises(UnavailableError, match="shut down before"):
            await waiting
        with pytest.raises(UnavailableError, match="shutting down"):
            await subject.engine.warm_up()

    asyncio.run(main())


def threads() -> list[str]:
    """The engines' threads that live, by name."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name in ("maskdial-tiny", "maskdial-fake")]


class Mailbox:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.replies: list[int] = []

    def put(self, reply: int) -> None:
        self.replies.append(reply)


def test_replies_wake_each_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = [asyncio.new_event_loop() for _ in range(3)]
    closed, *others = loops
    closed.close()
    num_calls = 0

    def count(loop: asyncio.AbstractEventLoop) -> None:
        wake = loop.call_soon_threadsafe

        def counted(*args: Any, **kwargs: Any) -> asyncio.Handle:
            nonlocal num_calls
            num_calls += 1
            return wake(*args, **kwargs)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)

    for loop in others:
        count(loop)
    mailboxes = [Mailbox(loop) for loop in loops for _ in range(2)]
    publish((mailbox, number) for number in range(3) for mailbox in mailboxes)
    for loop in others:
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    assert num_calls == 2
    assert [mailbox.replies for mailbox in mailboxes] == [[]] * 2 + [[0, 1, 2]] * 4


@pytest.mark.parametrize(
    ("error", "description"),
    [
        (RuntimeError("first\nsecond"), "RuntimeError: first"),
        (KeyError(), "KeyError"),
        (ValueError("x" * 1000), "ValueError: " + "x" * 200),
    ],
)
def test_errors_are_told_in_one_short_line(error: Exception, description: str) -> None:
    assert describe(error) == description
