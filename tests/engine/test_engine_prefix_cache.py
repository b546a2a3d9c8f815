"""Prompts whose beginning is taken from the cache give what prompts read in full give."""

import random
from dataclasses import replace
from typing import Any

import pytest

pytestmark = pytest.mark.slow

BLOCK = 64
AMPLE = 100  # blocks


@pytest.mark.parametrize(
    ("num_prompt", "num_reusable"),
    [(1, 0), (63, 0), (65, 0), (66, 64), (129, 64), (130, 128), (300, 256)],
)
def test_a_repeated_prompt(starter: Any, num_prompt: int, num_reusable: int) -> None:
    prompt = starter.random_prompt(random.Random(num_prompt), num_prompt)
    request = starter.request(
        prompt, max_new_tokens=12, do_sample=True, seed=5, repetition_penalty=1.2, top_n_tokens=3
    )
    (wanted,) = starter.bench().run_alone([request])
    bench = starter.bench(cache_blocks=AMPLE)
    assert bench.run_alone([request] * 3) == [wanted] * 3
    assert bench.tally.num_queried == 3 * num_prompt
    assert bench.tally.num_hit == 2 * num_reusable
    assert bench.tally.num_read == 3 * num_prompt - 2 * num_reusable


def test_prompts_that_begin_alike(starter: Any) -> None:
    """They part within a block and between two; several of them come at once."""
    rng = random.Random(7)
    common = starter.random_prompt(rng, 280)
    requests = [
        starter.request(
            common[: rng.randint(1, 280)] + starter.random_prompt(rng, rng.randint(1, 100)),
            max_new_tokens=8,
        )
        for _ in range(40)
    ]
    wanted = starter.bench().run_alone(requests)
    bench = starter.bench(cache_blocks=AMPLE, chunk=128, slots=4)
    assert bench.run_together(requests) == wanted
    num_tokens = sum(len(request.prompt) for request in requests)
    assert bench.tally.num_queried == num_tokens
    assert bench.tally.num_read == num_tokens - bench.tally.num_hit
    assert bench.tally.num_hit > num_tokens / 4


@pytest.mark.parametrize("num_blocks", [0.5, 1, 2, 5])
def test_a_cache_too_small_for_all(starter: Any, num_blocks: float) -> None:
    """Beginnings are lost all the time, and never wrong ones found."""
    rng = random.Random(8)
    commons = [starter.random_prompt(rng, length) for length in (70, 140, 210)]
    requests = [
        starter.request(
            rng.choice(commons) + starter.random_prompt(rng, rng.randint(1, 70)), max_new_tokens=3
        )
        for _ in range(25)
    ]
    wanted = starter.bench().run_alone(requests)
    bench = starter.bench(cache_blocks=num_blocks, slots=3)
    assert bench.run_together(requests) == wanted
    most = starter.bench(cache_blocks=AMPLE, slots=3)
    most.run_together(requests)
    assert (bench.tally.num_hit > 0) == (num_blocks >= 1)
    assert bench.tally.num_hit < most.tally.num_hit


def test_tenants_share_nothing(starter: Any) -> None:
    request = starter.request(starter.random_prompt(random.Random(9), 200), max_new_tokens=5)
    other = replace(request, salt="another tenant")
    (wanted,) = starter.bench().run_alone([request])
    bench = starter.bench(cache_blocks=AMPLE)
    assert bench.run_alone([request, other]) == [wanted] * 2
    assert bench.tally.num_hit == 0
    assert bench.run_alone([request, other]) == [wanted] * 2
    assert bench.tally.num_hit == 2 * 192


def test_prompt_log_probabilities_are_read_not_remembered(starter: Any) -> None:
    prompt = starter.random_prompt(random.Random(10), 200)
    plain = starter.request(prompt, max_new_tokens=5)
    detailed = starter.request(prompt, max_new_tokens=5, prompt_logprobs=True)
    wanted = starter.bench().run_alone([plain, detailed])
    bench = starter.bench(cache_blocks=AMPLE)
    assert bench.run_alone([plain, detailed]) == wanted
    assert bench.tally.num_read == 400
    assert (bench.tally.num_queried, bench.tally.num_hit) == (200, 0)
    assert bench.run_alone([plain]) == wanted[:1]
    assert bench.tally.num_hit == 192


def test_what_is_generated_in_a_slot_is_not_taken_for_a_prompt(starter: Any) -> None:
    """A conversation: each prompt is the last one, its reply, and a little more."""
    bench = starter.bench(cache_blocks=AMPLE)
    plain = starter.bench()
    prompt = starter.random_prompt(random.Random(11), 60)
    for turn in range(5):
        request = starter.request(prompt, max_new_tokens=40)
        (reply,) = bench.run_alone([request])
        assert [reply] == plain.run_alone([request])
        prompt += reply.token_ids + tuple(range(100 + turn, 110 + turn))
    assert 0 < bench.tally.num_hit < plain.tally.num_read
