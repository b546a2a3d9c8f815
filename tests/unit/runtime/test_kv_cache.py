"""The cache's memory and its copies."""

import mmap
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maskdial.bundle.manifest import Heads, KVLayout
from maskdial.errors import ConfigError
from maskdial.runtime.kv_cache import KVCache
from maskdial.runtime.memory import HostMemory

LAYOUT = KVLayout(layers=(Heads(3, 4),) * 2)
PAGEMAP = Path("/proc/self/pagemap")

needs_pagemap = pytest.mark.skipif(
    not PAGEMAP.exists(), reason="only Linux shows which pages of a process are resident"
)


@pytest.fixture(params=["host", "device"])
def memory(request: pytest.FixtureRequest, device_memory: Callable[[], Any]) -> Any:
    return HostMemory() if request.param == "host" else device_memory()


def arrays(memory: Any, cache: KVCache) -> list[NDArray[np.generic]]:
    """The keys of all layers, then their values, to be read and written in place."""
    look = memory.view if memory.on_host else memory.peek
    return [look(buffer) for buffer in (*cache.keys, *cache.values)]


def fill(arrays: Iterable[NDArray[np.generic]]) -> list[NDArray[np.generic]]:
    """Writes every token of every slot and returns a copy of it all."""
    rng = np.random.default_rng(0)
    copies = []
    for array in arrays:
        array[...] = rng.standard_normal(array.shape)
        copies.append(array.copy())
    return copies


def resident_pages(array: NDArray[np.generic]) -> int:
    """How many of the pages that a contiguous array lies in are in memory."""
    first = array.ctypes.data // mmap.PAGESIZE
    last = (array.ctypes.data + array.nbytes - 1) // mmap.PAGESIZE
    with PAGEMAP.open("rb", buffering=0) as pagemap:
        pagemap.seek(8 * first)
        entries = np.frombuffer(pagemap.read(8 * (last - first + 1)), np.uint64)
    assert len(entries) == last - first + 1
    return int(np.count_nonzero(entries >> np.uint64(63)))  # the bit that says "present"


def test_shapes_and_size(memory: Any) -> None:
    cache = KVCache.allocate(memory, LAYOUT, slots=5, max_length=7)
    buffers = (*cache.keys, *cache.values)
    assert len(buffers) == 4
    assert {buffer.shape for buffer in buffers} == {(5, 3, 7, 4)}
    assert {buffer.dtype for buffer in buffers} == {np.dtype(np.float32)}
    assert cache.bytes_per_token * 5 * 7 == sum(buffer.num_bytes for buffer in buffers)


def test_arrays_are_apart_and_aligned() -> None:
    memory = HostMemory()
    cache = KVCache.allocate(memory, LAYOUT, slots=3, max_length=5)
    for number, array in enumerate(arrays(memory, cache)):
        array[...] = number
    for number, array in enumerate(arrays(memory, cache)):
        assert array.ctypes.data % 64 == 0
        assert (array == number).all()


def test_copy_takes_the_first_tokens_only(memory: Any) -> None:
    cache = KVCache.allocate(memory, LAYOUT, slots=3, max_length=6)
    before = fill(arrays(memory, cache))
    cache.copy(2, 0, 4)
    for array, old in zip(arrays(memory, cache), before, strict=True):
        assert np.array_equal(array[0, :, :4], old[2, :, :4])
        assert np.array_equal(array[0, :, 4:], old[0, :, 4:])
        assert np.array_equal(array[1:], old[1:])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_read_returns_a_copy(memory: Any, dtype: str) -> None:
    layout = KVLayout.model_validate(LAYOUT.model_dump() | {"dtype": dtype})
    cache = KVCache.allocate(memory, layout, slots=3, max_length=9)
    before = fill(arrays(memory, cache))
    block = cache.read(1, 2, 5)
    assert block.dtype == np.dtype(dtype)
    assert block.nbytes == 5 * cache.bytes_per_token
    for array in arrays(memory, cache):
        array[...] = 0
    expected = [before[kind + layer][1, :, 2:7].ravel() for layer in range(2) for kind in (0, 2)]
    assert np.array_equal(block.ravel(), np.concatenate(expected))


def test_layers_may_have_heads_of_different_sizes(memory: Any) -> None:
    layout = KVLayout(layers=(Heads(3, 4), Heads(1, 16), Heads(2, 8)))
    assert layout.query_block == 32
    cache = KVCache.allocate(memory, layout, slots=3, max_length=9)
    assert [buffer.shape for buffer in cache.keys] == [(3, 3, 9, 4), (3, 1, 9, 16), (3, 2, 9, 8)]
    before = fill(arrays(memory, cache))
    block = cache.read(0, 1, 4)
    assert block.nbytes == 4 * layout.bytes_per_token == 4 * 2 * 4 * (12 + 16 + 16)
    cache.write(2, 3, block)
    cache.copy(0, 1, 6)
    for array, old in zip(arrays(memory, cache), before, strict=True):
        old[2, :, 3:7] = old[0, :, 1:5]
        old[1, :, :6] = old[0, :, :6]
        assert np.array_equal(array, old)


def test_write_puts_a_read_block_elsewhere_and_touches_nothing_else(memory: Any) -> None:
    cache = KVCache.allocate(memory, LAYOUT, slots=3, max_length=9)
    before = fill(arrays(memory, cache))
    cache.write(2, 3, cache.read(0, 1, 4))
    for array, old in zip(arrays(memory, cache), before, strict=True):
        old[2, :, 3:7] = old[0, :, 1:5]
        assert np.array_equal(array, old)


def test_lengths_follow_what_a_slot_holds(memory: Any) -> None:
    cache = KVCache.allocate(memory, LAYOUT, slots=3, max_length=9)
    cache.write(1, 2, cache.read(0, 0, 4))
    cache.copy(1, 2, 5)
    assert cache.lengths.tolist() == [0, 6, 5]
    cache.release_pages(1)
    assert cache.lengths.tolist() == [0, 0, 5]


def test_copies_stay_within_their_slot(memory: Any) -> None:
    """Copies go by address, so nothing else would notice."""
    cache = KVCache.allocate(memory, LAYOUT, slots=3, max_length=9)
    before = fill(arrays(memory, cache))
    block = cache.read(0, 0, 4)
    for leave in (
        lambda: cache.copy(0, 1, 10),
        lambda: cache.copy(0, 3, 1),
        lambda: cache.copy(-1, 1, 1),
        lambda: cache.read(1, 6, 4),
        lambda: cache.read(1, -1, 4),
        lambda: cache.write(1, 6, block),
    ):
        with pytest.raises(IndexError, match="outside a cache of 3 slots of 9 tokens"):
            leave()
    for other in (block[:, :2], block.astype(np.float16), block[:, ::-1]):
        with pytest.raises(ValueError, match="not a block of this cache"):
            cache.write(1, 0, other)
    for array, old in zip(arrays(memory, cache), before, strict=True):
        assert np.array_equal(array, old)


@pytest.mark.parametrize("slots", [2**10, 2**40])
def test_too_large_a_cache_is_a_setting_to_change(slots: int) -> None:
    with pytest.raises(ConfigError, match=r"another .* GB of memory .* fewer --slots"):
        KVCache.allocate(HostMemory(), LAYOUT, slots, max_length=2**40)


@needs_pagemap
def test_a_slot_costs_what_it_uses() -> None:
    layout = KVLayout(layers=(Heads(3, 64),))
    memory = HostMemory()
    cache = KVCache.allocate(memory, layout, slots=4, max_length=8192)
    assert sum(resident_pages(array) for array in arrays(memory, cache)) == 0
    cache.write(1, 0, np.ones((20, 1 * 2 * 3 * 64), np.float32))
    pages_of_a_head = 20 * 64 * 4 // mmap.PAGESIZE + 2
    for array in arrays(memory, cache):
        assert 0 < resident_pages(array) <= 3 * pages_of_a_head


# Slots of less than a page, of some pages and a rest, and of whole pages.
@pytest.mark.parametrize("max_length", [7, 1000, 2 * mmap.PAGESIZE // 16])
@pytest.mark.parametrize("slot", [0, 1, 3])
def test_releasing_a_slot_leaves_the_others_alone(memory: Any, max_length: int, slot: int) -> None:
    cache = KVCache.allocate(memory, LAYOUT, slots=4, max_length=max_length)
    before = fill(arrays(memory, cache))
    cache.release_pages(slot)
    for array, old in zip(arrays(memory, cache), before, strict=True):
        assert np.array_equal(np.delete(array, slot, axis=0), np.delete(old, slot, axis=0))


@needs_pagemap
def test_what_lies_behind_a_window_is_out_of_memory_and_the_rest_is_not() -> None:
    layout, window = KVLayout(layers=(Heads(3, 64),) * 2), 300
    memory = HostMemory()
    cache = KVCache.allocate(memory, layout, slots=3, max_length=2000, windows={1: window})
    before = fill(arrays(memory, cache))
    cache.forget(1, 1900)
    kept = 1900 - window - 256
    tokens_of_a_page = mmap.PAGESIZE // (64 * 4)
    names = [name for name, _ in cache.named()]
    pages = [resident_pages(array[1]) for array in arrays(memory, cache)]  # before any is read
    assert max(pages[1::2]) < (2000 - kept) / tokens_of_a_page * 3 + 9 < min(pages[::2])
    for name, array, old in zip(names, arrays(memory, cache), before, strict=True):
        assert np.array_equal(array[::2], old[::2])
        if name.endswith(".0"):
            assert np.array_equal(array, old)
            continue
        assert np.array_equal(array[1, :, kept:], old[1, :, kept:])
        assert not array[1, :, tokens_of_a_page : kept - tokens_of_a_page].any()
    cache.copy(1, 0, 1900)
    for name, array, old in zip(names, arrays(memory, cache), before, strict=True):
        start = kept if name.endswith(".1") else 0
        assert np.array_equal(array[0, :, start:1900], old[1, :, start:1900])
        assert np.array_equal(array[0, :, :start], old[0, :, :start])


@needs_pagemap
def test_a_released_slot_is_out_of_memory_and_usable() -> None:
    layout = KVLayout(layers=(Heads(3, 64),) * 2)
    memory = HostMemory()
    cache = KVCache.allocate(memory, layout, slots=3, max_length=1001)
    parts = arrays(memory, cache)
    fill(parts)
    pages = [resident_pages(array[1]) for array in parts]
    assert all(count >= parts[0][1].nbytes // mmap.PAGESIZE for count in pages)
    cache.release_pages(1)
    # The first and the last page are shared with the neighbors.
    assert all(resident_pages(array[1]) <= 2 for array in parts)
    # Shared memory would go on holding what the process no longer sees.
    page = slice(mmap.PAGESIZE // 4, -mmap.PAGESIZE // 4)
    assert not any(array[1].reshape(-1)[page].any() for array in parts)
    cache.copy(0, 1, 600)
    assert np.array_equal(cache.read(1, 0, 600), cache.read(0, 0, 600))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident size from /proc")
def test_releasing_lowers_the_resident_size_of_the_process() -> None:
    layout = KVLayout(layers=(Heads(3, 64),) * 4)
    cache = KVCache.allocate(HostMemory(), layout, slots=2, max_length=8192)

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    empty = resident_bytes()
    cache.write(1, 0, np.ones((8192, 4 * 2 * 3 * 64), np.float32))
    used = resident_bytes()
    cache.release_pages(1)
    slot_bytes = 8192 * cache.bytes_per_token
    assert used - empty > 0.9 * slot_bytes
    assert used - resident_bytes() > 0.9 * slot_bytes


def test_without_the_advice_releasing_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for advice in ("MADV_DONTNEED", "MADV_NOHUGEPAGE"):
        monkeypatch.delattr(mmap, advice, raising=False)
    memory = HostMemory()
    cache = KVCache.allocate(memory, LAYOUT, slots=2, max_length=4096)
    before = fill(arrays(memory, cache))
    cache.release_pages(0)
    for array, old in zip(arrays(memory, cache), before, strict=True):
        assert np.array_equal(array, old)


STATES = KVLayout(layers=(Heads(2, 4),) * 1, states=((3, 5), (2, 4, 6)))


def states(memory: Any, cache: KVCache) -> list[NDArray[np.generic]]:
    look = memory.view if memory.on_host else memory.peek
    return [look(buffer) for buffer in cache.states]


def test_states_are_copied_with_a_slot_and_kept_apart(memory: Any) -> None:
    cache = KVCache.allocate(memory, STATES, slots=4, max_length=7)
    before = fill(states(memory, cache))
    cache.copy(3, 1, 5)
    cache.copy_tokens(2, 0, 3, 2)
    memory.synchronize()
    for state, old in zip(states(memory, cache), before, strict=True):
        np.testing.assert_array_equal(state, old[[2, 3, 2, 3]])


def test_a_snapshot_of_states_can_be_written_elsewhere(memory: Any) -> None:
    cache = KVCache.allocate(memory, STATES, slots=3, max_length=7)
    before = fill(states(memory, cache))
    snapshot = cache.read_states(2)
    assert snapshot.nbytes == cache.state_bytes == STATES.state_bytes == 4 * (15 + 48)
    cache.clear_states(2)
    cache.write_states(0, snapshot)
    memory.synchronize()
    for state, old in zip(states(memory, cache), before, strict=True):
        np.testing.assert_array_equal(state[0], old[2])
        np.testing.assert_array_equal(state[1], old[1])
        assert not state[2].any()
    with pytest.raises(ValueError, match="not the states of this cache"):
        cache.write_states(0, snapshot[1:])


def test_a_model_may_have_states_only(memory: Any) -> None:
    layout = KVLayout(layers=(), states=((2, 3),))
    cache = KVCache.allocate(memory, layout, slots=2, max_length=7)
    fill(states(memory, cache))
    block = cache.read(0, 0, 4)
    assert block.nbytes == 0
    cache.write(1, 0, block)
    cache.copy(0, 1, 7)
    first, second = states(memory, cache)[0]
    np.testing.assert_array_equal(first, second)
    cache.release_pages(0)
