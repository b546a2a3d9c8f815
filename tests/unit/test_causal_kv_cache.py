"""The cache's memory and its copies."""

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from maskdial.errors import ConfigError
from maskdial.models.bundle import KVLayout
from maskdial.runtime.kv_cache import KVCache

LAYOUT = KVLayout(num_layers=2, num_heads=3, head_dim=4)
PAGEMAP = Path("/proc/self/pagemap")

needs_pagemap = pytest.mark.skipif(
    not PAGEMAP.exists(), reason="only Linux tells which pages of a process are resident"
)


def fill(cache: KVCache) -> list[NDArray[np.generic]]:
    """Writes every token of every slot and returns a copy of it all."""
    rng = np.random.default_rng(0)
    for array in (*cache.keys, *cache.values):
        array[...] = rng.standard_normal(array.shape)
    return [array.copy() for array in (*cache.keys, *cache.values)]


def resident_pages(array: NDArray[np.generic]) -> int:
    """How many of the pages that a contiguous array lies in are in memory."""
    first = array.ctypes.data // mmap.PAGESIZE
    last = (array.ctypes.data + array.nbytes - 1) // mmap.PAGESIZE
    with PAGEMAP.open("rb", buffering=0) as pagemap:
        pagemap.seek(8 * first)
        entries = np.frombuffer(pagemap.read(8 * (last - first + 1)), np.uint64)
    assert len(entries) == last - first + 1
    return int(np.count_nonzero(entries >> np.uint64(63)))  # the bit that says "present"


def test_shapes_and_size() -> None:
    cache = KVCache.allocate(LAYOUT, slots=5, max_length=7)
    arrays = (*cache.keys, *cache.values)
    assert len(arrays) == 4
    assert {array.shape for array in arrays} == {(5, 3, 7, 4)}
    assert {array.dtype for array in arrays} == {np.dtype(np.float32)}
    assert cache.bytes_per_token * 5 * 7 == sum(array.nbytes for array in arrays)


def test_arrays_are_apart_and_aligned() -> None:
    cache = KVCache.allocate(LAYOUT, slots=3, max_length=5)
    arrays = (*cache.keys, *cache.values)
    for number, array in enumerate(arrays):
        array[...] = number
    for number, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0
        assert (array == number).all()


def test_copy_takes_the_first_tokens_only() -> None:
    cache = KVCache.allocate(LAYOUT, slots=3, max_length=6)
    before = fill(cache)
    cache.copy(2, 0, 4)
    for array, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert np.array_equal(array[0, :, :4], old[2, :, :4])
        assert np.array_equal(array[0, :, 4:], old[0, :, 4:])
        assert np.array_equal(array[1:], old[1:])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_read_returns_a_copy(dtype: str) -> None:
    layout = KVLayout.model_validate(LAYOUT.model_dump() | {"dtype": dtype})
    cache = KVCache.allocate(layout, slots=3, max_length=9)
    before = fill(cache)
    block = cache.read(1, 2, 5)
    assert block.dtype == np.dtype(dtype)
    assert block.nbytes == 5 * cache.bytes_per_token
    for array in (*cache.keys, *cache.values):
        array[...] = 0
    expected = [[before[layer][1, :, 2:7], before[2 + layer][1, :, 2:7]] for layer in range(2)]
    assert np.array_equal(block, expected)


def test_write_puts_a_read_block_elsewhere_and_touches_nothing_else() -> None:
    cache = KVCache.allocate(LAYOUT, slots=3, max_length=9)
    before = fill(cache)
    cache.write(2, 3, cache.read(0, 1, 4))
    for array, old in zip((*cache.keys, *cache.values), before, strict=True):
        old[2, :, 3:7] = old[0, :, 1:5]
        assert np.array_equal(array, old)


def test_a_slot_is_one_contiguous_view() -> None:
    cache = KVCache.allocate(LAYOUT, slots=4, max_length=6)
    for array in (*cache.keys, *cache.values):
        assert array[:3].flags.c_contiguous
        assert array[2:3].flags.c_contiguous


@pytest.mark.parametrize("slots", [2**10, 2**40])
def test_too_large_a_cache_is_a_setting_to_change(slots: int) -> None:
    with pytest.raises(ConfigError, match="fewer slots"):
        KVCache.allocate(LAYOUT, slots, max_length=2**40)


@needs_pagemap
def test_a_slot_costs_what_it_uses() -> None:
    layout = KVLayout(num_layers=1, num_heads=3, head_dim=64)
    cache = KVCache.allocate(layout, slots=4, max_length=8192)
    assert sum(resident_pages(array) for array in (*cache.keys, *cache.values)) == 0
    cache.write(1, 0, np.ones((1, 2, 3, 20, 64), np.float32))
    pages_of_a_head = 20 * 64 * 4 // mmap.PAGESIZE + 2
    for array in (*cache.keys, *cache.values):
        assert 0 < resident_pages(array) <= 3 * pages_of_a_head


# Slots of less than a page, of some pages and a rest, and of whole pages.
@pytest.mark.parametrize("max_length", [7, 1000, 2 * mmap.PAGESIZE // 16])
@pytest.mark.parametrize("slot", [0, 1, 3])
def test_releasing_a_slot_leaves_the_others_alone(max_length: int, slot: int) -> None:
    cache = KVCache.allocate(LAYOUT, slots=4, max_length=max_length)
    before = fill(cache)
    cache.release_pages(slot)
    for array, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert np.array_equal(np.delete(array, slot, axis=0), np.delete(old, slot, axis=0))


@needs_pagemap
def test_a_released_slot_is_out_of_memory_and_usable() -> None:
    layout = KVLayout(num_layers=2, num_heads=3, head_dim=64)
    cache = KVCache.allocate(layout, slots=3, max_length=1001)
    fill(cache)
    arrays = (*cache.keys, *cache.values)
    pages = [resident_pages(array[1]) for array in arrays]
    assert all(count >= arrays[0][1].nbytes // mmap.PAGESIZE for count in pages)
    cache.release_pages(1)
    # The first and the last page are shared with the neighbours.
    assert all(resident_pages(array[1]) <= 2 for array in arrays)
    # Shared memory would go on holding what the process no longer sees.
    page = slice(mmap.PAGESIZE // 4, -mmap.PAGESIZE // 4)
    assert not any(array[1].reshape(-1)[page].any() for array in arrays)
    cache.copy(0, 1, 600)
    assert np.array_equal(cache.read(1, 0, 600), cache.read(0, 0, 600))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident size from /proc")
def test_releasing_lowers_the_resident_size_of_the_process() -> None:
    layout = KVLayout(num_layers=4, num_heads=3, head_dim=64)
    cache = KVCache.allocate(layout, slots=2, max_length=8192)

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    empty = resident_bytes()
    cache.write(1, 0, np.ones((4, 2, 3, 8192, 64), np.float32))
    used = resident_bytes()
    cache.release_pages(1)
    slot_bytes = 8192 * cache.bytes_per_token
    assert used - empty > 0.9 * slot_bytes
    assert used - resident_bytes() > 0.9 * slot_bytes


def test_without_the_advice_releasing_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for advice in ("MADV_DONTNEED", "MADV_NOHUGEPAGE"):
        monkeypatch.delattr(mmap, advice, raising=False)
    cache = KVCache.allocate(LAYOUT, slots=2, max_length=4096)
    before = fill(cache)
    cache.release_pages(0)
    for array, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert np.array_equal(array, old)
