"""How many slots fit into a budget, and what is said when they don't."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskdial.bundle.manifest import Heads, KVLayout
from maskdial.errors import ConfigError
from maskdial.runtime.kv_cache import KVCache, plan_length, plan_slots
from maskdial.runtime.memory import HostMemory, Memory

LAYOUT = KVLayout(layers=(Heads(4, 16),) * 2, dtype="float16")
TOKEN = 2 * 2 * 4 * 16 * 2  # bytes


def test_a_tokens_bytes_are_those_of_the_cache() -> None:
    full = KVLayout(layers=(Heads(2, 8),) * 3)
    cache = KVCache.allocate(HostMemory(), full, slots=2, max_length=10)
    buffers = (*cache.keys, *cache.values)
    assert full.bytes_per_token * 2 * 10 == sum(buffer.num_bytes for buffer in buffers)
    assert cache.bytes_per_token == full.bytes_per_token
    assert LAYOUT.bytes_per_token == TOKEN


def test_without_a_budget_there_are_as_many_as_asked_for_or_else_the_most() -> None:
    assert plan_slots(LAYOUT, 100, asked=None, max_slots=8, budget=None) == 8
    assert plan_slots(LAYOUT, 100, asked=500, max_slots=8, budget=None) == 500


@pytest.mark.parametrize(("slots", "planned"), [(1, 1), (37.9, 37), (64, 64), (1000, 64)])
def test_left_open_as_many_as_the_budget_holds(slots: float, planned: int) -> None:
    assert (
        plan_slots(LAYOUT, 100, asked=None, max_slots=64, budget=int(slots * 100 * TOKEN))
        == planned
    )


def test_more_than_fits_says_what_would() -> None:
    with pytest.raises(ConfigError) as refusal:
        plan_slots(LAYOUT, 1000, asked=10, max_slots=64, budget=4500 * TOKEN)
    assert refusal.value.message == (
        "a KV cache of 10 slots of 1000 tokens takes 5.1 MB, and 2.3 MB may be used: "
        "--slots 4 or --max-context 450 would fit"
    )


def test_not_even_one_slot_says_how_long_a_text_would_fit() -> None:
    with pytest.raises(ConfigError, match=r"1 slot of 1000 tokens .*: --max-context 900 would fit"):
        plan_slots(LAYOUT, 1000, asked=None, max_slots=64, budget=900 * TOKEN)
    with pytest.raises(ConfigError, match="not even a short text would fit"):
        plan_slots(LAYOUT, 1000, asked=None, max_slots=64, budget=5 * TOKEN)


@given(
    max_length=st.integers(8, 10_000),
    asked=st.none() | st.integers(1, 100),
    budget=st.integers(0, 10_000_000),
)
def test_what_is_planned_fits_and_what_is_proposed_would(
    max_length: int, asked: int | None, budget: int
) -> None:
    try:
        slots = plan_slots(LAYOUT, max_length, asked=asked, max_slots=64, budget=budget)
    except ConfigError as refusal:
        words = refusal.message.split()
        assert (asked or 1) * max_length * TOKEN > budget
        if "--slots" in words:
            fewer = int(words[words.index("--slots") + 1])
            assert plan_slots(LAYOUT, max_length, asked=fewer, max_slots=64, budget=budget) == fewer
        if "--max-context" in words:
            shorter = int(words[words.index("--max-context") + 1])
            assert plan_slots(LAYOUT, shorter, asked=asked, max_slots=64, budget=budget) >= 1
        return
    assert slots == asked or (asked is None and 1 <= slots <= 64)
    assert slots * max_length * TOKEN <= budget


@given(
    max_length=st.integers(8, 10_000),
    slots=st.integers(1, 64),
    budget=st.none() | st.integers(0, 10_000_000),
    buffer=st.none() | st.integers(0, 10_000_000),
)
def test_the_context_is_the_longest_that_the_slots_fit_with(
    max_length: int, slots: int, budget: int | None, buffer: int | None
) -> None:
    def fits(length: int) -> bool:
        total = slots * length * TOKEN
        largest = slots * length * 4 * 16 * 2
        return total <= (total if budget is None else budget) and largest <= (
            largest if buffer is None else buffer
        )

    length = plan_length(LAYOUT, max_length, slots=slots, budget=budget, max_buffer_bytes=buffer)
    assert 0 <= length <= max_length
    assert fits(length)
    assert length == max_length or not fits(length + 1)


def test_a_slot_has_its_states_beside_its_tokens() -> None:
    layout = KVLayout(layers=(Heads(4, 16),) * 2, dtype="float16", states=((100, TOKEN),))
    assert layout.state_bytes == 400 * TOKEN  # those of 400 tokens
    assert plan_slots(layout, 100, asked=None, max_slots=64, budget=1900 * TOKEN) == 3
    with pytest.raises(ConfigError, match=r"--slots 3 or --max-context 75 would fit"):
        plan_slots(layout, 100, asked=4, max_slots=64, budget=1900 * TOKEN)


def test_a_model_with_states_only_needs_no_room_for_tokens() -> None:
    layout = KVLayout(layers=(), states=((100,),))
    assert plan_slots(layout, 10**6, asked=None, max_slots=64, budget=4000) == 10
    with pytest.raises(ConfigError, match=r"and 0\.4 MB|would fit") as refusal:
        plan_slots(layout, 10**6, asked=11, max_slots=64, budget=4000)
    assert "--slots 10 would fit" in refusal.value.message


def test_a_buffer_has_the_keys_of_one_layer() -> None:
    """The largest layer counts, and the longer of a slot's two caches."""
    layout = KVLayout(layers=(Heads(1, 16), Heads(4, 16)), dtype="float16")
    key = 4 * 16 * 2  # bytes of a token

    def plan(asked: int | None, buffer: int, source: int = 0) -> int:
        return plan_slots(
            layout,
            1000,
            asked=asked,
            max_slots=64,
            budget=None,
            max_source_length=source,
            max_buffer_bytes=buffer * key,
        )

    assert plan(None, 64_000) == 64
    assert plan(None, 3999) == 3
    assert plan(None, 3999, source=2000) == 1
    assert plan(3, 3999) == 3
    with pytest.raises(ConfigError) as refusal:
        plan(4, 3999)
    assert refusal.value.message == (
        "a buffer of 4 slots of 1000 tokens takes 0.5 MB, and the GPU's largest one holds 0.5 MB: "
        "--slots 3 or --max-context 999 would fit"
    )
    with pytest.raises(ConfigError, match=r"1 slot of 2000 tokens .*: --max-context 1999 would"):
        plan(None, 1999, source=2000)


def test_memory_that_ends_says_how_much_there_was(device_memory: Callable[..., Memory]) -> None:
    """Four of a cache's eight arrays were allocated, each of 4 slots of 100 tokens."""
    layout = KVLayout(layers=(Heads(4, 16),) * 4, dtype="float16")
    memory = device_memory(4 * 4 * 100 * 4 * 16 * 2 + 1000)
    with pytest.raises(ConfigError) as refusal:
        KVCache.allocate(memory, layout, 4, 100)
    assert refusal.value.message == (
        "a KV cache of 4 slots of 100 tokens takes 0.4 MB, and no more than 0.2 MB can be "
        "allocated: --slots 2 or --max-context 50 would fit"
    )
    memory = device_memory(4 * 4 * 100 * 4 * 16 * 2 + 1000)
    KVCache.allocate(memory, layout, 2, 100)
