"""Copies of a request share their prompt, and each is what it would be alone."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from maskdial.causal.sequence import SharedPrompt
from maskdial.errors import GenerationError

NUM_COPIES = 5


def copies_of(request: Any) -> list[Any]:
    """The same prompt and parameters, with a seed each and texts of several lengths."""
    return [
        replace(request, params=replace(request.params, max_new_tokens=1 + 3 * seed), seed=seed)
        for seed in range(NUM_COPIES)
    ]


@pytest.fixture(scope="module")
def copies(starter: Any) -> list[Any]:
    """Their prompt takes three chunks of 64 tokens."""
    prompt = starter.random_prompt(random.Random(1), 170)
    return copies_of(starter.request(prompt, do_sample=True))


@pytest.fixture(scope="module")
def alone(starter: Any, copies: list[Any]) -> list[Any]:
    replies: list[Any] = starter.bench().run_alone(copies)
    return replies


@pytest.mark.parametrize(
    ("num_prompt", "prompt_logprobs"),
    [(1, False), (2, True), (64, False), (65, True), (300, False), (300, True)],
)
def test_each_copy_is_what_it_is_alone(
    starter: Any, num_prompt: int, prompt_logprobs: bool
) -> None:
    prompt = starter.random_prompt(random.Random(num_prompt), num_prompt)
    copies = copies_of(
        starter.request(prompt, do_sample=True, top_p=0.9, prompt_logprobs=prompt_logprobs)
    )
    alone = starter.bench().run_alone(copies)
    assert len({reply.token_ids for reply in alone}) == NUM_COPIES
    for slots in (1, 3, 8):
        bench = starter.bench(slots=slots)
        assert asyncio.run(run_with_others(starter, bench, copies)) == alone
        assert bench.tally.num_read == num_prompt + 2 * 89


async def run_with_others(starter: Any, bench: Any, copies: list[Any]) -> list[Any]:
    shared = SharedPrompt()
    other = starter.request(range(1, 90), max_new_tokens=4)
    others = [bench.submit(other)]
    readers = [bench.submit(copy, shared) for copy in copies]
    others.append(bench.submit(other))
    await bench.run_dry()
    assert others[0].reply == others[1].reply
    return [reader.reply for reader in readers]


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("steps_before", range(5))
def test_the_others_go_on_without_the_one_that_reads(
    starter: Any, copies: list[Any], alone: list[Any], slots: int, steps_before: int
) -> None:
    """It leaves in the queue, while it reads, or later."""
    bench = starter.bench(slots=slots, chunk=64)

    async def main() -> list[Any]:
        shared = SharedPrompt()
        first = bench.submit(
            replace(copies[0], params=copies[-1].params, seed=copies[-1].seed), shared
        )
        readers = [bench.submit(copy, shared) for copy in copies]
        await bench.step(steps_before)
        await first.leave()
        await bench.run_dry()
        return [reader.reply for reader in readers]

    assert asyncio.run(main()) == alone
    assert bench.tally.num_read <= 2 * 170
    assert bench.tally.kv_bytes == 0


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("failing_chunk", [0, 1, 2])
def test_a_prompt_that_was_not_read_is_left_to_nobody(
    starter: Any,
    copies: list[Any],
    alone: list[Any],
    slots: int,
    failing_chunk: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The copy whose pass fails ends with an error; the next one reads the prompt for the rest."""
    bench = starter.bench(slots=slots, chunk=64)
    bench.runner.fail_at = failing_chunk

    async def main() -> list[Any]:
        shared = SharedPrompt()
        readers = [bench.submit(copy, shared) for copy in copies]
        await bench.run_dry()
        assert isinstance(readers[0].error, GenerationError)
        return [reader.reply for reader in readers]

    assert asyncio.run(main())[1:] == alone[1:]
    assert "the pass was made to fail" in caplog.text


def test_copies_may_end_before_the_next_one_arrives(
    starter: Any, copies: list[Any], alone: list[Any]
) -> None:
    """The prompt is then read again, by a sequence that leaves half-way, and once more."""
    bench = starter.bench(slots=1, chunk=64)

    async def main() -> list[Any]:
        shared = SharedPrompt()
        first = bench.submit(copies[0], shared)
        await bench.run_dry()
        second = bench.submit(copies[1], shared)
        rest = [bench.submit(copy, shared) for copy in copies[2:]]
        await bench.step()
        await second.leave()
        await bench.run_dry()
        return [first.reply, *(reader.reply for reader in rest)]

    assert asyncio.run(main()) == [alone[0], *alone[2:]]
    assert bench.tally.num_read == 170 + 64 + 170
