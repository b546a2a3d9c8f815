"""Shared prompts, the prefix cache, and draft tokens: fewer passes, and the same text."""

import asyncio

import pytest

from maskdial.causal.events import TokenEvent
from maskdial.causal.prefix_cache import PrefixCache
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence, SharedPrompt
from maskdial.metrics import Metrics
from tests.unit.scripted_model import (
    BLOCK,
    MAX_LENGTH,
    Bench,
    FakeRunner,
    expected_tokens,
    make_sequence,
)


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_copies_of_a_prompt_are_as_alone_and_read_once(slots: int, overlaps: bool) -> None:
    def copies(shared: SharedPrompt | None) -> list[Sequence]:
        return [
            Sequence(
                range(20),
                SamplingParams(max_new_tokens=6, do_sample=True, temperature=4),
                seed=seed,
                shared_prompt=shared,
            )
            for seed in range(5)
        ]

    async def generate(shared: SharedPrompt | None) -> tuple[list[list[int]], int]:
        runner = FakeRunner(slots=slots)
        bench = Bench(runner, overlaps=overlaps)
        readers = [bench.read(sequence) for sequence in copies(shared)]
        await bench.run_dry()
        return [reader.token_ids for reader in readers], runner.num_read

    alone, num_read_alone = asyncio.run(generate(None))
    together, num_read = asyncio.run(generate(SharedPrompt()))
    assert together == alone
    assert len(set(map(tuple, alone))) > 1
    assert (num_read, num_read_alone) == (20, 100)


def test_a_known_prompt_is_read_from_the_cache(overlaps: bool) -> None:
    async def main() -> None:
        runner = FakeRunner(slots=2)
        cache = PrefixCache(model="fake", block_tokens=BLOCK, max_bytes=10**6)
        bench = Bench(runner, prefix_cache=cache, overlaps=overlaps)
        for num_read in (21, 21 + 5):  # the last block and a token are read again
            reader = bench.read(make_sequence(range(21), 5))
            await bench.run_dry()
            assert reader.token_ids == expected_tokens(range(21), 5)
            assert runner.num_read == num_read
        assert bench.value("prefix_cache_queries_total") == 42
        assert bench.value("prefix_cache_hits_total") == 16

    asyncio.run(main())


def test_gauges_have_the_size_of_the_prefix_caches(overlaps: bool) -> None:
    """Of both engines while a model is replaced, and of none that has ended."""
    caches = [PrefixCache(model="fake", block_tokens=BLOCK, max_bytes=10**6) for _ in range(2)]

    async def fill(bench: Bench, cache: PrefixCache, length: int) -> None:
        bench.read(make_sequence(range(length), 2))
        await bench.run_dry()
        assert cache.num_blocks == length // BLOCK

    def gauges(bench: Bench) -> tuple[float, float]:
        return bench.value("prefix_cache_bytes"), bench.value("prefix_cache_blocks")

    async def main() -> None:
        metrics = Metrics()
        first, second = (
            Bench(FakeRunner(slots=2), prefix_cache=cache, overlaps=overlaps, reported=metrics)
            for cache in caches
        )
        await fill(first, caches[0], 21)
        await fill(second, caches[1], 2 * BLOCK)
        num_bytes = [cache.num_bytes for cache in caches]
        assert all(num_bytes)
        assert gauges(first) == (sum(num_bytes), sum(cache.num_blocks for cache in caches))
        first.engine.start()
        first.engine.stop(10.0)
        assert gauges(first) == (num_bytes[1], caches[1].num_blocks)

    asyncio.run(main())


def test_gauges_count_what_both_engines_of_a_name_do(overlaps: bool) -> None:
    names = ("queue_size", "requests_running", "kv_cache_bytes", "kv_cache_usage_ratio")

    async def main() -> None:
        metrics, alone = Metrics(), []
        for reported in (None, metrics):
            benches = []
            for length, num_sequences in ((20, 3), (7, 2)):
                bench = Bench(FakeRunner(slots=1), overlaps=overlaps, reported=reported)
                for _ in range(num_sequences):
                    bench.read(make_sequence(range(length), 9))
                await bench.step(4)
                benches.append(bench)
                alone.append([bench.ratio(name) for name in names])
        first, second, both = alone[0], alone[1], alone[3]
        assert all(first)
        assert both == [sum(parts) for parts in zip(first, second, strict=True)]
        old, new = benches
        old.engine.fail("it was replaced")
        assert [new.ratio(name) for name in names] == second
        await new.run_dry()
        assert [new.ratio(name) for name in names] == [0, 0, 0, 0]

    asyncio.run(main())


def test_what_a_copy_finds_in_the_cache_is_not_counted(overlaps: bool) -> None:
    """It comes from the prompt's own prefill, when the first copy has ended meanwhile."""

    async def main() -> None:
        cache = PrefixCache(model="fake", block_tokens=BLOCK, max_bytes=10**6)
        bench = Bench(FakeRunner(slots=2), prefix_cache=cache, overlaps=overlaps)
        for num_cached in (0, 16):
            shared, params = SharedPrompt(), SamplingParams(max_new_tokens=2)
            copies = [Sequence(range(21), params, shared_prompt=shared) for _ in range(2)]
            for copy in copies:
                bench.read(copy)
                await bench.run_dry()
            assert [copy.num_reused for copy in copies] == [num_cached, 16]
            assert copies[0].num_cached == num_cached

    asyncio.run(main())


def test_drafts_change_nothing_but_the_number_of_passes(overlaps: bool) -> None:
    """The scripted model repeats itself after a while: drafts are accepted, then rejected."""

    async def generate(max_drafts: int) -> tuple[list[TokenEvent], int]:
        runner = FakeRunner(slots=2, eos_after=90)
        runner.period = 7
        bench = Bench(runner, max_drafts=max_drafts, overlaps=overlaps)
        reader = bench.read(make_sequence(range(10), 100))
        await bench.run_dry()
        return reader.events, len(runner.passes)

    plain, num_passes = asyncio.run(generate(0))
    drafted, num_fewer = asyncio.run(generate(8))
    assert plain[-1].finish is not None
    assert plain[-1].finish.reason == "eos_token"
    assert [(e.index, e.token_id, e.text) for e in drafted] == [
        (e.index, e.token_id, e.text) for e in plain
    ]
    assert num_fewer < num_passes / 3


def test_drafts_stay_within_the_context(overlaps: bool) -> None:
    async def main() -> None:
        runner = FakeRunner(slots=1)
        runner.period = 3
        bench = Bench(runner, max_drafts=8, overlaps=overlaps)
        reader = bench.read(make_sequence(range(9), MAX_LENGTH))
        await bench.run_dry()
        assert reader.finish.generated_tokens == MAX_LENGTH - 9

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_several_texts_have_drafts_in_the_shared_pass(fails: bool) -> None:
    """If it fails, they get a token each without drafts."""

    async def generate(max_drafts: int) -> tuple[list[list[int]], FakeRunner]:
        runner = FakeRunner(slots=3, shares_passes=True)
        runner.period = 7

        def fail(kind: str) -> None:
            if fails and kind == "shared" and runner.passes.count("shared") % 3 == 1:
                raise RuntimeError("no memory")

        runner.on_pass = fail
        bench = Bench(runner, max_drafts=max_drafts, overlaps=False)
        readers = [bench.read(make_sequence(range(first, first + 10), 60)) for first in (0, 4, 30)]
        await bench.run_dry()
        return [reader.token_ids for reader in readers], runner

    plain, before = asyncio.run(generate(0))
    drafted, after = asyncio.run(generate(8))
    assert drafted == plain
    assert len(after.passes) < len(before.passes) / (1 if fails else 2)
    assert after.passes.count("shared") > 5
