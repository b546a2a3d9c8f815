"""The cache's memory and its copies."""

import numpy as np
import pytest

from maskdial.bundle import KVLayout
from maskdial.causal.kv_cache import KVCache
from maskdial.errors import ConfigError

LAYOUT = KVLayout(num_layers=2, num_heads=3, head_dim=4)


def test_shapes_and_size() -> None:
    cache = KVCache.allocate(LAYOUT, slots=5, max_length=7)
    arrays = (*cache.keys, *cache.values)
    assert len(arrays) == 4
    assert {array.shape for array in arrays} == {(5, 3, 7, 4)}
    assert {array.dtype for array in arrays} == {np.dtype(np.float32)}
    assert cache.bytes_per_token * 5 * 7 == sum(array.nbytes for array in arrays)


def test_copy_takes_the_first_tokens_only() -> None:
    cache = KVCache.allocate(LAYOUT, slots=3, max_length=6)
    rng = np.random.default_rng(0)
    for array in (*cache.keys, *cache.values):
        array[...] = rng.standard_normal(array.shape)
    before = [array.copy() for array in (*cache.keys, *cache.values)]
    cache.copy(2, 0, 4)
    for array, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert np.array_equal(array[0, :, :4], old[2, :, :4])
        assert np.array_equal(array[0, :, 4:], old[0, :, 4:])
        assert np.array_equal(array[1:], old[1:])


def test_a_slot_is_one_contiguous_view() -> None:
    cache = KVCache.allocate(LAYOUT, slots=4, max_length=6)
    for array in (*cache.keys, *cache.values):
        assert array[:3].flags.c_contiguous
        assert array[2:3].flags.c_contiguous


def test_too_large_a_cache_is_a_setting_to_change() -> None:
    with pytest.raises(ConfigError, match="fewer slots"):
        KVCache.allocate(LAYOUT, slots=2**10, max_length=2**40)
