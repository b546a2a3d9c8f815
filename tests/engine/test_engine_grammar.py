"""Constrained texts from the real model, several at a time.

TESTS_JSON_REPLIES says how many replies are checked against their schema.
"""

import asyncio
import json
import os
import random
import threading
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
import pytest

from maskdial.causal.sequence import SharedPrompt
from maskdial.errors import ValidationError
from maskdial.grammar import masks
from maskdial.grammar.matcher import GrammarMatcher

NUM_REPLIES = int(os.environ.get("TESTS_JSON_REPLIES", "12"))
STORY = "Once upon a time there was a little"

SHORT_TEXT = {"type": "string", "maxLength": 8}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": SHORT_TEXT,
        "kind": {"enum": ["king", "wolf", "tree", None, 7]},
        "age": {"type": "integer", "minimum": -5, "maximum": 120},
        "mood": {"type": ["string", "null"], "maxLength": 6},
        "size": {"type": "number", "minimum": 0, "maximum": 1},
        "is_old": {"type": "boolean"},
        "house": {
            "type": "object",
            "properties": {
                "rooms": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "color": {"enum": ["red", "blue"]},
                            "doors": {"type": "integer", "minimum": 1, "maximum": 3},
                        },
                        "required": ["color", "doors"],
                        "additionalProperties": False,
                    },
                    "minItems": 1,
                    "maxItems": 3,
                },
                "owner": {"anyOf": [{"type": "null"}, SHORT_TEXT]},
            },
            "required": ["rooms"],
            "additionalProperties": False,
        },
        "friends": {"type": "array", "items": SHORT_TEXT, "maxItems": 2},
    },
    "required": ["name", "kind", "age", "house", "friends"],
    "additionalProperties": False,
}


def constrained(starter: Any, kind: str, value: Any, **params: Any) -> Any:
    request = starter.request(STORY, **params)
    return replace(request, grammar=starter.grammar(kind, value))


@pytest.mark.slow
def test_replies_fit_their_schema(starter: Any) -> None:
    requests = [
        constrained(
            starter,
            "json_schema",
            SCHEMA,
            max_new_tokens=480,
            do_sample=True,
            temperature=(0.7, 1.0, 1.5)[seed % 3],
            top_p=(1.0, 0.9)[seed % 2],
            seed=seed,
        )
        for seed in range(NUM_REPLIES)
    ]
    replies = starter.bench().run_together(requests)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for reply in replies:
        assert reply.error is None
        assert reply.reason == "eos_token"
        validator.validate(json.loads(reply.text))
    assert len({reply.text for reply in replies}) > 0.9 * NUM_REPLIES
    assert starter.bench().run_alone(requests[:3]) == replies[:3]


@pytest.mark.parametrize("greedy", [True, False])
def test_a_regex_holds_to_the_end(starter: Any, greedy: bool) -> None:
    """It ends by itself, or where there are enough tokens; even a bias does not break it."""
    requests = [
        constrained(
            starter,
            "regex",
            "(ab|cd){2,6}",
            max_new_tokens=30,
            do_sample=not greedy,
            seed=seed,
            ignore_eos=seed % 2 == 0,
            logit_bias=((seed + 300, 100.0),),
            min_new_tokens=seed % 4,
        )
        for seed in range(20)
    ]
    for reply in starter.bench(slots=4).run_together(requests):
        assert reply.reason == "eos_token"
        pairs = [reply.text[i : i + 2] for i in range(0, len(reply.text), 2)]
        assert set(pairs) <= {"ab", "cd"}
        assert 2 <= len(pairs) <= 6


def test_a_grammar_that_becomes_too_complex_ends_its_own_text_only(starter: Any) -> None:
    """llguidance finds out after the first token, once it has been taken."""
    hostile = constrained(
        starter,
        "json",
        {"type": "object", "properties": {f"p{i}": True for i in range(1500)}},
        max_new_tokens=50,
    )
    others = [
        constrained(starter, "json_schema", SCHEMA, do_sample=True, seed=1, max_new_tokens=480),
        starter.request(STORY, max_new_tokens=20),
    ]
    bench = starter.bench(slots=4)
    alone = bench.run_alone(others)
    replies = bench.run_together([hostile, *others, hostile])
    assert replies[1:3] == alone
    for reply in (replies[0], replies[3]):
        assert reply.error is not None
        assert reply.error.startswith("ValidationError")
        assert len(reply.token_ids) <= 2
    assert ValidationError.status == 422
    assert bench.tally.kv_bytes == 0


class SlowMatcher:
    """llguidance's, whose masks take long from the second token on."""

    def __init__(self, matcher: Any, release: threading.Event) -> None:
        self._matcher = matcher
        self._release = release
        self.asked = threading.Event()

    def compute_bitmask(self) -> bytes:
        self.asked.set()
        while not self._release.is_set():
            sum(range(1000))
        return bytes(self._matcher.compute_bitmask())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


def test_a_mask_without_end_holds_up_nobody_else(
    starter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone it is waited for a moment at a time; others arrive, run and end meanwhile."""
    monkeypatch.setattr(masks, "CPU_SECONDS", 0.5)
    release = threading.Event()
    bench = starter.bench(slots=4)
    others = [
        constrained(starter, "regex", "[a-z]{9}", max_new_tokens=12),
        starter.request(STORY, max_new_tokens=12),
    ]
    alone = bench.run_alone(others)

    async def main() -> Any:
        hostile = bench.submit(constrained(starter, "regex", "[a-z]{9}", max_new_tokens=12))
        place = hostile.sequence.grammar._place
        slow = SlowMatcher(place._matcher, release)
        place._matcher = slow
        while not slow.asked.is_set():
            await bench.step(1)
        await bench.step(2)
        readers = [bench.submit(request) for request in others]
        await bench.run_dry()
        return hostile.reply, [reader.reply for reader in readers]

    hostile, replies = asyncio.run(main())
    release.set()
    assert replies == alone
    assert "finding the tokens that may follow takes more" in hostile.error
    assert len(hostile.token_ids) == 1
    assert bench.tally.kv_bytes == 0


@dataclass
class LateMatcher:
    """A matcher whose masks are often not ready when they are asked for."""

    matcher: GrammarMatcher
    rng: random.Random
    num_late: int = 0

    @property
    def ready(self) -> bool:
        late = self.rng.random() < 0.6
        self.num_late += late
        return not late

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_late_masks_change_nothing(starter: Any, slots: int) -> None:
    """Sequences wait for them in their slots, as copies of a prompt and beside others."""
    rng = random.Random(14)
    prompts = [starter.random_prompt(rng, length) for length in (1, 30, 150)]
    grammar = starter.grammar("regex", "([a-z]{1,6} ?){3,8}")
    requests = [
        replace(
            starter.request(
                prompts[number % 3], max_new_tokens=5 + number % 13, do_sample=True, seed=number
            ),
            grammar=grammar if number % 4 else None,
        )
        for number in range(24)
    ]
    alone = starter.bench().run_alone(requests)
    bench = starter.bench(slots=slots, chunk=64)
    late: list[LateMatcher] = []

    async def main() -> list[Any]:
        shared = [SharedPrompt() for _ in prompts]
        readers = []
        for number, request in enumerate(requests):
            reader = bench.submit(request, shared[number % 3] if number > 8 else None)
            if reader.sequence.grammar is not None:
                late.append(LateMatcher(reader.sequence.grammar, rng))
                reader.sequence.grammar = late[-1]
            readers.append(reader)
            await bench.step(rng.randint(0, 3))
        await bench.run_dry()
        return [reader.reply for reader in readers]

    assert asyncio.run(main()) == alone
    assert sum(matcher.num_late for matcher in late) > 50
    assert bench.tally.kv_bytes == 0
