"""The engine and the prefix cache on disk: what waits for it, what does not, and for how long."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskdial.causal.prefix_cache import PrefixCache
from maskdial.causal.prefix_disk import record
from maskdial.causal.prefix_disk import tier as tier_module
from maskdial.causal.prefix_disk.record import Owner
from maskdial.causal.prefix_disk.store import DiskStore
from maskdial.causal.prefix_disk.throughput import Throughput
from maskdial.causal.prefix_disk.tier import DiskTier
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence, SharedPrompt
from maskdial.engine.fairness import ClientUsage, usage_of_request
from tests.disk import opened
from tests.unit.scripted_model import (
    BLOCK,
    Bench,
    FakeRunner,
    expected_tokens,
    make_sequence,
)

PROMPT = range(21)  # five blocks and a token
BLOCK_BYTES = 8 * BLOCK


def new_bench(
    store: DiskStore,
    *,
    slots: int = 2,
    max_blocks: int = 1000,
    overlaps: bool = False,
    shared: bool = False,
) -> tuple[Bench, DiskTier]:
    """An engine whose memory is empty; the scripted model's blocks are token ids."""
    max_bytes = max_blocks * BLOCK_BYTES
    cache = PrefixCache(model="fake", block_tokens=BLOCK, max_bytes=max_bytes, shared=shared)
    tier = DiskTier(store, cache, model="fake", dtype=np.dtype(np.int64), block_shape=(BLOCK,))
    runner = FakeRunner(slots=slots)
    return Bench(runner, overlaps=overlaps, prefix_cache=cache, prefix_disk=tier), tier


def read_once(folder: Path, prompt: range = PROMPT) -> None:
    """A server that reads a prompt, and ends."""

    async def main(store: DiskStore) -> None:
        bench, _ = new_bench(store)
        bench.read(make_sequence(prompt, 1))
        await bench.run_dry()

    with opened(folder) as store:
        asyncio.run(main(store))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    read_once(tmp_path)
    return tmp_path


class Door:
    """Stops the thread that reads, before each record."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()

    def close(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = record.read

        def read(*arguments: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(60)
            return real(*arguments)

        monkeypatch.setattr(record, "read", read)


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    door = Door()
    door.close(monkeypatch)
    yield door
    door.opened.set()


def test_a_prompt_of_the_last_server_is_not_read_again(folder: Path, overlaps: bool) -> None:
    async def main(store: DiskStore) -> None:
        bench, _ = new_bench(store, overlaps=overlaps)
        for num_read, num_from_disk in ((5, 16), (10, 16)):  # the second time, from memory
            reader = bench.read(make_sequence(PROMPT, 5))
            await bench.run_dry()
            assert reader.token_ids == expected_tokens(PROMPT, 5)
            assert bench.runner.num_read == num_read
            assert bench.value("prefix_cache_disk_hits_total") == num_from_disk
        assert bench.value("prefix_cache_hits_total") == 32

    with opened(folder) as store:
        asyncio.run(main(store))


def test_what_memory_has_evicted_comes_from_disk(tmp_path: Path) -> None:
    async def main(store: DiskStore) -> None:
        bench, _ = new_bench(store, max_blocks=6)
        for prompt in (PROMPT, range(30, 51), PROMPT):
            reader = bench.read(make_sequence(prompt, 5))
            await bench.run_dry()
            store_is_idle(store)
            assert reader.token_ids == expected_tokens(prompt, 5)
        assert bench.runner.num_read == 21 + 21 + 5
        assert bench.value("prefix_cache_disk_hits_total") > 0

    with opened(tmp_path) as store:
        asyncio.run(main(store))


def store_is_idle(store: DiskStore) -> None:
    while store._queue:
        time.sleep(0.001)


def test_a_prompt_larger_than_memory(tmp_path: Path) -> None:
    """As much of it is restored as memory holds, once; the rest is read."""
    prompt = range(61)
    read_once(tmp_path, prompt)

    async def main(store: DiskStore) -> None:
        bench, _ = new_bench(store, max_blocks=6)
        reader = bench.read(make_sequence(prompt, 5))
        await bench.run_dry()
        assert reader.token_ids == expected_tokens(prompt, 5)
        assert bench.runner.num_read == 61 - 24

    with opened(tmp_path) as store:
        asyncio.run(main(store))


def test_others_run_while_one_waits_for_the_disk(folder: Path, door: Door) -> None:
    async def main(store: DiskStore) -> None:
        bench, _ = new_bench(store)
        waiting = bench.read(make_sequence(PROMPT, 5))
        other = bench.read(make_sequence(range(40, 50), 8))
        await bench.step(20)
        assert other.token_ids == expected_tokens(range(40, 50), 8)
        assert waiting.token_ids == []
        assert bench.runner.num_read == 10
        door.opened.set()
        await bench.run_dry()
        assert waiting.token_ids == expected_tokens(PROMPT, 5)
        assert bench.runner.num_read == 15

    with opened(folder) as store:
        asyncio.run(main(store))


def test_an_idle_engine_sleeps_until_the_disk_has_answered(
    folder: Path, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes no steps meanwhile, and does not wait longer than necessary."""
    monkeypatch.setattr("maskdial.causal.engine._FETCH_SECONDS", 60)

    async def main(store: DiskStore) -> None:
        bench, _ = new_bench(store)
        reader = bench.read(make_sequence(PROMPT, 5))
        step = asyncio.get_running_loop().run_in_executor(None, bench.engine.step)
        await asyncio.get_running_loop().run_in_executor(None, door.reached.wait)
        assert not step.done()
        door.opened.set()
        await asyncio.wait_for(step, 30)
        await bench.run_dry()
        assert reader.token_ids == expected_tokens(PROMPT, 5)

    with opened(folder) as store:
        asyncio.run(main(store))


def test_a_disk_that_does_not_answer_is_not_waited_for(
    folder: Path, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "_UNKNOWN_PATIENCE", 0.05)

    async def main(store: DiskStore) -> None:
        bench, tier = new_bench(store)
        reader = bench.read(make_sequence(PROMPT, 5))
        await bench.run_dry()
        assert reader.token_ids == expected_tokens(PROMPT, 5)
        assert bench.runner.num_read == 21
        assert not tier.is_fetching
        door.opened.set()

    with opened(folder) as store:
        asyncio.run(main(store))


def test_a_request_that_leaves_while_it_waits(folder: Path, door: Door) -> None:
    async def main(store: DiskStore) -> None:
        bench, _ = new_bench(store)
        stream = bench.engine.stream(make_sequence(PROMPT, 5))
        await bench.step()
        await stream.aclose()
        assert bench.num_waiting == 0
        other = bench.read(make_sequence(range(40, 50), 3))
        await bench.run_dry()
        assert other.token_ids == expected_tokens(range(40, 50), 3)
        door.opened.set()
        again = bench.read(make_sequence(PROMPT, 5))
        await bench.run_dry()
        assert again.token_ids == expected_tokens(PROMPT, 5)
        assert bench.runner.num_read == 10 + 5

    with opened(folder) as store:
        asyncio.run(main(store))


def test_prompts_that_begin_alike_are_fetched_once(folder: Path, door: Door) -> None:
    async def main(store: DiskStore) -> None:
        bench, tier = new_bench(store, slots=8)
        shared = SharedPrompt()
        prompts = [[*range(21)], [*range(19)], [*range(15), 40, 41, 42], [*range(21)]]
        readers = [bench.read(make_sequence(prompt, 4)) for prompt in prompts]
        params = SamplingParams(max_new_tokens=4)
        copies = [bench.read(Sequence(PROMPT, params, shared_prompt=shared)) for _ in range(3)]
        await bench.step(3)
        assert len(tier._fetches) == 1
        door.opened.set()
        await bench.run_dry()
        for reader, prompt in zip(readers, prompts, strict=True):
            assert reader.token_ids == expected_tokens(prompt, 4)
        for reader in copies:
            assert reader.token_ids == expected_tokens(PROMPT, 4)
        assert bench.runner.num_read == 5 + 3 + 6 + 5 + 5

    with opened(folder) as store:
        asyncio.run(main(store))


def test_the_next_in_the_queue_are_fetched_before_there_is_a_slot(folder: Path) -> None:
    async def main(store: DiskStore) -> None:
        bench, tier = new_bench(store, slots=1)
        first = bench.read(make_sequence(range(40, 50), 60))
        await bench.step(3)
        second = bench.read(make_sequence(PROMPT, 3))
        memory = bench.engine.prefix_cache
        assert memory is not None
        for _ in range(40):  # fewer than the first text has left
            await bench.step()
            if tier.is_fetching or memory.num_blocks > 2:
                break
        assert tier.is_fetching or memory.num_blocks > 2
        await bench.run_dry()
        assert first.token_ids == expected_tokens(range(40, 50), 60)
        assert second.token_ids == expected_tokens(PROMPT, 3)
        assert bench.runner.num_read == 10 + 5

    with opened(folder) as store:
        asyncio.run(main(store))


def test_a_damaged_block_is_computed_from_there_on(folder: Path) -> None:
    """Its bits are not seen by anybody, and it is written again."""
    for path in folder.glob("*.block"):
        content = bytearray(path.read_bytes())
        tokens = np.frombuffer(content[-BLOCK_BYTES:], np.int64)
        if 8 in tokens:
            content[-BLOCK_BYTES] ^= 1
            path.write_bytes(content)

    async def main(store: DiskStore, num_read: int) -> None:
        bench, _ = new_bench(store)
        reader = bench.read(make_sequence(PROMPT, 5))
        await bench.run_dry()
        assert reader.token_ids == expected_tokens(PROMPT, 5)
        assert bench.runner.num_read == num_read

    with opened(folder) as store:
        asyncio.run(main(store, 21 - 8))
    with opened(folder) as store:
        asyncio.run(main(store, 5))


def test_nothing_is_read_or_written_that_is_computed_faster(folder: Path) -> None:
    async def main(store: DiskStore) -> None:
        bench, tier = new_bench(store)
        assert tier.report.pays
        tier._read.add(BLOCK_BYTES, 1.0)
        tier.note_prefill(2 * BLOCK, 1.0)
        assert not tier.report.pays
        assert tier.report.bytes_per_token == 8
        assert tier.report.read_bytes_per_second == pytest.approx(BLOCK_BYTES)
        assert tier.report.prefill_tokens_per_second == pytest.approx(2 * BLOCK)
        num_blocks = store.num_blocks
        bench.engine._prefix_disk.note_prefill = lambda *_: None
        for prompt in (PROMPT, range(30, 51)):
            reader = bench.read(make_sequence(prompt, 3))
            await bench.run_dry()
            assert reader.token_ids == expected_tokens(prompt, 3)
        assert bench.runner.num_read == 42
        store_is_idle(store)
        assert store.num_blocks == num_blocks

    with opened(folder) as store:
        asyncio.run(main(store))


def test_a_rate_is_weighted_by_time_and_forgotten() -> None:
    now = 0.0
    rate = Throughput(lambda: now)
    assert rate.per_second is None
    rate.add(100, 1)
    assert rate.per_second == 100
    rate.add(0, 9.1)
    assert rate.per_second == pytest.approx(90 / 10)
    for _ in range(100):
        rate.add(50, 1)
    assert rate.per_second == pytest.approx(50, rel=0.01)
    now = 700.0
    assert rate.per_second is None
    rate.add(10, 1)
    assert rate.per_second == 10


def test_salts_and_keys_find_nothing_of_each_others(folder: Path) -> None:
    """Nor does the disk have anything to read for them."""

    async def main(store: DiskStore) -> None:
        bench, _ = new_bench(store)
        for num_read, salt in ((21, "other"), (26, "")):
            params = SamplingParams(max_new_tokens=3)
            reader = bench.read(Sequence(PROMPT, params, cache_salt=salt))
            await bench.run_dry()
            assert reader.token_ids == expected_tokens(PROMPT, 3)
            assert bench.runner.num_read == num_read

    with opened(folder) as store:
        asyncio.run(main(store))


def test_what_runs_in_the_background_is_not_written(tmp_path: Path) -> None:
    async def main(store: DiskStore) -> None:
        bench, _ = new_bench(store)
        usage_of_request.set(ClientUsage(background=True))
        reader = bench.read(make_sequence(PROMPT, 3))
        while not (reader.token_ids and reader.task.done()):
            await bench.step()
        assert reader.token_ids == expected_tokens(PROMPT, 3)
        assert bench.engine._prefix_cache.num_blocks == 5  # type: ignore[union-attr]
        store_is_idle(store)
        assert store.num_blocks == 0

    with opened(tmp_path) as store:
        asyncio.run(main(store))


@pytest.mark.parametrize("shared", [False, True])
def test_records_say_whose_they_are(tmp_path: Path, shared: bool) -> None:
    async def main(store: DiskStore) -> None:
        bench, _ = new_bench(store, shared=shared)
        usage_of_request.set(ClientUsage(key="alice"))
        bench.read(make_sequence(PROMPT, 3))
        await bench.run_dry()

    with opened(tmp_path) as store:
        asyncio.run(main(store))
    headers = [record.read_header(path) for path in tmp_path.glob("*.block")]
    assert {header.owner for header in headers} == {Owner("fake", "" if shared else "alice")}
