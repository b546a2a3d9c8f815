"""Models with sliding windows: texts longer than a window are what they are alone."""

import asyncio
import mmap
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import tokenizers

from maskdial.bundle.bundle import load_bundle
from maskdial.causal import executor
from maskdial.causal.sequence import SharedPrompt
from maskdial.runtime import kv_cache
from maskdial.runtime.memory import Buffer, HostMemory
from tests.engine.conftest import MAX_LENGTH, LoadedModel
from tests.engine.test_engine_company import run_in_company

pytestmark = pytest.mark.slow

WINDOW = 40
NUM_REQUESTS = 40


@pytest.fixture(scope="module")
def windowed(
    torch: ModuleType,
    byte_tokenizer: Callable[..., tokenizers.Tokenizer],
    tmp_path_factory: pytest.TempPathFactory,
) -> LoadedModel:
    import transformers

    from maskdial_export.export import export

    folder = tmp_path_factory.mktemp("windowed")
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = transformers.Olmo3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=WINDOW,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=None,
        initializer_range=0.15,
    )
    transformers.Olmo3ForCausalLM(config).save_pretrained(folder)
    export(str(folder), folder / "bundle", precision="int8", strict=False)
    return LoadedModel(load_bundle("windowed", folder / "bundle"))


@pytest.fixture(scope="module")
def requests(windowed: LoadedModel) -> list[Any]:
    """Prompts begin alike; lengths lie around the window, and some are several windows long."""
    rng = random.Random(5)
    beginnings = [windowed.random_prompt(rng, length) for length in (40, 70, 130)]
    requests = []
    for number in range(NUM_REQUESTS):
        length = rng.choice((1, 2, WINDOW - 1, WINDOW, WINDOW + 1, rng.randint(3, 200)))
        prompt = windowed.random_prompt(rng, length)
        if number % 3 == 0:
            prompt = rng.choice(beginnings) + prompt
        requests.append(
            windowed.request(
                prompt,
                max_new_tokens=rng.randint(1, 60),
                do_sample=True,
                seed=rng.randrange(2**64),
                top_n_tokens=2,
                ignore_eos=True,
            )
        )
    return requests


@pytest.fixture(scope="module")
def alone(windowed: LoadedModel, requests: list[Any]) -> list[Any]:
    return windowed.bench().run_alone(requests)


@pytest.fixture
def num_forgotten(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has the cache forget early and often; counts how often."""
    calls: list[int] = []
    decommit = HostMemory.decommit

    def count(memory: HostMemory, buffer: Buffer) -> None:
        calls.append(buffer.num_bytes)
        decommit(memory, buffer)

    monkeypatch.setattr(kv_cache, "_MAX_DROPPED", 8)
    monkeypatch.setattr(executor, "_FORGET_EVERY", 16)
    monkeypatch.setattr(HostMemory, "decommit", count)
    return calls


@pytest.mark.parametrize(
    ("slots", "chunk", "cache_blocks"), [(8, 256, 0), (8, 32, 100), (3, 64, 5), (1, 128, 100)]
)
def test_alone_and_in_random_company_are_equal(
    windowed: LoadedModel,
    requests: list[Any],
    alone: list[Any],
    num_forgotten: list[int],
    slots: int,
    chunk: int,
    cache_blocks: int,
) -> None:
    bench = windowed.bench(slots=slots, chunk=chunk, cache_blocks=cache_blocks)
    assert run_in_company(bench, requests, random.Random(chunk)) == alone
    assert len(num_forgotten) > 100
    assert max(num_forgotten) > 2 * mmap.PAGESIZE
    assert {reply.error for reply in alone} == {None}
    assert bench.tally.kv_bytes == 0


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_each_copy_is_what_it_is_alone(
    windowed: LoadedModel, num_forgotten: list[int], slots: int
) -> None:
    """The others begin when the one that read the prompt has left its beginning behind."""
    prompt = windowed.random_prompt(random.Random(2), 3 * WINDOW)
    copies = [
        windowed.request(prompt, max_new_tokens=200, do_sample=True, seed=seed, ignore_eos=True)
        for seed in range(4)
    ]
    wanted = windowed.bench().run_alone(copies)
    bench = windowed.bench(slots=slots)

    async def main() -> list[Any]:
        shared = SharedPrompt()
        readers = [bench.submit(request, shared) for request in copies]
        await bench.run_dry()
        return [reader.reply for reader in readers]

    assert asyncio.run(main()) == wanted
