"""The engine's lock, for which the event loop waits: nothing that takes long is done under it."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from maskdial.causal import engine as engine_module
from maskdial.causal.prefix_cache import PrefixCache
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence, SharedPrompt
from tests.unit.scripted_model import (
    BLOCK,
    NAME,
    Bench,
    FakeCache,
    FakeRunner,
    expected_tokens,
    make_sequence,
)

PROMPT = range(4 * BLOCK)


def others_get_the_lock(bench: Bench) -> bool:
    """Whether another thread can ask the engine for room meanwhile."""
    asking = threading.Thread(target=bench.engine.check_room, args=(1,), daemon=True)
    asking.start()
    asking.join(5)
    return not asking.is_alive()


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str, Bench], list[bool]]:
    """Notes at each call of a method whether others get the lock."""

    def note(owner: type, name: str, bench: Bench) -> list[bool]:
        method, found = getattr(owner, name), list[bool]()

        def noting(*arguments: Any) -> Any:
            found.append(others_get_the_lock(bench))
            return method(*arguments)

        monkeypatch.setattr(owner, name, noting)
        return found

    return note


def bench_with_cache(slots: int) -> Bench:
    cache = PrefixCache(model=NAME, block_tokens=BLOCK, max_bytes=10**6)
    return Bench(FakeRunner(slots), overlaps=False, prefix_cache=cache)


def test_prompts_are_hashed_without_the_lock(
    noted: Callable[[type, str, Bench], list[bool]],
) -> None:
    async def main() -> None:
        bench = bench_with_cache(slots=1)
        found = noted(PrefixCache, "keys", bench)
        readers = [bench.read(make_sequence([n, *PROMPT])) for n in range(3)]
        await bench.run_dry()
        assert found == [True] * 3
        for n, reader in enumerate(readers):
            assert reader.token_ids == expected_tokens([n, *PROMPT], 5)

    asyncio.run(main())


def test_a_shared_prompt_is_hashed_once(noted: Callable[[type, str, Bench], list[bool]]) -> None:
    async def main() -> None:
        bench, shared = bench_with_cache(slots=1), SharedPrompt()
        found = noted(PrefixCache, "keys", bench)
        params = SamplingParams(max_new_tokens=5)
        readers = [
            bench.read(Sequence(list(PROMPT), params, shared_prompt=shared)) for _ in range(3)
        ]
        await bench.run_dry()
        assert found == [True]
        assert {tuple(each.token_ids) for each in readers} == {tuple(expected_tokens(PROMPT, 5))}

    asyncio.run(main())


def test_memory_is_given_back_without_the_lock(
    monkeypatch: pytest.MonkeyPatch, noted: Callable[[type, str, Bench], list[bool]]
) -> None:
    monkeypatch.setattr(engine_module, "_UNUSED_SLOT_SECONDS", 0.0)

    async def main() -> None:
        runner = FakeRunner(slots=1)
        bench = Bench(runner, overlaps=False)
        found = noted(FakeCache, "release_pages", bench)
        bench.engine.start()
        try:
            reader = bench.read(make_sequence([1]))
            await reader.task
            assert await asyncio.to_thread(runner.cache.was_released.wait, 30)
            assert all(found)
        finally:
            bench.engine.stop(10)

    asyncio.run(main())
