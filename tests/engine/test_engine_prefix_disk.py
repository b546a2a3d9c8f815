"""Prefixes that come from disk, after a restart or an eviction, change no bit of an answer.

Every reply is the same to the last bit, with its log-probabilities, whatever keys and values
consist of, with recurrent states, with draft tokens, and in company.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maskdial.bundle.bundle import load_bundle
from maskdial.bundle.manifest import CacheChoice
from maskdial.registry.catalog import STARTER_FOLDER
from tests.disk import opened, until
from tests.engine.conftest import LoadedModel
from tests.engine.test_engine_recurrent import recurrent

pytestmark = pytest.mark.slow

__all__ = ["recurrent"]

AMPLE = 100  # blocks
DRAFTS = 8


def conversations(model: LoadedModel, seed: int, length: int) -> list[Any]:
    """Prompts that begin alike, and part within blocks and between two."""
    rng = random.Random(seed)
    common = model.random_prompt(rng, length)
    requests = []
    for _ in range(10):
        end = rng.choice((length, rng.randint(length // 2, length)))
        requests.append(
            model.request(
                common[:end] + model.random_prompt(rng, rng.randint(1, length // 3)),
                max_new_tokens=6,
                do_sample=True,
                seed=rng.randrange(2**64),
                top_n_tokens=3,
            )
        )
    return requests


def check(model: LoadedModel, folder: Path, length: int, max_drafts: int = 0) -> None:
    requests = conversations(model, length, length)
    wanted = model.bench().run_alone(requests)
    with opened(folder) as store:
        bench = model.bench(cache_blocks=AMPLE, disk=store, max_drafts=max_drafts)
        assert bench.run_alone(requests) == wanted
        num_hit = bench.tally.num_hit
        assert bench.tally.num_from_disk == 0
    with opened(folder) as store:
        for run in ("run_alone", "run_together"):
            bench = model.bench(cache_blocks=AMPLE, disk=store, max_drafts=max_drafts, slots=4)
            assert getattr(bench, run)(requests) == wanted
            assert bench.tally.num_hit > num_hit > 0
            assert bench.tally.num_from_disk > 0
        # Memory has one conversation at a time: most of each comes from disk again.
        bench = model.bench(cache_blocks=length / model.layout.query_block, disk=store)
        assert bench.run_alone(requests) == wanted
        assert bench.tally.num_from_disk > 0


@pytest.mark.parametrize("kv_cache", ["float", "int16", "int8"])
def test_attention(tmp_path: Path, kv_cache: CacheChoice, starter: LoadedModel) -> None:
    if starter.kernels is None:
        pytest.skip("only the kernels read a KV cache of integers")
    model = LoadedModel(load_bundle("starter", STARTER_FOLDER / "hybrid"), kv_cache)
    check(model, tmp_path, 250)


def test_drafts(tmp_path: Path, starter: LoadedModel) -> None:
    if not starter.session.is_exact:
        pytest.skip("drafts change last bits without the kernels")
    check(starter, tmp_path, 250, DRAFTS)


def test_recurrent_states(tmp_path: Path, recurrent: LoadedModel) -> None:
    check(recurrent, tmp_path, 150)


def test_borders_come_from_disk(tmp_path: Path, recurrent: LoadedModel) -> None:
    """Prompts that part at a border, each read by another server than the one before."""
    rng = random.Random(8)
    block = recurrent.layout.query_block
    kept, read = recurrent.random_prompt(rng, 110), []
    for _ in range(4):
        prompt = kept + recurrent.random_prompt(rng, 70)
        request = recurrent.request(prompt, max_new_tokens=4, ignore_eos=True, top_n_tokens=3)
        request = replace(request, borders=(len(kept),))
        wanted = recurrent.bench().run_alone([request])
        with opened(tmp_path) as store:
            bench = recurrent.bench(cache_blocks=AMPLE, disk=store)
            assert bench.run_alone([request]) == wanted
            read.append(bench.tally.num_read)
            assert bench.tally.num_from_disk == len(prompt) - read[-1]
    assert read[0] == len(prompt)
    assert all(number < 70 + block for number in read[1:])


def test_a_head_that_drafts(tmp_path: Path, circling_model: LoadedModel) -> None:
    """Its own keys and values are not kept; what it proposes is verified."""
    requests = conversations(circling_model, 4, 150)
    wanted = circling_model.bench().run_alone(requests)
    for from_disk in (False, True):
        with opened(tmp_path) as store:
            bench = circling_model.bench(
                cache_blocks=AMPLE, disk=store, max_drafts=DRAFTS, head_slots=8
            )
            assert bench.run_together(requests) == wanted
            assert (bench.tally.num_from_disk > 0) == from_disk


def test_damage_anywhere_changes_no_answer(tmp_path: Path, starter: LoadedModel) -> None:
    """Blocks are flipped, cut and emptied between two runs."""
    requests = conversations(starter, 9, 250)
    wanted = starter.bench().run_alone(requests)
    rng = random.Random(1)
    for _ in range(4):
        with opened(tmp_path) as store:
            bench = starter.bench(cache_blocks=AMPLE, disk=store)
            assert bench.run_together(requests) == wanted
            until(lambda store=store: not store._queue)  # type: ignore[misc]
            for path in rng.sample(sorted(tmp_path.glob("*.block")), 4):
                content = bytearray(path.read_bytes())
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
                path.write_bytes(content[: rng.choice((0, 100, len(content), len(content)))])
            bench = starter.bench(cache_blocks=AMPLE, disk=store)
            assert bench.run_together(requests) == wanted
