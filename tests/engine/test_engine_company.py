"""What a request gets does not depend on who else is there, to the last bit."""

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from maskdial.causal.sampling.dry import Breakers
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import SharedPrompt

pytestmark = pytest.mark.slow

NUM_REQUESTS = 120
EOS = 0
STOPS = (" the", "e", "an", ".", ", ", "th", " a", "ing", "\n")


def random_params(rng: random.Random, prompt: tuple[int, ...], vocab_size: int) -> SamplingParams:
    """Any of the parameters, each in some of the requests."""

    def some(value: Any, default: Any, chance: float = 0.3) -> Any:
        return value if rng.random() < chance else default

    max_new_tokens = rng.randint(1, 12)
    bias = [(rng.randrange(vocab_size), rng.uniform(-8, 8)) for _ in range(rng.randint(1, 5))]
    bias.append((EOS, rng.uniform(0, 9)))
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=some(rng.randint(1, max_new_tokens), 0),
        do_sample=rng.random() < 0.8,
        temperature=some(rng.choice((0.0, 0.3, 0.7, 1.4)), 1.0, 0.5),
        top_k=some(rng.choice((1, 5, 50, 5000)), 0),
        top_p=some(rng.uniform(0.1, 1), 1.0),
        min_p=some(rng.uniform(0, 0.3), 0.0),
        typical_p=some(rng.uniform(0.1, 1), 1.0),
        repetition_penalty=some(rng.uniform(0.8, 1.6), 1.0),
        frequency_penalty=some(rng.uniform(-1, 2), 0.0),
        presence_penalty=some(rng.uniform(-1, 2), 0.0),
        dry_multiplier=some(rng.uniform(0.5, 5), 0.0),
        dry_penalty_last_n=some(-1, 64),
        dry_breakers=Breakers.of({}, vocab_size),
        top_n_sigma=some(rng.uniform(0.5, 3), 0.0, 0.1),
        xtc_probability=some(rng.uniform(0.2, 1), 0.0, 0.2),
        dynatemp_range=some(rng.uniform(0.1, 1), 0.0, 0.1),
        mirostat=some(2, 0, 0.2),
        logit_bias=some(tuple(bias), ()),
        stop=some(tuple(rng.sample(STOPS, rng.randint(1, 3))), ()),
        include_stop=rng.random() < 0.5,
        stop_token_ids=some(frozenset(rng.sample(range(200, 400), 30)), frozenset()),
        ignore_eos=some(True, False),
        top_n_tokens=some(rng.randint(1, 5), 0),
        prompt_logprobs=len(prompt) < 150 and rng.random() < 0.2,
    )


@pytest.fixture(scope="module")
def requests(starter: Any) -> list[Any]:
    """Random requests. Some prompts begin alike, so that the prefix cache has something to do."""
    rng = random.Random(6)
    vocab_size = starter.manifest.vocab_size
    grammars = [
        starter.grammar("regex", "[a-z]{2,8}( [a-z]{2,8})*"),
        starter.grammar("json", {"type": "array", "items": {"enum": ["red", "green", None, 7]}}),
        starter.grammar("lark", 'start: ("yes" | "no") (", " ("yes" | "no"))*'),
    ]
    beginnings = [starter.random_prompt(rng, length) for length in (70, 130, 200)]
    requests = []
    for _ in range(NUM_REQUESTS):
        length = rng.choice((1, 2, rng.randint(3, 70), rng.randint(60, 300)))
        prompt = starter.random_prompt(rng, length)
        if rng.random() < 0.3:
            prompt = (rng.choice(beginnings) + prompt)[:300]
        request = starter.request(prompt)
        requests.append(
            replace(
                request,
                params=random_params(rng, prompt, vocab_size),
                seed=rng.randrange(2**64),
                grammar=rng.choice(grammars) if rng.random() < 0.15 else None,
                priority=rng.randint(-2, 2),
                salt=rng.choice(("", "", "tenant")),
            )
        )
    return requests


@pytest.fixture(scope="module")
def alone(starter: Any, requests: list[Any]) -> list[Any]:
    replies: list[Any] = starter.bench().run_alone(requests)
    return replies


def run_in_company(bench: Any, requests: list[Any], rng: random.Random) -> list[Any]:
    """Sends the requests at random times, among others that leave at random times."""

    async def main() -> list[Any]:
        pending = list(enumerate(requests))
        rng.shuffle(pending)
        readers: dict[int, Any] = {}
        others: list[Any] = []
        while pending or bench.tally.num_open:
            for _ in range(rng.choice((0, 0, 0, 1, 2, 16))):
                if pending:
                    number, request = pending.pop()
                    readers[number] = bench.submit(request)
                if pending and rng.random() < 0.4:
                    shared = rng.choice((None, SharedPrompt()))
                    other = rng.choice(requests)
                    others += [bench.submit(other, shared) for _ in range(rng.randint(1, 3))]
            for other in rng.sample(others, min(len(others), rng.randint(0, 2))):
                others.remove(other)
                await other.leave()
            await bench.step(rng.randint(1, 3))
            if rng.random() < 0.2:  # all slots are free, so the next ones start together
                while bench.tally.num_open:
                    await bench.step()
        await bench.step()
        return [readers[number].reply for number in range(len(requests))]

    return asyncio.run(main())


def test_the_requests_take_every_path(requests: list[Any], alone: list[Any]) -> None:
    """Otherwise the other tests here would show less than they say."""
    assert {reply.reason for reply in alone} == {"length", "eos_token", "stop_sequence"}
    assert {reply.error for reply in alone} == {None}
    assert any(len(reply.top[0]) for reply in alone)
    assert any(reply.prompt_logprobs for reply in alone)
    assert len({reply.token_ids for reply in alone}) > NUM_REQUESTS / 2
    for request, reply in zip(requests, alone, strict=True):
        assert 1 <= len(reply.token_ids) <= request.params.max_new_tokens
        assert "".join(reply.texts) == reply.text
        if request.params.prompt_logprobs:
            assert len(reply.prompt_logprobs) == len(request.prompt) - 1


@pytest.mark.parametrize(
    ("slots", "chunk", "cache_blocks"),
    [(8, 256, 0), (8, 64, 170), (3, 128, 6)],
)
def test_alone_and_in_random_company_are_equal(
    starter: Any,
    requests: list[Any],
    alone: list[Any],
    slots: int,
    chunk: int,
    cache_blocks: int,
) -> None:
    bench = starter.bench(slots=slots, chunk=chunk, cache_blocks=cache_blocks)
    together = run_in_company(bench, requests, random.Random(chunk + 1))
    for number, (reply, wanted) in enumerate(zip(together, alone, strict=True)):
        assert reply == wanted, f"request {number}: {requests[number]}"
    assert bench.runner.largest_decode >= slots - 1  # texts may end before the last one begins
    assert "disconnect" in bench.tally.cancelled
    assert (bench.tally.num_hit > 0) == (cache_blocks > 0)
    assert bench.tally.kv_bytes == 0
    assert bench.runner.num_joint_prefills > 0


def test_one_after_the_other_in_a_single_slot(
    starter: Any, requests: list[Any], alone: list[Any]
) -> None:
    bench = starter.bench(slots=1, chunk=64, cache_blocks=170)
    assert bench.run_together(requests) == alone


def test_prompts_that_come_at_once(starter: Any) -> None:
    """Of lengths around the kernel's block, in every order: some of them are read together."""
    rng = random.Random(6)
    lengths = [1, 1, 2, 3, 20, 63, 64, 64, 65, 65, 66, 90, 127, 128, 129, 129, 130, 193]
    requests = [
        starter.request(starter.random_prompt(rng, length), max_new_tokens=2, top_n_tokens=2)
        for length in lengths * 3
    ]
    rng.shuffle(requests)
    alone = starter.bench().run_alone(requests)
    bench = starter.bench(chunk=512)
    assert bench.run_together(requests) == alone
    assert bench.runner.num_joint_prefills > 0
