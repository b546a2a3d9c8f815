"""Encoder-decoder models in the server's engine, compared with transformers' `generate`."""

import asyncio
import contextlib
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from maskdial.bundle.bundle import load_bundle
from maskdial.bundle.manifest import ENCODER_GRAPH, GRAPH
from maskdial.causal.generate import Generation, Text
from maskdial.causal.model import CausalModel
from maskdial.causal.request import GenerationRequest, Writing
from maskdial.causal.sampling.params import SamplingParams
from maskdial.config import Config
from maskdial.engine.timing import Deadline
from maskdial.metrics import Metrics
from maskdial.registry.loading import load_model
from maskdial.runtime.encoder import Encoder
from maskdial.runtime.memory import HostMemory, Memory
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.quantize.gate import Gate
from tests.export.zoo import TEXT_TO_TEXT, marked

Folder = Callable[[str], Path]
Load = Callable[[Path], Any]
CONFIG = Config(slots=3, threads=1)
MIXED = Writing(no_repeat_ngram_size=2)  # tiny random models repeat themselves otherwise


def sources_of(lengths: Sequence[int]) -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(4, 100, length).tolist() for length in lengths]


def serving(
    folder: Path, use: Callable[[CausalModel], Awaitable[None]], config: Config = CONFIG
) -> None:
    """Runs a coroutine with the served model of a bundle."""

    async def run() -> None:
        model = load_model("model", folder, config, Metrics())
        assert isinstance(model, CausalModel)
        try:
            await model.engine.warm_up()
            await use(model)
        finally:
            model.stop()

    asyncio.run(run())


async def texts_of(model: CausalModel, request: GenerationRequest) -> list[Text]:
    """The texts of a request's only prompt."""
    deadline = Deadline(60, CONFIG)
    generation = await Generation.prepare(request, model, CONFIG, deadline)
    (completion,) = await generation.complete()
    return completion.texts


def ids_of(text: Text) -> list[int]:
    return [event.token_id for event in text.events]


def expected_ids(model: Any, source: Sequence[int], **settings: Any) -> list[list[int]]:
    """What transformers writes, without the token that the decoder starts from."""
    ids = torch.tensor([source])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **settings)
    written = [row[1:].tolist() for row in output]
    ends = [row.index(3) + 1 if 3 in row else len(row) for row in written]
    return [row[:end] for row, end in zip(written, ends, strict=True)]


@pytest.mark.parametrize("name", marked(TEXT_TO_TEXT))
def test_greedy_texts_equal_generate_in_company(
    name: str, bundle: Folder, checkpoint: Folder, load_reference: Load
) -> None:
    """Ragged sources and texts, more of them than slots; also alone, to the last bit."""
    reference = load_reference(checkpoint(name))
    sources = sources_of([20, 3, 60, 7, 33])
    limits = [4, 9, 14, 12, 17]

    async def compare(model: CausalModel) -> None:
        requests = [
            GenerationRequest([source], max_new_tokens=limit, writing=writing)
            for writing in (Writing(), MIXED)
            for source, limit in zip(sources, limits, strict=True)
        ]
        together = await asyncio.gather(*(texts_of(model, request) for request in requests))
        for request, source, limit, (text,) in zip(
            requests, sources * 2, limits * 2, together, strict=True
        ):
            settings = {"no_repeat_ngram_size": request.writing.no_repeat_ngram_size or 0}
            assert expected_ids(
                reference, source, max_new_tokens=limit, num_beams=1, **settings
            ) == [ids_of(text)]
            (alone,) = await texts_of(model, request)
            assert [event.logprob for event in alone.events] == [e.logprob for e in text.events]
            assert text.finish.input_length == len(source)

    serving(bundle(name), compare)
    manifest = load_bundle(name, bundle(name)).manifest
    assert manifest.family == "encoder-decoder"
    assert manifest.batch_invariant
    assert manifest.parity.decode_steps is not None
    assert manifest.parity.decode_steps <= manifest.parity.tolerance


def test_a_device_without_addresses_computes_the_same(
    bundle: Folder, device_memory: Callable[..., Memory]
) -> None:
    """The cache of source texts lies there, and is bound and copied there."""
    loaded = load_bundle("model", bundle("t5"))
    manifest, options = loaded.manifest, SessionOptions("cpu", 1)
    assert manifest.kv is not None
    found = []
    for memory in (HostMemory(), device_memory(binds_views=False)):
        runner = Runner(
            Session(loaded.graph, options),
            manifest.kv,
            memory=memory,
            slots=3,
            max_length=8,
            vocab_size=manifest.vocab_size,
            max_source_length=40,
        )
        assert runner.cache.source is not None
        encoder = Encoder(Session(loaded.encoder, options), runner.cache.source, memory, 48)
        sources = [np.array(source) for source in sources_of([7, 3, 38])]
        encoder.encode([0, 2], sources[:2])
        encoder.encode([1], sources[2:])
        tokens, lengths = np.array([5, 6, 7]), np.zeros(3, np.int64)
        for rows in (np.arange(3), np.array([0, 2])):
            found.append(np.array(runner.decode(tokens, lengths, rows)))
            lengths[rows] += 1
        runner.cache.copy(1, 0, 1)
        lengths[0] = 1
        found.append(np.array(runner.decode(tokens[[1, 1, 2]], lengths, np.arange(3))))
        assert np.array_equal(found[-1][0], found[-1][1])
        with pytest.raises(IndexError, match="2 slots of 25 tokens lie outside a cache of 1 slots"):
            encoder.encode([0, 1], [np.ones(25, np.int64)] * 2)
    for on_host, on_device in zip(found[:3], found[3:], strict=True):
        assert np.array_equal(on_host, on_device)


SEARCHES: Sequence[dict[str, Any]] = (
    {"num_beams": 3},
    {"num_beams": 2, "length_penalty": 2.0, "early_stopping": True},
    {"num_beams": 5, "length_penalty": -0.5, "no_repeat_ngram_size": 2},
    {"num_beams": 8, "early_stopping": "never", "no_repeat_ngram_size": 1},
    {"num_beams": 4, "length_penalty": 0.0, "early_stopping": True, "no_repeat_ngram_size": 3},
)


@pytest.mark.parametrize("name", marked(TEXT_TO_TEXT))
def test_beam_searches_equal_generate_in_company(
    name: str, bundle: Folder, checkpoint: Folder, load_reference: Load
) -> None:
    """Several searches at a time, with greedy texts between their beams."""
    reference = load_reference(checkpoint(name))
    sources = sources_of([20, 3, 45, 7, 33])

    async def compare(model: CausalModel) -> None:
        searches = [
            GenerationRequest(
                [source], max_new_tokens=10, num_sequences=2, writing=Writing(**settings)
            )
            for source, settings in zip(sources, SEARCHES, strict=True)
        ]
        greedy = [
            GenerationRequest([source], max_new_tokens=12, writing=MIXED) for source in sources
        ]
        found = await asyncio.gather(
            *(texts_of(model, each) for pair in zip(greedy, searches, strict=True) for each in pair)
        )
        for source, settings, texts in zip(sources, SEARCHES, found[1::2], strict=True):
            expected = expected_ids(
                reference, source, max_new_tokens=10, num_return_sequences=2, **settings
            )
            assert list(map(ids_of, texts)) == expected
        for request, texts in zip(greedy, found[::2], strict=True):
            (alone,) = await texts_of(model, request)
            assert ids_of(alone) == ids_of(texts[0])

    serving(bundle(name), compare, Config(slots=12, threads=1))


def test_no_company_changes_a_text(bundle: Folder) -> None:
    """Greedy and sampled texts, copies and searches, with readers that leave among them."""
    generator = random.Random(3)

    def draw(source: list[int]) -> GenerationRequest:
        limit, seed = generator.randint(1, 16), generator.randint(0, 99)
        sampled = SamplingParams(do_sample=True)
        num_beams = generator.randint(2, 6)
        kind = generator.choice(["greedy", "sampled", "copies", "search"])
        return GenerationRequest(
            [source],
            params=sampled if kind in ("sampled", "copies") else SamplingParams(),
            seed=seed,
            max_new_tokens=limit,
            num_sequences={"copies": 8, "search": 2}.get(kind, 1),
            writing=Writing(num_beams=num_beams) if kind == "search" else MIXED,
        )

    async def written(model: CausalModel, request: GenerationRequest) -> list[Any]:
        texts = await texts_of(model, request)
        return [[(event.token_id, event.logprob) for event in text.events] for text in texts]

    async def leave(model: CausalModel, request: GenerationRequest) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(written(model, request), generator.random() / 10)

    async def compare(model: CausalModel) -> None:
        requests = list(map(draw, sources_of([1, 70, 20, 5, 44, 9, 3, 31] * 2)))
        leaving = [leave(model, draw(source)) for source in sources_of([30, 2, 50] * 4)]
        staying = [written(model, request) for request in requests]
        found = (await asyncio.gather(*leaving, *staying))[len(leaving) :]
        for request, texts in zip(requests, found, strict=True):
            assert await written(model, request) == texts

    serving(bundle("t5"), compare, Config(slots=7, threads=1))


def test_int8_of_both_graphs(checkpoint: Folder, tmp_path: Path) -> None:
    """The gate follows fp32's own texts; rows keep their bits in company."""
    folder = tmp_path / "int8"
    gate = Gate(max_loss=math.inf)
    manifest = export(str(checkpoint("bart")), folder, precision="int8", gate=gate)
    assert manifest.quality is not None
    assert manifest.quality.positions > 200
    assert manifest.quality.loss < 0.1
    assert manifest.batch_invariant
    for name in (GRAPH, ENCODER_GRAPH):
        operators = {node.op_type for node in onnx.load(folder / name).graph.node}
        assert "MatMulNBits" in operators

    async def compare(model: CausalModel) -> None:
        requests = [
            GenerationRequest([source], max_new_tokens=8, writing=MIXED)
            for source in sources_of([20, 3, 60, 7])
        ]
        together = await asyncio.gather(*(texts_of(model, request) for request in requests))
        for request, (text,) in zip(requests, together, strict=True):
            (alone,) = await texts_of(model, request)
            assert [e.logprob for e in alone.events] == [e.logprob for e in text.events]

    serving(folder, compare)


def test_precisions_for_gpus_are_refused(checkpoint: Folder, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="fp16 is for GPUs"):
        export(str(checkpoint("bart")), tmp_path / "half", precision="fp16")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_beam_searches_of_causal_models_equal_generate(
    name: str, bundle: Folder, checkpoint: Folder, load_reference: Load
) -> None:
    """A prompt is prefilled in chunks, once for all beams."""
    reference = load_reference(checkpoint(name))
    config = Config(slots=9, threads=1, prefill_chunk_tokens=32)
    prompts = sources_of([20, 3, 90, 7, 2])

    async def compare(model: CausalModel) -> None:
        found = await asyncio.gather(
            *(
                texts_of(
                    model,
                    GenerationRequest(
                        [prompt], max_new_tokens=9, num_sequences=2, writing=Writing(**settings)
                    ),
                )
                for prompt, settings in zip(prompts, SEARCHES, strict=True)
            )
        )
        gaps = model.tokenizer.ids_without_token(model.manifest.vocab_size)
        assert gaps, "the tokenizer has fewer tokens than the model has rows"
        for prompt, settings, texts in zip(prompts, SEARCHES, found, strict=True):
            ids = torch.tensor([prompt])
            output = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=9,
                num_return_sequences=2,
                pad_token_id=0,
                suppress_tokens=[0, *sorted(gaps)],  # no text contains padding, or no token
                **settings,
            )
            ends = frozenset(model.manifest.special_tokens.eos)
            assert list(map(ids_of, texts)) == [
                cut(row[len(prompt) :].tolist(), ends) for row in output
            ]

    serving(bundle(name), compare, config)


def cut(token_ids: list[int], ends: frozenset[int]) -> list[int]:
    """A text without what follows its end."""
    end = next((i + 1 for i, token in enumerate(token_ids) if token in ends), len(token_ids))
    return token_ids[:end]
