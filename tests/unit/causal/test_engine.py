"""The engine over a scripted model: batching, prompts in chunks, room, memory."""

import asyncio
import time
from collections.abc import Iterator

import numpy as np
import pytest

import maskdial.causal.engine as engine_module
from maskdial.causal.events import PromptLogprob
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence, SharedPrompt
from maskdial.errors import OverloadedError, ValidationError
from tests.unit.scripted_model import (
    BLOCK,
    MAX_LENGTH,
    VOCAB,
    Bench,
    FakeRunner,
    expected_tokens,
    letters,
    make_sequence,
    next_token,
)


def test_a_sequence_from_start_to_end(overlaps: bool) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=2), overlaps=overlaps)
        reader = bench.read(make_sequence(range(20), 6))
        await bench.run_dry()
        wanted = expected_tokens(range(20), 6)
        assert reader.token_ids == wanted
        assert [event.index for event in reader.events] == [1, 2, 3, 4, 5, 6]
        assert [event.text for event in reader.events] == [letters([t]) for t in wanted]
        assert [event.finish is None for event in reader.events] == [True] * 5 + [False]
        finish = reader.finish
        assert finish.reason == "length"
        assert finish.generated_text == letters(wanted)
        assert (finish.generated_tokens, finish.input_length, finish.seed) == (6, 20, None)
        assert finish.queue_seconds >= 0
        assert finish.inference_seconds > 0
        assert bench.value("generation_tokens_total") == 6
        assert bench.value("kv_cache_bytes") == 0
        assert bench.cancelled == {}

    asyncio.run(main())


def test_eight_streams_started_at_different_times_progress_together(overlaps: bool) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=8), overlaps=overlaps)
        readers = []
        for number in range(8):
            readers.append(bench.read(make_sequence([number] * (number + 1), 60)))
            await bench.step(3)
        before = [len(reader.events) for reader in readers]
        assert before == sorted(before, reverse=True)
        assert min(before) > 0
        await bench.step(10)
        assert [len(r.events) - b for r, b in zip(readers, before, strict=True)] == [10] * 8
        await bench.run_dry()
        for number, reader in enumerate(readers):
            assert reader.token_ids == expected_tokens([number] * (number + 1), 60)

    asyncio.run(main())


def test_a_long_prompt_does_not_stall_the_others(overlaps: bool) -> None:
    async def main() -> None:
        runner = FakeRunner(slots=4)
        bench = Bench(runner, overlaps=overlaps)
        readers = [bench.read(make_sequence([n], 100)) for n in range(3)]
        await bench.step(4)
        long = bench.read(make_sequence(range(100), 5))
        await bench.step(overlaps)
        for _ in range(12):
            before = [len(reader.events) for reader in readers]
            await bench.step()
            assert [len(r.events) - b for r, b in zip(readers, before, strict=True)] == [1] * 3
            assert long.events == []
        await bench.step()
        assert long.token_ids == expected_tokens(range(100), 1)
        assert runner.passes[-26:] == ["decode", "prefill"] * 13
        await bench.run_dry()
        assert long.token_ids == expected_tokens(range(100), 5)

    asyncio.run(main())


def test_steps_share_passes_with_prompts_where_the_model_can(overlaps: bool) -> None:
    """One chunk, several prompts at once, log-probabilities of a prompt: the same texts."""

    async def main() -> None:
        runner = FakeRunner(slots=4, shares_passes=True)
        bench = Bench(runner, overlaps=overlaps)
        reader = bench.read(make_sequence([1], 100))
        await bench.step(4)
        runner.passes.clear()
        long = bench.read(make_sequence(range(30), 5, prompt_logprobs=True))
        await bench.step(overlaps)
        await bench.step(6)
        short = [bench.read(make_sequence([n, n], 5)) for n in (2, 3)]
        await bench.run_dry()
        assert runner.passes.count("shared") >= 30 // BLOCK
        assert "prefill" not in runner.passes
        assert "prefill together" not in runner.passes
        assert reader.token_ids == expected_tokens([1], 100)
        assert long.token_ids == expected_tokens(range(30), 5)
        assert [each.token_ids for each in short] == [expected_tokens([n, n], 5) for n in (2, 3)]

    asyncio.run(main())


def test_many_sequences_through_few_slots(overlaps: bool) -> None:
    """Slots are reused, holes filled and rows moved: every text still comes out as if alone."""

    async def main() -> None:
        rng = np.random.default_rng(0)
        bench = Bench(FakeRunner(slots=3), overlaps=overlaps)
        wanted = []
        readers = []
        for _ in range(40):
            prompt = rng.integers(0, VOCAB - 1, rng.integers(1, 30)).tolist()
            count = int(rng.integers(1, 12))
            wanted.append(expected_tokens(prompt, count))
            readers.append(bench.read(make_sequence(prompt, count)))
            await bench.step(int(rng.integers(0, 6)))
        await bench.run_dry()
        assert [reader.token_ids for reader in readers] == wanted

    asyncio.run(main())


@pytest.mark.parametrize("num_prompt", [0, MAX_LENGTH])
def test_a_prompt_that_does_not_fit_is_refused(num_prompt: int, overlaps: bool) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=1), overlaps=overlaps)
        with pytest.raises(ValidationError, match=f"{num_prompt} tokens"):
            bench.engine.stream(make_sequence([0] * num_prompt))

    asyncio.run(main())


def test_a_full_queue_refuses_at_once(overlaps: bool) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=1), max_queue=2, overlaps=overlaps)
        readers = [bench.read(make_sequence([n])) for n in range(2)]
        with pytest.raises(OverloadedError):
            bench.engine.stream(make_sequence([9]))
        await bench.run_dry()
        assert [reader.finish.reason for reader in readers] == ["length"] * 2

    asyncio.run(main())


def test_sequences_are_queued_together_or_not_at_all(overlaps: bool) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=1), max_queue=2, overlaps=overlaps)
        with pytest.raises(OverloadedError):
            async with bench.engine.streams([make_sequence([n]) for n in range(3)]):
                pass
        assert bench.num_waiting == 0
        with pytest.raises(ValidationError, match="0 tokens"):
            async with bench.engine.streams([make_sequence([1]), make_sequence([])]):
                pass
        assert bench.num_waiting == 0
        async with bench.engine.streams([make_sequence([n], 3) for n in range(2)]) as streams:
            await bench.step()
            assert (bench.num_running, bench.num_waiting) == (1, 1)
        await bench.step(1 + overlaps)
        assert (bench.num_running, bench.num_waiting) == (0, 0)
        assert len(streams) == 2

    asyncio.run(main())


def test_no_step_runs_while_only_some_sequences_are_queued() -> None:
    """Though the engine's thread may: a shared prompt is prefilled once."""

    class Slow(list[Sequence]):
        def __iter__(self) -> Iterator[Sequence]:
            for sequence in super().__iter__():
                yield sequence
                time.sleep(0.05)

    async def main() -> None:
        runner = FakeRunner(slots=2)
        bench = Bench(runner, overlaps=False)
        bench.engine.start()
        await bench.engine.warm_up()
        num_warm = runner.num_read
        shared, params = SharedPrompt(), SamplingParams(max_new_tokens=1)
        copies = Slow(Sequence(range(5), params, shared_prompt=shared) for _ in range(4))
        async with bench.engine.streams(copies) as streams:
            for stream in streams:
                assert [event.index async for event in stream] == [1]
        assert runner.num_read - num_warm == 5
        await asyncio.to_thread(bench.engine.stop, 5)

    asyncio.run(main())


def test_a_seed_gives_the_same_text_in_company_and_alone(overlaps: bool) -> None:
    async def generate(company: int) -> list[int]:
        bench = Bench(FakeRunner(slots=4), overlaps=overlaps)
        others = [
            bench.read(make_sequence([n], 20, do_sample=True, seed=n)) for n in range(company)
        ]
        await bench.step(company)
        sampled = make_sequence([1, 2], 20, do_sample=True, temperature=3.0, seed=11)
        reader = bench.read(sampled)
        await bench.run_dry()
        assert reader.finish.seed == 11
        assert all(other.finish for other in others)
        return reader.token_ids

    assert asyncio.run(generate(0)) == asyncio.run(generate(3))


def test_log_probabilities_of_a_prompt_do_not_depend_on_how_it_is_read(overlaps: bool) -> None:
    async def logprobs(chunk: int) -> tuple[PromptLogprob, ...]:
        bench = Bench(FakeRunner(slots=1), chunk=chunk, overlaps=overlaps)
        reader = bench.read(make_sequence(range(21), 2, prompt_logprobs=True))
        await bench.run_dry()
        return reader.finish.prompt_logprobs

    first = asyncio.run(logprobs(BLOCK))
    assert len(first) == 20
    assert asyncio.run(logprobs(8 * BLOCK)) == first
    likely = [n for n in range(1, 21) if next_token(range(n)) == n]
    assert all(first[n - 1].logprob > -1 for n in likely)
    assert all(each.logprob < -4 for n, each in enumerate(first, 1) if n not in likely)


def test_memory_of_a_slot_goes_back_when_nobody_uses_it(
    monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    monkeypatch.setattr(engine_module, "_UNUSED_SLOT_SECONDS", 0.01)

    async def main() -> None:
        runner = FakeRunner(slots=3)
        bench = Bench(runner, overlaps=overlaps)
        bench.engine.start()
        await bench.engine.warm_up()
        for _ in range(2):
            reader = bench.read(make_sequence([0, 1], 40))
            await reader.task
            assert reader.token_ids == expected_tokens([0, 1], 40)
            assert await asyncio.to_thread(runner.cache.was_released.wait, 30)
            runner.cache.was_released.clear()
        assert set(runner.cache.released) == {0}
        await asyncio.to_thread(bench.engine.stop, 5)

    asyncio.run(main())
