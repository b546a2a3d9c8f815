"""Models with recurrent layers: a sequence's states are its own, wherever it goes.

The model interleaves gated delta nets, which have a short convolution each, with attention.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import tokenizers

from maskdial.bundle.bundle import load_bundle
from maskdial.causal.beam_search import BeamParams, BeamSearch
from maskdial.causal.sequence import Sequence, SharedPrompt
from maskdial.metrics import DraftKind
from tests.engine.conftest import MAX_LENGTH, LoadedModel, Reader

pytestmark = pytest.mark.slow

NUM_REQUESTS = 40
TEXT_LAYERS = ("linear_attention", "full_attention", "linear_attention")


@pytest.fixture(scope="module", params=["fp32", "int8"])
def recurrent(
    request: pytest.FixtureRequest,
    torch: ModuleType,
    byte_tokenizer: Callable[..., tokenizers.Tokenizer],
    tmp_path_factory: pytest.TempPathFactory,
) -> LoadedModel:
    import transformers

    from maskdial_export.export import export

    folder = tmp_path_factory.mktemp("recurrent")
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = transformers.Qwen3_5TextConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=len(TEXT_LAYERS),
        layer_types=list(TEXT_LAYERS),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        linear_num_key_heads=4,
        linear_num_value_heads=16,  # int8 in int8 bundles, where products with fewer outputs stay
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=None,
        initializer_range=0.15,
    )
    transformers.Qwen3_5ForCausalLM(config).save_pretrained(folder)
    export(str(folder), folder / "bundle", precision=request.param, strict=False)
    return LoadedModel(load_bundle("recurrent", folder / "bundle"))


@pytest.fixture(scope="module")
def requests(recurrent: LoadedModel) -> list[Any]:
    """Some prompts begin alike; lengths lie around a block, which has 32 tokens."""
    rng = random.Random(5)
    beginnings = [recurrent.random_prompt(rng, length) for length in (40, 70, 100)]
    requests = []
    for number in range(NUM_REQUESTS):
        length = rng.choice((1, 2, 31, 32, 33, 34, rng.randint(3, 30), rng.randint(35, 150)))
        prompt = recurrent.random_prompt(rng, length)
        if number % 3 == 0:
            prompt = rng.choice(beginnings) + prompt
        requests.append(
            recurrent.request(
                prompt,
                max_new_tokens=rng.randint(1, 10),
                do_sample=True,
                seed=rng.randrange(2**64),
                top_n_tokens=2,
                ignore_eos=True,
                prompt_logprobs=length < 60 and rng.random() < 0.2,
            )
        )
    return requests


@pytest.fixture(scope="module")
def alone(recurrent: LoadedModel, requests: list[Any]) -> list[Any]:
    return recurrent.bench().run_alone(requests)


@pytest.mark.parametrize(
    ("slots", "chunk", "cache_blocks"), [(8, 256, 0), (8, 32, 100), (3, 64, 5), (1, 128, 100)]
)
def test_alone_and_in_random_company_are_equal(
    recurrent: LoadedModel,
    requests: list[Any],
    alone: list[Any],
    slots: int,
    chunk: int,
    cache_blocks: int,
) -> None:
    """Copies, cancelled requests, holes that are filled: nothing mixes the sequences' states."""
    rng = random.Random(chunk)
    bench = recurrent.bench(slots=slots, chunk=chunk, cache_blocks=cache_blocks)

    async def main() -> list[Any]:
        pending = list(enumerate(requests))
        rng.shuffle(pending)
        readers: dict[int, Reader] = {}
        others: list[Reader] = []
        while pending or bench.tally.num_open:
            for _ in range(rng.choice((0, 0, 1, 2, 9))):
                if pending:
                    number, request = pending.pop()
                    readers[number] = bench.submit(request)
                    shared = SharedPrompt()
                    others += [bench.submit(request, shared) for _ in range(rng.randint(0, 3))]
            for other in rng.sample(others, min(len(others), rng.randint(0, 2))):
                others.remove(other)
                await other.leave()
            await bench.step(rng.randint(1, 3))
        await bench.step()
        return [readers[number].reply for number in range(len(requests))]

    together = asyncio.run(main())
    for number, (reply, wanted) in enumerate(zip(together, alone, strict=True)):
        assert reply == wanted, f"request {number}: {requests[number]}"
    assert (bench.tally.num_hit > 0) == (cache_blocks > 0)
    assert bench.tally.kv_bytes == 0


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("num_prompt", [1, 32, 75])
def test_each_copy_is_what_it_is_alone(recurrent: LoadedModel, num_prompt: int, slots: int) -> None:
    """Those that wait for a slot go on from the prompt's states, though its reader went on."""
    request = recurrent.request(
        recurrent.random_prompt(random.Random(num_prompt), num_prompt),
        do_sample=True,
        ignore_eos=True,
    )
    copies = [
        replace(request, params=replace(request.params, max_new_tokens=1 + 3 * seed), seed=seed)
        for seed in range(5)
    ]
    bench = recurrent.bench(slots=slots)

    async def main() -> list[Any]:
        shared = SharedPrompt()
        readers = [bench.submit(copy, shared) for copy in copies]
        await bench.run_dry()
        return [reader.reply for reader in readers]

    assert asyncio.run(main()) == recurrent.bench().run_alone(copies)
    assert bench.tally.num_read == num_prompt


def test_a_conversation_reads_only_what_is_new(recurrent: LoadedModel) -> None:
    """Each turn goes on from the states at the last whole block of the turn before."""
    rng = random.Random(9)
    bench = recurrent.bench(cache_blocks=100)
    prompt: tuple[int, ...] = recurrent.random_prompt(rng, 70)
    block, read = recurrent.layout.query_block, 0
    for _ in range(4):
        request = recurrent.request(prompt, max_new_tokens=5, ignore_eos=True)
        (reply,) = bench.run_alone([request])
        (wanted,) = recurrent.bench().run_alone([request])
        assert reply == wanted
        num_new, read = bench.tally.num_read - read, bench.tally.num_read
        prompt += reply.token_ids + recurrent.random_prompt(rng, 30)
    assert num_new < 5 + 30 + block
    assert bench.tally.num_hit > len(prompt) / 2


def test_a_turn_goes_on_from_where_the_last_one_parts(recurrent: LoadedModel) -> None:
    """As where a template drops what was thought: turn n+1 begins as turn n did up to a border, and
    reads less than a block before it. What a turn thinks and calls is longer than a chunk.
    """
    rng = random.Random(11)
    block = recurrent.layout.query_block
    for chunk, cache_blocks in ((256, 100), (32, 100), (64, 4)):
        bench = recurrent.bench(cache_blocks=cache_blocks, chunk=chunk)
        kept, read = recurrent.random_prompt(rng, 75), 0
        for turn in range(3):
            thought = recurrent.random_prompt(rng, 90)
            for prompt in (kept, kept + thought):
                request = recurrent.request(
                    prompt, max_new_tokens=3, ignore_eos=True, top_n_tokens=3
                )
                request = replace(request, borders=(40, len(kept)))
                (reply,) = bench.run_alone([request])
                (wanted,) = recurrent.bench().run_alone([request])
                assert reply == wanted
                num_new, read = bench.tally.num_read - read, bench.tally.num_read
                if turn and cache_blocks == 100:
                    new = 20 if prompt is kept else len(thought)
                    assert num_new < new + block + 2
            kept += recurrent.random_prompt(rng, 20)
        assert bench.tally.kv_bytes == 0


def test_the_third_prompt_that_begins_alike_reads_only_its_own(recurrent: LoadedModel) -> None:
    """Nothing tells where prompts part, until a second one does."""
    rng = random.Random(6)
    common, block = recurrent.random_prompt(rng, 200), recurrent.layout.query_block
    bench, read = recurrent.bench(cache_blocks=100), [0]
    for _ in range(4):
        prompt = common + recurrent.random_prompt(rng, 50)
        request = recurrent.request(prompt, max_new_tokens=3, ignore_eos=True, top_n_tokens=3)
        assert bench.run_alone([request]) == recurrent.bench().run_alone([request])
        read.append(bench.tally.num_read)
    new = [after - before for before, after in pairwise(read)]
    assert all(number < 50 + block for number in new[2:])
    assert new[0] == 250


@pytest.mark.parametrize("num_beams", [2, 4])
def test_beams_take_their_states_along(
    recurrent: LoadedModel, num_beams: int, torch: ModuleType
) -> None:
    """Against the engine with the cache read anew: each beam's text is scored as it is alone."""
    prompt = recurrent.random_prompt(random.Random(2), 40)
    params = recurrent.request(prompt, max_new_tokens=8, ignore_eos=True).params

    async def main() -> list[Any]:
        bench = recurrent.bench(slots=8)
        readers = [Sequence(prompt, params) for _ in range(num_beams)]
        beams = [Sequence(prompt, params) for _ in range(num_beams)]
        BeamSearch(readers, beams, BeamParams(num_beams=num_beams))
        streams = [Reader(each, bench.engine.stream(each)) for each in readers]
        await bench.run_dry()
        return [each.reply for each in streams]

    for reply in asyncio.run(main()):
        text = prompt + reply.token_ids
        request = recurrent.request(text, max_new_tokens=1, prompt_logprobs=True)
        (whole,) = recurrent.bench().run_alone([request])
        scored = [each.logprob for each in whole.prompt_logprobs[len(prompt) - 1 :]]
        assert reply.logprobs == pytest.approx(scored, abs=1e-4)


def test_a_failed_pass_fails_its_sequences_only(recurrent: LoadedModel) -> None:
    request = recurrent.request(
        recurrent.random_prompt(random.Random(3), 40), max_new_tokens=9, ignore_eos=True
    )
    (wanted,) = recurrent.bench().run_alone([request])

    async def main() -> list[Any]:
        bench = recurrent.bench()
        first = bench.submit(request)
        await bench.step(3)
        bench.runner.fail_at = bench.runner.num_prefills
        second, third = bench.submit(request), bench.submit(request)
        shares = bench.runner.decode_and_prefill is not None
        await bench.run_dry()
        return [shares, *(each.reply for each in (first, second, third))]

    shares, first, second, third = asyncio.run(main())
    assert third == wanted
    assert second.error is not None
    if shares:  # the failed pass was also a step of the first, whose states it may have changed
        assert first.error == second.error
    else:
        assert first == wanted


class Foreteller:
    """Knows the texts of all seeds, and is wrong now and then."""

    kind: DraftKind = "prompt"

    def __init__(self, texts: Mapping[int, tuple[int, ...]], rng: random.Random) -> None:
        self._texts = texts
        self._rng = rng

    def reader(self, sequence: Sequence) -> "Foreteller":
        return self

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        text = self._texts[sequence.seed][sequence.num_generated :][:max_tokens]
        return tuple(each if self._rng.random() < 0.8 else 7 for each in text)


def test_wrong_drafts_leave_the_states_as_they_were(recurrent: LoadedModel) -> None:
    """Whatever the others do meanwhile: they come, leave, and move to other slots."""
    if not recurrent.session.is_exact:
        pytest.skip("needs the kernels, and products of integers")
    rng = random.Random(3)
    requests = [
        recurrent.request(
            recurrent.random_prompt(rng, rng.choice((1, 3, 33, 70))),
            max_new_tokens=rng.randint(5, 40),
            do_sample=True,
            seed=seed,
            ignore_eos=True,
            top_n_tokens=2,
        )
        for seed in range(12)
    ]
    wanted = recurrent.bench().run_alone(requests)
    texts = {seed: reply.token_ids for seed, reply in enumerate(wanted)}
    bench = recurrent.bench(
        slots=4, chunk=32, max_drafts=8, proposers=[Foreteller(texts, rng)], cache_blocks=20
    )
    assert bench.run_together(requests) == wanted
    num_drafts, num_accepted = map(sum, zip(*bench.tally.drafts, strict=True))
    assert num_accepted > 50
    assert num_drafts - num_accepted > 50
    assert bench.tally.kv_bytes == 0
