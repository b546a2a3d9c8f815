"""The context and the slots of a causal model, where nobody says them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from maskdial.bundle.manifest import Heads, KVLayout
from maskdial.config import Config
from maskdial.engine.model import LEAST_CONTEXT
from maskdial.errors import ConfigError
from maskdial.registry import causal

LAYOUT = KVLayout(layers=(Heads(4, 16),) * 2, dtype="float16")
TOKEN = LAYOUT.bytes_per_token
OWN = 131_072  # the model's context
MODEL: Any = SimpleNamespace(
    label="large", manifest=SimpleNamespace(family="causal", max_length=OWN, num_outputs=1000)
)


def placement(*, slots: int = 32, on_host: bool = True, free: int | None = None) -> Any:
    memory = SimpleNamespace(on_host=on_host, max_buffer_bytes=None, free_bytes=lambda: free)
    memory.of_passes = memory
    return SimpleNamespace(provider=SimpleNamespace(slots=slots, context_slots=16), memory=memory)


GPU = placement(slots=512, on_host=False)
LOGITS = 2 * 4 * 1000  # bytes of a slot


def plan(budget: int | None, where: Any = None, **settings: Any) -> tuple[int, int]:
    return causal._plan_cache(
        MODEL, Config(**settings), where or placement(), LAYOUT, budget, max_source_length=0
    )


def test_with_room_enough_the_context_is_the_models_own() -> None:
    assert plan(32 * OWN * TOKEN) == (OWN, 32)
    assert plan(16 * OWN * TOKEN) == (OWN, 16)  # the fewest that a context leaves room for
    assert plan(16 * OWN * TOKEN + 16 * LOGITS, GPU) == (OWN, 16)


def test_a_gpu_has_as_many_slots_as_fit_with_their_logits() -> None:
    slot = 4096 * TOKEN + LOGITS
    assert plan(1000 * slot, GPU, max_context=4096) == (4096, 512)
    assert plan(300 * slot, GPU, max_context=4096) == (4096, 300)
    assert plan(300 * slot - 1, GPU, max_context=4096) == (4096, 299)
    assert plan(300 * slot, GPU, max_context=4096, slots=200) == (4096, 200)
    # A number that was asked for is held against the cache alone, as the error says.
    assert plan(300 * 4096 * TOKEN, GPU, max_context=4096, slots=300) == (4096, 300)
    # The context comes first: it leaves room for a few.
    assert plan(16 * 40_000 * TOKEN, GPU) == (39_936, 16)


def test_other_models_have_their_share_of_slots() -> None:
    both = {"one": Path("one"), "two": Path("two")}
    slot = 4096 * TOKEN + LOGITS
    assert plan(300 * slot, GPU, max_context=4096, models=both) == (4096, 150)
    assert plan(300 * slot, GPU, max_context=4096, models=both, slots=300) == (4096, 300)


def test_with_less_it_is_what_fits() -> None:
    assert plan(16 * 40_000 * TOKEN) == (39_936, 16)
    assert plan(5 * LEAST_CONTEXT * TOKEN) == (LEAST_CONTEXT, 5)
    assert plan(3 * 100_000 * TOKEN, slots=3) == (99_840, 3)
    with pytest.raises(ConfigError, match="--max-context 4000 would fit"):
        plan(4000 * TOKEN)


@pytest.mark.parametrize(
    "others",
    [
        {"models": {"one": Path("one"), "two": Path("two")}},
        {"model_dir": Path("models")},
        {"admin_key": "secret-of-the-operator"},
    ],
    ids=["two models", "a folder of them", "loaded later"],
)
def test_other_models_have_their_share(others: dict[str, Any]) -> None:
    budget = 64 * OWN * TOKEN
    context, slots = plan(budget, **others)
    assert (context, slots) == (OWN, 32)
    assert slots * context * TOKEN <= budget // 2
    assert plan(budget // 8, **others) == (OWN // 4, 16)


def test_a_share_without_room_for_a_slot_takes_from_the_others() -> None:
    both = {"one": Path("one"), "two": Path("two")}
    assert plan(LEAST_CONTEXT * TOKEN, models=both) == (LEAST_CONTEXT, 1)


def test_a_budget_that_is_set_is_each_models_own() -> None:
    budget = 16 * OWN * TOKEN
    both = {"one": Path("one"), "two": Path("two")}
    assert plan(budget, models=both, kv_cache_bytes=budget) == (OWN, 16)


def test_where_the_memory_does_not_tell_there_is_the_least() -> None:
    assert plan(None) == (LEAST_CONTEXT, 32)


def test_a_context_that_is_set_is_taken() -> None:
    assert plan(100 * 10_000 * TOKEN, max_context=10_000) == (10_000, 32)
    assert plan(None, max_context=OWN) == (OWN, 32)


def test_what_drafts_has_a_cache_beside_it() -> None:
    where, bytes_free = placement(free=10**9), 900_000_000
    assert causal._cache_budget(Config(), where, TOKEN, 0) == bytes_free
    assert causal._cache_budget(Config(), where, TOKEN, TOKEN) == bytes_free // 2
    assert causal._cache_budget(Config(kv_cache_bytes=1000), where, TOKEN, TOKEN) == 1000
