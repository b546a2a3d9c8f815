"""Texts in the background that give up their slots go on from main memory, to the last bit."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from maskdial.causal.sequence import Sequence
from maskdial.engine.fairness import ClientUsage, usage_of_request

pytestmark = pytest.mark.slow

AMPLE = 100  # blocks


@pytest.fixture
def num_set_aside(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often a text was."""
    aside: list[Sequence] = []
    set_aside = Sequence.set_aside

    def note(sequence: Sequence) -> None:
        aside.append(sequence)
        set_aside(sequence)

    monkeypatch.setattr(Sequence, "set_aside", note)
    return lambda: len(aside)


def requests_of(starter: Any, number: int, seed: int) -> list[Any]:
    rng = random.Random(seed)
    return [
        starter.request(
            starter.random_prompt(rng, rng.randint(1, 200)),
            max_new_tokens=rng.randint(4, 20),
            do_sample=index % 2 == 1,
            seed=index,
            top_n_tokens=2,
            repetition_penalty=1.3,
            ignore_eos=True,
        )
        for index in range(number)
    ]


@pytest.mark.parametrize("max_drafts", [0, 4])
def test_texts_are_those_of_an_idle_server(
    starter: Any, num_set_aside: Callable[[], int], max_drafts: int
) -> None:
    """Others come one after the other, while all of the background has begun."""
    background, others = requests_of(starter, 4, 1), requests_of(starter, 8, 2)
    wanted = starter.bench().run_alone([*background, *others])
    bench = starter.bench(slots=3, cache_blocks=AMPLE, max_drafts=max_drafts)

    async def main() -> list[Any]:
        token = usage_of_request.set(ClientUsage("batch", background=True))
        readers = [bench.submit(request) for request in background]
        usage_of_request.reset(token)
        await bench.step(8)
        for request in others:
            readers.append(bench.submit(request))
            await bench.step(4)
        async with asyncio.timeout(60):
            while not all(reader.task.done() for reader in readers):
                await bench.step()
        return [reader.reply for reader in readers]

    assert asyncio.run(main()) == wanted
    assert num_set_aside() >= 3


def test_without_a_prefix_cache_there_is_no_memory_for_them(
    starter: Any, num_set_aside: Callable[[], int]
) -> None:
    (background, other) = requests_of(starter, 2, 3)
    bench = starter.bench(slots=1)

    async def main() -> tuple[Any, Any]:
        token = usage_of_request.set(ClientUsage("batch", background=True))
        first = bench.submit(background)
        usage_of_request.reset(token)
        await bench.step(8)
        second = bench.submit(other)
        await bench.run_dry()
        return first, second

    first, second = asyncio.run(main())
    assert "other requests needed the slot; try again" in str(first.error)
    assert second.reply.reason == "length"
    assert num_set_aside() == 0
