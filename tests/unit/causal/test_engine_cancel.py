"""Readers that leave, and timeouts: the sequence is dropped, and no other is touched."""

import asyncio

import pytest

from maskdial.causal.sequence import State
from maskdial.errors import DeadlineError
from tests.held import HOUR, HeldTimers
from tests.unit.scripted_model import Bench, FakeRunner, expected_tokens, make_sequence, settle


def test_closing_a_stream_frees_its_slot_within_one_step(overlaps: bool) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=2), overlaps=overlaps)
        async with bench.engine.stream(make_sequence([1], 100)) as leaving:
            stayer = bench.read(make_sequence([2], 100))
            await bench.step(5)
            waiting = bench.read(make_sequence([3], 4))
            await bench.step(2)
            assert (await anext(leaving)).token_id == expected_tokens([1], 1)[0]
            assert (bench.num_running, bench.num_waiting) == (2, 1)
        before = len(stayer.events)
        await bench.step(overlaps)
        await bench.step()
        assert waiting.token_ids == expected_tokens([3], 1)
        assert len(stayer.events) == before + 1 + overlaps
        assert bench.cancelled == {"disconnect": 1}
        await bench.run_dry()
        assert stayer.token_ids == expected_tokens([2], 100)
        assert waiting.token_ids == expected_tokens([3], 4)

    asyncio.run(main())


@pytest.mark.parametrize("steps_before", [0, 1, 4], ids=["queued", "prefilling", "decoding"])
def test_cancelling_the_reader_drops_the_sequence_only(steps_before: int, overlaps: bool) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=3), overlaps=overlaps)
        other = bench.read(make_sequence([5], 30))
        await bench.step(3)
        sequence = make_sequence(range(20), 50)
        reader = bench.read(sequence)
        await settle()
        await bench.step(steps_before)
        before = len(other.events)
        reader.task.cancel()
        await settle()
        assert reader.task.cancelled()
        await bench.step()
        assert (bench.num_running, bench.num_waiting) == (1, 0)
        assert sequence.state is State.ENDED
        assert len(other.events) == before + 1
        await bench.run_dry()
        assert other.token_ids == expected_tokens([5], 30)
        assert bench.cancelled == {"disconnect": 1}

    asyncio.run(main())


def test_closing_after_the_end_is_no_disconnect(overlaps: bool) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=1), overlaps=overlaps)
        read, unread = (bench.engine.stream(make_sequence([n], 2)) for n in range(2))
        await bench.run_dry()
        assert [event.index async for event in read] == [1, 2]
        await read.aclose()
        await unread.aclose()
        assert bench.cancelled == {}

    asyncio.run(main())


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding"])
def test_a_timeout_drops_the_sequence_wherever_it_is(state: str, overlaps: bool) -> None:
    async def main() -> None:
        slots = 1 if state == "waiting" else 2
        bench = Bench(FakeRunner(slots), overlaps=overlaps)
        other = bench.read(make_sequence([3], 30))
        await bench.step()
        with HeldTimers(asyncio.get_running_loop()) as timers:
            sequence = make_sequence(range(20), 150)
            late = bench.read(sequence, timeout=HOUR)
            await bench.step({"waiting": 0, "prefilling": 1, "decoding": 8}[state])
            assert sequence.state.name.lower() == state
            timers.go_off()
            with pytest.raises(DeadlineError, match="within its timeout"):
                await late.task
        assert bench.cancelled == {"timeout": 1}
        await bench.step(1 + overlaps)
        assert (bench.num_running, bench.num_waiting) == (1, 0)
        await bench.run_dry()
        assert other.token_ids == expected_tokens([3], 30)

    asyncio.run(main())


def test_a_timeout_after_the_end_changes_nothing(overlaps: bool) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=1), overlaps=overlaps)
        stream = bench.engine.stream(make_sequence([1], 3), timeout=0.001)
        for _ in range(4):
            bench.engine.step()
        await asyncio.sleep(0.01)  # the time passes before anyone reads
        assert [event.index async for event in stream] == [1, 2, 3]
        assert bench.cancelled == {}

    asyncio.run(main())
