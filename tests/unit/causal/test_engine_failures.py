"""Passes and texts that fail: what was in them fails, and nothing else."""

import asyncio
import logging
from collections.abc import Sequence as SequenceOf

import pytest

from maskdial.errors import GenerationError
from tests.unit.scripted_model import (
    Bench,
    FakeRunner,
    LetterDetokenizer,
    expected_tokens,
    make_sequence,
)


def test_a_failing_pass_ends_only_what_was_in_it(
    caplog: pytest.LogCaptureFixture, overlaps: bool
) -> None:
    async def main() -> None:
        runner = FakeRunner(slots=3)
        bench = Bench(runner, overlaps=overlaps)
        decoding = [bench.read(make_sequence([n], 50)) for n in range(2)]
        await bench.step(3)
        prefilling = bench.read(make_sequence(range(30), 5))
        await bench.step(2)

        def fail_decode(kind: str) -> None:
            if kind == "decode":
                raise RuntimeError("out of cheese")

        runner.on_pass = fail_decode
        await bench.step()
        assert bench.num_running == 1
        for reader in decoding:
            with pytest.raises(GenerationError, match="out of cheese"):
                await reader.task
        runner.on_pass = lambda kind: None
        await bench.run_dry()
        assert prefilling.token_ids == expected_tokens(range(30), 5)

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())


@pytest.mark.parametrize("shares_passes", [False, True])
def test_a_failing_chunk_ends_its_own_prompt_only(
    caplog: pytest.LogCaptureFixture, overlaps: bool, shares_passes: bool
) -> None:
    """A pass that fails is run again in two, if it was shared."""

    async def main() -> None:
        runner = FakeRunner(slots=3, shares_passes=shares_passes)
        bench = Bench(runner, overlaps=overlaps)
        decoding = bench.read(make_sequence([1], 20))
        await bench.step(3)
        prefilling = bench.read(make_sequence(range(30), 5))
        waiting = bench.read(make_sequence([2], 5))

        def fail_prefill(kind: str) -> None:
            if kind in ("prefill", "shared"):
                raise RuntimeError("out of cheese")

        await bench.step(overlaps)
        runner.on_pass = fail_prefill
        await bench.step()
        assert (bench.num_running, bench.num_waiting) == (1, 1)
        runner.on_pass = lambda kind: None
        with pytest.raises(GenerationError, match="out of cheese"):
            await prefilling.task
        await bench.run_dry()
        assert decoding.token_ids == expected_tokens([1], 20)
        assert waiting.token_ids == expected_tokens([2], 5)

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())


def test_a_prompt_read_in_both_directions_fails_with_the_pass_that_it_shares(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is read in one piece, and there is no other pass that computes it."""

    async def main() -> None:
        runner = FakeRunner(slots=3, shares_passes=True)
        bench = Bench(runner, overlaps=False)
        decoding = bench.read(make_sequence([1], 30))
        await bench.step(3)
        runner.passes.clear()
        read, lost = (make_sequence(range(30), 5) for _ in range(2))
        read.full_prompt = lost.full_prompt = True
        reader = bench.read(read)
        await bench.step(2)
        assert runner.passes == ["shared", "decode"]

        def fail_shared(kind: str) -> None:
            if kind == "shared":
                raise RuntimeError("out of cheese")

        runner.on_pass = fail_shared
        loser = bench.read(lost)
        await bench.step()
        runner.on_pass = lambda kind: None
        with pytest.raises(GenerationError, match="out of cheese"):
            await loser.task
        await bench.run_dry()
        assert reader.token_ids == expected_tokens(range(30), 5)
        assert decoding.token_ids == expected_tokens([1], 30)

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())


def test_prompts_that_are_read_one_by_one_after_a_failed_pass_keep_their_own_logits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each of their passes writes over the logits of the one before."""

    async def main() -> None:
        runner = FakeRunner(slots=4, shares_passes=True)
        bench = Bench(runner, overlaps=False)
        decoding = bench.read(make_sequence([1], 30))
        await bench.step(3)
        lost = make_sequence([9, 9], 5)
        lost.full_prompt = True
        loser = bench.read(lost)
        plain = [bench.read(make_sequence([n, 4], 5)) for n in (2, 3)]

        def fail_shared(kind: str) -> None:
            if kind == "shared":
                raise RuntimeError("out of cheese")

        runner.on_pass = fail_shared
        runner.passes.clear()
        await bench.step()
        assert runner.passes == ["shared", "decode", "prefill", "prefill"]
        runner.on_pass = lambda kind: None
        with pytest.raises(GenerationError, match="out of cheese"):
            await loser.task
        await bench.run_dry()
        assert [reader.token_ids for reader in plain] == [
            expected_tokens([n, 4], 5) for n in (2, 3)
        ]
        assert decoding.token_ids == expected_tokens([1], 30)

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())


def test_logits_that_are_no_numbers_end_their_own_sequence_only(overlaps: bool) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=3, nan_after=6), overlaps=overlaps)
        first = bench.read(make_sequence([1] * 4, 30))
        second = bench.read(make_sequence([2] * 10, 30))
        await bench.run_dry()
        with pytest.raises(GenerationError, match="not numbers"):
            await first.task
        assert first.token_ids == expected_tokens([1] * 4, 2)
        assert second.token_ids == expected_tokens([2] * 10, 30)

    asyncio.run(main())


def test_a_fault_in_one_text_ends_that_text_only(
    caplog: pytest.LogCaptureFixture, overlaps: bool
) -> None:
    class Stumbling(LetterDetokenizer):
        def push(self, token_id: int) -> str:
            raise KeyError("no such letter")

        def decoder(self, prompt_ids: SequenceOf[int]) -> LetterDetokenizer:
            return self if prompt_ids[0] == 1 else LetterDetokenizer()

    async def main() -> None:
        bench = Bench(FakeRunner(slots=2), detokenizer=Stumbling(), overlaps=overlaps)
        unlucky, lucky = (bench.read(make_sequence([n, 5], 9)) for n in (1, 2))
        await bench.run_dry()
        with pytest.raises(GenerationError, match="no such letter"):
            await unlucky.task
        assert lucky.token_ids == expected_tokens([2, 5], 9)

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())
