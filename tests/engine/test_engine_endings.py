"""How texts end, and who comes first, with the real model and tokenizer."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from maskdial.errors import DeadlineError, ValidationError
from tests.held import HOUR, HeldTimers, held

pytestmark = pytest.mark.slow

STORY = "Once upon a time there was a little"
EOS = 0
CERTAIN = ((EOS, 100.0),)


def test_the_end_of_sequence_token_ends_a_text(starter: Any) -> None:
    (reply,) = starter.bench().run_alone([starter.request(STORY, logit_bias=CERTAIN)])
    assert (reply.token_ids, reply.text, reply.reason) == ((EOS,), "", "eos_token")


@pytest.mark.parametrize("min_new_tokens", [1, 5, 19])
def test_it_is_held_back_until_there_are_enough_tokens(starter: Any, min_new_tokens: int) -> None:
    """And what is written meanwhile is what would be written without the bias."""
    plain, biased = starter.bench().run_alone(
        [
            starter.request(STORY),
            starter.request(STORY, logit_bias=CERTAIN, min_new_tokens=min_new_tokens),
        ]
    )
    assert biased.token_ids == (*plain.token_ids[:min_new_tokens], EOS)
    assert biased.logprobs[:-1] == plain.logprobs[:min_new_tokens]
    assert biased.reason == "eos_token"


def test_it_can_be_ignored(starter: Any) -> None:
    request = starter.request(STORY, logit_bias=CERTAIN, ignore_eos=True, max_new_tokens=7)
    (reply,) = starter.bench().run_alone([request])
    assert (reply.token_ids, reply.text, reply.reason) == ((EOS,) * 7, "", "length")


def test_stop_tokens_end_a_text_and_are_part_of_it(starter: Any) -> None:
    bench = starter.bench()
    (plain,) = bench.run_alone([starter.request(STORY, max_new_tokens=30)])
    for stop in sorted(set(plain.token_ids)):
        end = plain.token_ids.index(stop) + 1
        request = starter.request(STORY, max_new_tokens=30, stop_token_ids=frozenset({stop, EOS}))
        (reply,) = bench.run_alone([request])
        assert reply.token_ids == plain.token_ids[:end]
        assert reply.logprobs == plain.logprobs[:end]
        assert reply.text == "".join(plain.texts[:end])
        assert reply.reason == "stop_sequence"


def test_stop_tokens_and_strings_wait_for_the_least_length(starter: Any) -> None:
    bench = starter.bench()
    (plain,) = bench.run_alone([starter.request(STORY, max_new_tokens=30)])
    stop = plain.token_ids[3]
    least = starter.request(
        STORY, max_new_tokens=30, min_new_tokens=10, stop_token_ids=frozenset({stop})
    )
    (reply,) = bench.run_alone([least])
    assert stop not in reply.token_ids[:10]
    assert len(reply.token_ids) >= 10
    (reply,) = bench.run_alone(
        [starter.request(STORY, max_new_tokens=30, min_new_tokens=10, stop=(" ",))]
    )
    assert reply.token_ids == plain.token_ids[: len(reply.token_ids)]
    assert len(reply.token_ids) >= 10
    assert reply.reason == "stop_sequence"


@pytest.mark.parametrize("include_stop", [True, False])
def test_a_stop_string_is_found_wherever_it_begins(starter: Any, include_stop: bool) -> None:
    """Every piece of the text in turn, mostly across the borders of tokens."""
    bench = starter.bench()
    (plain,) = bench.run_alone([starter.request(STORY, max_new_tokens=16)])
    starts = range(0, len(plain.text) - 4, 3)
    stops = [plain.text[start : start + 4] for start in starts]
    replies = bench.run_together(
        [
            starter.request(STORY, max_new_tokens=16, stop=(stop,), include_stop=include_stop)
            for stop in stops
        ]
    )
    for stop, reply in zip(stops, replies, strict=True):
        before, found, _ = plain.text.partition(stop)
        assert reply.text == before + (found if include_stop else "")
        assert "".join(reply.texts) == reply.text
        assert reply.reason == "stop_sequence"
        assert reply.token_ids == plain.token_ids[: len(reply.token_ids)]


@pytest.mark.parametrize("num_prompt", [1, 63, 90, 94, 95])
def test_a_full_context_ends_a_text(starter: Any, num_prompt: int) -> None:
    """To the last place, alone and beside others; ``min_new_tokens`` changes nothing about it."""
    request = starter.request(range(1, 1 + num_prompt), max_new_tokens=500, min_new_tokens=500)
    bench = starter.bench(max_length=96, slots=3)
    (alone,) = bench.run_alone([request])
    assert (len(alone.token_ids), alone.reason) == (96 - num_prompt, "length")
    short = starter.request(range(7, 20), max_new_tokens=3)
    together = bench.run_together([short, request, short, request, request, short])
    assert together[1] == together[3] == together[4] == alone
    num_tokens = len(alone.token_ids)
    (longer,) = starter.bench().run_alone([request])
    assert alone.token_ids == longer.token_ids[:num_tokens]
    assert alone.logprobs == longer.logprobs[:num_tokens]


def test_a_prompt_that_fills_the_context_is_refused(starter: Any) -> None:
    bench = starter.bench(max_length=96)

    async def main() -> None:
        with pytest.raises(ValidationError, match=r"96 tokens.*a context of 96"):
            bench.submit(starter.request(range(96)))

    asyncio.run(main())


def test_lower_priorities_start_earlier(starter: Any) -> None:
    """In one slot they come one after the other; the oldest has every fourth start."""
    bench = starter.bench(slots=1)
    request = starter.request(STORY, max_new_tokens=2)

    async def main() -> list[int]:
        started: list[int] = []
        readers = [
            bench.submit(replace(request, priority=priority)) for priority in (9, 5, 5, 0, 1, -3)
        ]
        while bench.tally.num_open:
            await bench.step()
            started += [
                number
                for number, reader in enumerate(readers)
                if reader.events and number not in started
            ]
        return started

    assert asyncio.run(main()) == [5, 3, 4, 0, 1, 2]


@pytest.mark.parametrize("timeout", [0.0, 0.01])
def test_a_deadline_in_the_queue_and_in_the_slot(starter: Any, timeout: float) -> None:
    bench = starter.bench(slots=1)
    request = starter.request(STORY, max_new_tokens=400)

    async def main() -> None:
        running = bench.submit(request, timeout=timeout)
        bench.engine.step()
        bench.engine.step()
        waiting = bench.submit(request, timeout=timeout)
        await running.ended()
        await waiting.ended()
        for reader in (running, waiting):
            assert isinstance(reader.error, DeadlineError)
            assert "within its timeout" in reader.error.message
        assert [len(running.events), len(waiting.events)] == [2, 0]
        assert bench.tally.num_waiting == 0
        await bench.step()
        assert bench.tally.num_running == 0

    asyncio.run(main())
    assert bench.tally.cancelled == {"timeout": 2}


def test_a_deadline_after_the_end_is_none(starter: Any) -> None:
    bench = starter.bench()
    request = starter.request(STORY, max_new_tokens=1)

    async def main() -> Any:
        sequence = request.sequence()
        stream = bench.engine.stream(sequence, timeout=0)
        bench.engine.step()  # it ends before the event loop comes to the timer
        event = await anext(stream)
        assert event.finish is not None
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(main())
    assert bench.tally.cancelled == {}


@pytest.mark.parametrize("leave", [True, False])
def test_on_its_own_thread(starter: Any, leave: bool) -> None:
    """The same through the engine's thread: a text, and one that is left or runs out of time."""
    bench = starter.bench(slots=2)
    request = starter.request(STORY, max_new_tokens=30)
    num_steps = 60  # enough for the text, and far too few for the other
    (wanted,) = starter.bench().run_alone([request])
    endless = starter.request(STORY, max_new_tokens=500, ignore_eos=True)

    async def main() -> None:
        await bench.engine.warm_up()
        with (
            held(bench.engine, num_steps),
            HeldTimers(asyncio.get_running_loop()) as timers,
        ):
            text, other = bench.submit(request), bench.submit(endless, timeout=HOUR)
            await text.ended()
            if leave:
                await other.leave()
            else:
                timers.go_off()
                await other.ended()
        last = bench.submit(request)
        await last.ended()
        assert text.reply == last.reply == wanted
        assert leave == (other.error is None)

    bench.engine.start()
    try:
        asyncio.run(main())
    finally:
        bench.engine.stop(grace=0)
    assert bench.tally.cancelled == {"disconnect" if leave else "timeout": 1}
    assert bench.tally.kv_bytes == 0
