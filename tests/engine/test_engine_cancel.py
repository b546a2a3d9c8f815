"""Whoever leaves, whenever, the others get what they would get alone."""

import asyncio
import random
from typing import Any

import pytest

from maskdial.errors import DeadlineError


@pytest.fixture(scope="module")
def requests(starter: Any) -> list[Any]:
    rng = random.Random(4)
    return [
        starter.request(
            starter.random_prompt(rng, num_prompt),
            max_new_tokens=25,
            do_sample=seed % 2 == 0,
            temperature=0.8,
            seed=seed,
            frequency_penalty=0.3,
            top_n_tokens=2,
            ignore_eos=True,
        )
        for seed, num_prompt in enumerate((5, 40, 150, 20))
    ]


@pytest.fixture(scope="module")
def alone(starter: Any, requests: list[Any]) -> list[Any]:
    replies: list[Any] = starter.bench().run_alone(requests)
    return replies


@pytest.mark.parametrize(
    ("num_prompt", "steps_before", "state"),
    [
        (30, 0, "WAITING"),
        (300, 0, "WAITING"),
        (300, 1, "PREFILLING"),
        (300, 3, "PREFILLING"),
        (30, 1, "DECODING"),
        (300, 9, "DECODING"),
    ],
)
@pytest.mark.parametrize("place", range(4))
def test_one_leaves(
    starter: Any,
    requests: list[Any],
    alone: list[Any],
    place: int,
    num_prompt: int,
    steps_before: int,
    state: str,
) -> None:
    """The one that leaves is between others that stay, so that its slot is a hole.

    Those that write do so at every step, and never pause.
    """
    bench = starter.bench(slots=4, chunk=64, cache_blocks=place % 2 * 170)
    leaving = starter.request(starter.random_prompt(random.Random(5), num_prompt), ignore_eos=True)

    async def main() -> list[Any]:
        readers = [bench.submit(request) for request in requests[:place]]
        await bench.step(6)  # they decode
        num_tokens = [len(reader.events) for reader in readers]
        gone = bench.submit(leaving)
        await bench.step(steps_before)
        readers += [bench.submit(request) for request in requests[place:]]
        assert gone.sequence.state.name == state
        num_gone = len(gone.events)
        await gone.leave()
        await bench.step()
        assert [len(reader.events) for reader in readers[:place]] == [
            num + steps_before + 1 for num in num_tokens
        ]
        assert gone.sequence.state.name == "ENDED"
        assert gone.sequence.slot == -1
        assert len(gone.events) == num_gone
        await bench.run_dry()
        return [reader.reply for reader in readers]

    assert asyncio.run(main()) == alone
    assert bench.tally.cancelled == {"disconnect": 1}
    assert bench.tally.kv_bytes == 0


@pytest.mark.parametrize("steps_before", [0, 1, 4, 12])
def test_one_runs_out_of_time(
    starter: Any, requests: list[Any], alone: list[Any], steps_before: int
) -> None:
    """In the queue, while its prompt is read, and while it writes."""
    bench = starter.bench(slots=3, chunk=64)
    prompt = starter.random_prompt(random.Random(6), 200)
    late = starter.request(prompt, max_new_tokens=50, ignore_eos=True)

    async def main() -> list[Any]:
        readers = [bench.submit(request) for request in requests[:2]]
        await bench.step(3)
        expired = bench.submit(late, timeout=0.01)
        readers += [bench.submit(request) for request in requests[2:]]
        for _ in range(steps_before):  # no time passes for the event loop's timers
            bench.engine.step()
        await expired.ended()
        assert isinstance(expired.error, DeadlineError)
        await bench.step()
        assert expired.sequence.slot == -1
        await bench.run_dry()
        return [reader.reply for reader in readers]

    assert asyncio.run(main()) == alone
    assert bench.tally.cancelled == {"timeout": 1}
    assert bench.tally.kv_bytes == 0


def test_everyone_leaves_at_once(starter: Any, requests: list[Any], alone: list[Any]) -> None:
    bench = starter.bench(slots=3, chunk=64)

    async def main() -> None:
        readers = [bench.submit(request) for request in requests * 3]
        await bench.step(7)
        for reader in readers:
            await reader.leave()
        await bench.step()
        assert bench.tally.num_open == 0
        assert bench.tally.kv_bytes == 0

    asyncio.run(main())
    assert bench.tally.cancelled == {"disconnect": 12}
    assert bench.run_alone(requests) == alone
