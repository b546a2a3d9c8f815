"""Tokens that are delivered while the next decode step runs."""

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest
from prometheus_client import Counter

from maskdial.errors import GenerationError
from tests.unit.scripted_model import Bench, FakeRunner, expected_tokens, letters, make_sequence


class WatchedCounter(Counter):
    """Counts tokens, and calls ``on_inc`` just before they are published."""

    def __init__(self) -> None:
        super().__init__("watched_tokens", "Tokens generated", registry=None)
        self.on_inc: Callable[[], None] = lambda: None

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        self.on_inc()
        super().inc(amount, exemplar)


def test_overlapping_steps_deliver_tokens_while_the_next_pass_runs() -> None:
    async def main() -> None:
        runner, counter, published = FakeRunner(slots=2), WatchedCounter(), threading.Event()
        counter.on_inc = published.set
        bench = Bench(runner, overlaps=True, generation_tokens=counter)
        reader = bench.read(make_sequence([1], 20))
        await bench.step()  # the prompt
        num_waited = 0

        def wait_for_the_last_tokens(kind: str) -> None:
            nonlocal num_waited
            assert published.wait(60)
            published.clear()
            num_waited += 1

        await bench.step()  # a step of its own, and the next one's pass
        published.clear()
        runner.on_pass = wait_for_the_last_tokens
        await bench.step(5)
        assert num_waited == 5
        runner.on_pass = lambda kind: None
        await bench.run_dry()
        assert reader.token_ids == expected_tokens([1], 20)
        # Nothing ran ahead of the last token: one pass for each of the others.
        assert runner.passes == ["prefill"] + ["decode"] * 19

    asyncio.run(main())


def test_a_text_that_ends_beside_the_next_pass_leaves_the_others_alone() -> None:
    async def main() -> None:
        runner = FakeRunner(slots=3)
        bench = Bench(runner, overlaps=True)
        text = expected_tokens([1], 30)
        ending = bench.read(make_sequence([1], 30, stop=(letters(text[9:11]),)))
        staying = bench.read(make_sequence([2], 30))
        await bench.step(20)
        late = bench.read(make_sequence([3], 5))
        await bench.run_dry()
        assert ending.token_ids == text[:11]
        assert ending.finish.reason == "stop_sequence"
        assert staying.token_ids == expected_tokens([2], 30)
        assert late.token_ids == expected_tokens([3], 5)

    asyncio.run(main())


def test_a_failing_pass_that_ran_ahead_ends_its_sequences_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        runner = FakeRunner(slots=2)
        bench = Bench(runner, overlaps=True)
        failing = bench.read(make_sequence([1], 20))
        await bench.step(2)

        def fail(kind: str) -> None:
            raise RuntimeError("out of cheese")

        runner.on_pass = fail
        await bench.step()  # delivers what was sampled before the fault
        runner.on_pass = lambda kind: None
        await bench.step()
        with pytest.raises(GenerationError, match="out of cheese"):
            await failing.task
        assert failing.token_ids == expected_tokens([1], len(failing.events))
        assert len(failing.events) == 3
        after = bench.read(make_sequence([2], 5))
        await bench.run_dry()
        assert after.token_ids == expected_tokens([2], 5)

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())


def test_a_fault_in_the_delivery_beside_a_pass_is_the_engines_own() -> None:
    def fail() -> None:
        raise RuntimeError("out of cheese")

    async def main() -> None:
        counter = WatchedCounter()
        bench = Bench(FakeRunner(slots=2), overlaps=True, generation_tokens=counter)
        bench.engine.stream(make_sequence([1], 20))
        await bench.step(2)
        counter.on_inc = fail
        with pytest.raises(RuntimeError, match="out of cheese"):
            bench.engine.step()

    asyncio.run(main())
