"""Texts in the background that give up their slots go on from main memory, to the last bit."""

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from maskdial.causal.sequence import Sequence, SharedPrompt
from maskdial.engine.fairness import ClientUsage, usage_of_request
from maskdial.errors import OverloadedError
from tests.engine.conftest import PATIENCE, Reader

pytestmark = pytest.mark.slow

AMPLE = 100  # blocks
SEED = int(os.environ.get("TESTS_SET_ASIDE_SEED", "4"))


@pytest.fixture
def num_set_aside(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often a text was."""
    aside: list[Sequence] = []
    set_aside = Sequence.set_aside

    def note(sequence: Sequence) -> None:
        aside.append(sequence)
        set_aside(sequence)

    monkeypatch.setattr(Sequence, "set_aside", note)
    return lambda: len(aside)


def requests_of(starter: Any, number: int, seed: int) -> list[Any]:
    rng = random.Random(seed)
    return [
        starter.request(
            starter.random_prompt(rng, rng.randint(1, 200)),
            max_new_tokens=rng.randint(4, 20),
            do_sample=index % 2 == 1,
            seed=index,
            top_n_tokens=2,
            repetition_penalty=1.3,
            ignore_eos=True,
        )
        for index in range(number)
    ]


@pytest.mark.parametrize("max_drafts", [0, 4])
def test_texts_are_those_of_an_idle_server(
    starter: Any, num_set_aside: Callable[[], int], max_drafts: int
) -> None:
    """Others come one after the other, while all of the background has begun."""
    background, others = requests_of(starter, 4, 1), requests_of(starter, 8, 2)
    wanted = starter.bench().run_alone([*background, *others])
    bench = starter.bench(slots=3, cache_blocks=AMPLE, max_drafts=max_drafts)

    async def main() -> list[Any]:
        token = usage_of_request.set(ClientUsage("batch", background=True))
        readers = [bench.submit(request) for request in background]
        usage_of_request.reset(token)
        await bench.step(8)
        for request in others:
            readers.append(bench.submit(request))
            await bench.step(4)
        async with asyncio.timeout(60):
            while not all(reader.task.done() for reader in readers):
                await bench.step()
        return [reader.reply for reader in readers]

    assert asyncio.run(main()) == wanted
    assert num_set_aside() >= 3


def test_without_a_prefix_cache_there_is_no_memory_for_them(
    starter: Any, num_set_aside: Callable[[], int]
) -> None:
    (background, other) = requests_of(starter, 2, 3)
    bench = starter.bench(slots=1)

    async def main() -> tuple[Any, Any]:
        token = usage_of_request.set(ClientUsage("batch", background=True))
        first = bench.submit(background)
        usage_of_request.reset(token)
        await bench.step(8)
        second = bench.submit(other)
        await bench.run_dry()
        return first, second

    first, second = asyncio.run(main())
    assert "other requests needed the slot; try again" in str(first.error)
    assert second.reply.reason == "length"
    assert num_set_aside() == 0


FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "temperature": 1.5},
    {"do_sample": True, "mirostat": 2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"dry_multiplier": 0.8, "no_repeat_ngram_size": 3},
    {"logit_bias": ((100, 8.0), (101, 8.0), (102, 7.5)), "do_sample": True},
    {"stop": ("e",), "include_stop": True, "do_sample": True},
    {"prompt_logprobs": True, "top_n_tokens": 3},
    {"do_sample": True, "xtc_probability": 0.5, "min_new_tokens": 5},
)


def any_request(model: Any, rng: random.Random, max_new_tokens: int) -> Any:
    """Of any features; one in three has a grammar."""
    params = {"max_new_tokens": max_new_tokens, "ignore_eos": True} | rng.choice(FEATURES)
    words = model.random_prompt(rng, rng.choice((1, 2, 20)))
    prompt = (words * 200)[: rng.choice((1, 2, 40, 129, rng.randint(1, 200)))]
    request = model.request(prompt, seed=rng.randrange(1000), **params)
    if rng.random() < 0.3:
        pattern = rng.choice((r"[a-z ]{1,40}", r"(yes|no)+!", r"\[[0-9]+(, [0-9]+)*\]"))
        request = replace(request, grammar=model.grammar("regex", pattern))
    return request


@dataclass(frozen=True)
class Group:
    """Requests that share a prompt, if there are several, and what an idle server replies."""

    requests: list[Any]
    background: bool
    alone: list[Any]

    @classmethod
    def make(cls, model: Any, rng: random.Random) -> "Group":
        background = rng.random() < 0.5
        request = any_request(model, rng, rng.choice((20, 40) if background else (1, 4)))
        requests = [replace(request, seed=seed) for seed in range(rng.choice((1, 1, 3)))]
        return cls(requests, background, model.bench().run_alone(requests))

    def submit(self, bench: Any) -> list[Reader]:
        shared = SharedPrompt() if len(self.requests) > 1 else None
        token = usage_of_request.set(ClientUsage("anyone", background=self.background))
        readers = [bench.submit(request, shared) for request in self.requests]
        usage_of_request.reset(token)
        return readers

    def check(self, readers: list[Reader]) -> None:
        for reader, alone in zip(readers, self.alone, strict=True):
            assert reader.sequence.saved is None
            if reader.task.cancelled():
                continue
            if isinstance(reader.error, OverloadedError):
                assert self.background
            else:
                assert reader.reply == alone


async def run_at_random(bench: Any, groups: list[Group], rng: random.Random) -> list[list[Reader]]:
    """The groups' readers, who come one after the other; some leave at any time."""
    groups_of_readers: list[list[Reader]] = []
    for group in groups:
        groups_of_readers.append(group.submit(bench))
        for _ in range(rng.choice((0, 4, 12, 20))):
            await bench.step()
            if rng.random() < 0.02:
                await rng.choice(rng.choice(groups_of_readers)).leave()
    readers = [reader for each in groups_of_readers for reader in each]
    async with asyncio.timeout(PATIENCE):
        while not all(reader.task.done() for reader in readers):
            await bench.step()
    await bench.step(2)
    return groups_of_readers


@pytest.mark.parametrize("model", ["starter", "circling_eagle_model"])
def test_any_text_in_any_course_of_events(
    request: pytest.FixtureRequest, num_set_aside: Callable[[], int], model: str
) -> None:
    """With drafts of all kinds, and memory for all texts, for some or for one."""
    loaded, rng = request.getfixturevalue(model), random.Random(SEED)
    groups = [Group.make(loaded, rng) for _ in range(25)]
    for slots, cache_blocks, max_drafts in ((1, AMPLE, 0), (2, 6, 4), (3, AMPLE, 4), (4, 2, 0)):
        drafting: dict[str, Any] = {"max_drafts": max_drafts}
        if max_drafts and model == "starter":
            drafting["model"] = loaded.draft_model(slots)
        elif max_drafts:
            drafting["head_slots"] = slots
        bench = loaded.bench(slots=slots, chunk=128, cache_blocks=cache_blocks, **drafting)
        found = asyncio.run(run_at_random(bench, groups, rng))
        for group, readers in zip(groups, found, strict=True):
            group.check(readers)
        assert bench.tally.num_open == bench.tally.kv_bytes == 0
    assert num_set_aside() >= 5
