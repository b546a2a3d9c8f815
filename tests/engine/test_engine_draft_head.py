"""What reads hidden states writes drafts, and no text depends on it: a layer for multi-token
prediction, and an EAGLE-3 head.

The models with a layer have a recurrent one as well, whose states are restored after wrong drafts.
What it drafts is what it predicts from the text alone, whoever comes and goes.
"""

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from maskdial.causal.sequence import SharedPrompt
from maskdial.runtime.piece import Piece
from tests.engine.conftest import MAX_LENGTH, WatchedRunner
from tests.engine.test_engine_company import run_in_company

MAX_DRAFTS = 5


@pytest.fixture(
    params=[
        pytest.param("circling_model", id="mtp"),
        pytest.param("circling_experts_model", id="mtp-experts", marks=pytest.mark.zoo),
        pytest.param("circling_eagle_model", id="eagle"),
    ]
)
def model(request: pytest.FixtureRequest) -> Any:
    loaded = request.getfixturevalue(request.param)
    if loaded.kernels is None:
        pytest.skip("the kernels are not built")
    assert loaded.session.is_exact
    return loaded


def requests_of(model: Any, num_requests: int) -> list[Any]:
    """Prompts of all lengths; some texts are greedy, others part from the circle."""
    rng = random.Random(5)
    return [
        model.request(
            model.random_prompt(rng, rng.choice((1, 2, 30, 100, 150))),
            max_new_tokens=rng.randint(4, 30),
            do_sample=number % 3 > 0,
            temperature=0.7,
            seed=number,
            ignore_eos=True,
        )
        for number in range(num_requests)
    ]


class Predictor:
    """Predicts from whole texts, each read in one piece by the model and then by the head."""

    def __init__(self, model: Any) -> None:
        settings = {"slots": 1, "max_length": MAX_LENGTH, "vocab_size": model.manifest.vocab_size}
        self.main = WatchedRunner(
            model.session, model.layout, hidden_size=model.hidden_size, **settings
        )
        self.head = model.head_runner(1)
        token_ids = model.bundle.draft_tokens()
        self.token_ids = np.arange(model.manifest.vocab_size) if token_ids is None else token_ids

    def __call__(self, text: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
        token_ids, none = np.array(text, np.int64), np.empty(0, np.int64)
        self.main.prefill(0, token_ids[:-1], 0)
        hidden, piece, start = self.main.hidden([0])[0], token_ids[1:], 0
        found: list[int] = []
        while len(found) < num_tokens:
            read = Piece.of(0, piece, start)._replace(previous_hidden=hidden.copy())
            logits = np.asarray(self.head.decode_and_prefill(none, none, none, [read]))
            found.append(int(self.token_ids[logits[0].argmax()]))
            start += len(piece)
            hidden, piece = self.head.hidden([0])[0][-1:], np.array(found[-1:], np.int64)
        return tuple(found)


@pytest.mark.parametrize("slots", [1, 4])
def test_it_drafts_what_it_predicts_from_the_text(model: Any, slots: int) -> None:
    """In company as well: the slots of the model and of the head change hands."""
    requests = requests_of(model, 12)
    wanted = model.bench().run_alone(requests)
    bench = model.bench(
        slots=slots, max_drafts=MAX_DRAFTS, proposers=(), head_slots=slots, chunk=64
    )
    assert run_in_company(bench, requests, random.Random(slots)) == wanted
    num_drafts, num_accepted = map(sum, zip(*bench.tally.drafts, strict=True))
    assert num_accepted > 50
    assert num_drafts - num_accepted > 4
    pairs = bench.model.drafted
    assert max(len(drafted) for _, drafted in pairs) >= MAX_DRAFTS - 1
    predict = Predictor(model)
    for text, drafted in pairs[::7]:
        assert drafted == predict(text, len(drafted))


def test_what_comes_from_elsewhere_has_no_hidden_states(model: Any) -> None:
    """A prefix of the cache, and a prompt that another sequence has read: drafts begin after it."""
    rng = random.Random(3)
    prompt = model.random_prompt(rng, 150)
    requests = [
        model.request(
            prompt, max_new_tokens=20, do_sample=True, temperature=0.5, seed=seed, ignore_eos=True
        )
        for seed in range(3)
    ]
    wanted = model.bench().run_alone(requests)
    bench = model.bench(slots=2, max_drafts=MAX_DRAFTS, proposers=(), head_slots=2, cache_blocks=20)
    assert bench.run_alone(requests) == wanted
    assert bench.tally.num_hit > 0
    before = len(bench.tally.drafts)

    async def copies() -> list[Any]:
        shared = SharedPrompt()
        readers = [bench.submit(request, shared) for request in requests]
        await bench.run_dry()
        return [reader.reply for reader in readers]

    assert asyncio.run(copies()) == wanted
    assert sum(accepted for _, accepted in bench.tally.drafts[before:]) > 10
