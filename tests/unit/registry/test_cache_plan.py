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
    label="large", manifest=SimpleNamespace(family="causal", max_length=OWN)
)


def placement(*, slots: int = 32, on_host: bool = True, free: int | None = None) -> Any:
    memory = SimpleNamespace(on_host=on_host, max_buffer_bytes=None, free_bytes=lambda: free)
    return SimpleNamespace(provider=SimpleNamespace(slots=slots), memory=memory)


def plan(budget: int | None, where: Any = None, **settings: Any) -> tuple[int, int]:
    return causal._plan_cache(
        MODEL, Config(**settings), where or placement(), LAYOUT, budget, max_source_length=0
    )


def test_with_room_enough_the_context_is_the_models_own() -> None:
    assert plan(32 * OWN * TOKEN) == (OWN, 32)
    assert plan(16 * OWN * TOKEN) == (OWN, 16)  # half of the slots
    assert plan(16 * OWN * TOKEN, placement(slots=64, on_host=False)) == (OWN, 16)  # a quarter


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
