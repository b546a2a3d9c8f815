"""Faults around the passes, of NumPy, of libraries, of memory: they end what they concern only."""

import asyncio
import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maskdial.causal import executor
from maskdial.causal.beam_search import BeamParams, BeamSearch
from maskdial.causal.drafts.model import DraftModel
from maskdial.causal.drafts.sources import PromptLookup
from maskdial.causal.executor import Output
from maskdial.causal.output_processor import OutputProcessor
from maskdial.causal.prefix_cache import PrefixCache
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sampling.sampler import Sampler
from maskdial.causal.sequence import Sequence
from maskdial.errors import DeviceLostError, GenerationError
from maskdial.metrics import Metrics
from tests.unit.scripted_model import (
    BLOCK,
    EOS,
    MAX_LENGTH,
    NAME,
    VOCAB,
    Bench,
    FakeRunner,
    LetterDetokenizer,
    SourceRunner,
    expected_tokens,
    make_sequence,
)

NO_MEMORY = MemoryError("Unable to allocate 12.0 GiB")
LOST = DeviceLostError("the GPU is lost; restart the server")


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


class BrokenGrammar:
    """Every token is allowed, but nothing can be prepared."""

    finished = False
    ready = True
    forced: tuple[int, ...] = ()

    def prepare(self, drafts: tuple[int, ...] = ()) -> None:
        raise NO_MEMORY

    def num_allowed(self, token_ids: SequenceOf[int]) -> int:
        return 0

    def wait(self, seconds: float) -> None:
        pass

    def allowed(self) -> NDArray[np.bool_]:
        return np.ones(VOCAB, np.bool_)

    def accept(self, token_id: int) -> None:
        pass


@pytest.mark.parametrize("shares_passes", [False, True])
def test_a_prompt_whose_log_probabilities_cannot_be_found_fails_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, shares_passes: bool
) -> None:
    monkeypatch.setattr(executor, "prompt_logprobs", raising(NO_MEMORY))

    async def main() -> None:
        bench = Bench(FakeRunner(slots=3, shares_passes=shares_passes), overlaps=False)
        decoding = bench.read(make_sequence([1], 9))
        await bench.step(2)
        unlucky = bench.read(make_sequence([9] * 3, prompt_logprobs=True))
        waiting = bench.read(make_sequence([2, 3]))
        await bench.run_dry()
        with pytest.raises(GenerationError, match=r"a pass of model 'fake' failed \(MemoryError"):
            await unlucky.task
        assert decoding.token_ids == expected_tokens([1], 9)
        assert waiting.token_ids == expected_tokens([2, 3], 5)

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())


def test_a_prompt_that_the_prefix_cache_cannot_keep_is_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PrefixCache, "put", raising(NO_MEMORY))

    async def main() -> None:
        cache = PrefixCache(model=NAME, block_tokens=BLOCK, max_bytes=10**6)
        bench = Bench(FakeRunner(slots=2), overlaps=False, prefix_cache=cache)
        prompts = ([9] * BLOCK, [2, 3])  # which are read together
        readers = [bench.read(make_sequence(prompt)) for prompt in prompts]
        await bench.run_dry()
        assert [each.token_ids for each in readers] == [expected_tokens(p, 5) for p in prompts]

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())


def test_a_step_that_cannot_be_prepared_fails_what_is_in_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=1), overlaps=False)
        broken = make_sequence([9])
        broken.grammar = BrokenGrammar()
        unlucky, waiting = bench.read(broken), bench.read(make_sequence([2, 3]))
        await bench.run_dry()
        with pytest.raises(GenerationError, match="MemoryError"):
            await unlucky.task
        assert waiting.token_ids == expected_tokens([2, 3], 5)

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())


def test_logits_that_cannot_be_read_fail_the_texts_of_their_pass(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, overlaps: bool
) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=2), overlaps=overlaps)
        unlucky = bench.read(make_sequence([1], 20))
        await bench.step(4)
        with monkeypatch.context() as patch:
            patch.setattr(Sampler, "sample", raising(NO_MEMORY))
            await bench.step()
            with pytest.raises(GenerationError, match=r"MemoryError: Unable to allocate 12\.0 GiB"):
                await unlucky.task
        later = bench.read(make_sequence([2, 3]))
        await bench.run_dry()
        assert later.token_ids == expected_tokens([2, 3], 5)

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())


def test_a_beam_search_fails_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def written(source: int) -> Sequence:
        return Sequence([1], SamplingParams(max_new_tokens=4), source_ids=[source])

    def bench() -> Bench:
        runner = SourceRunner(4)
        return Bench(runner, overlaps=False, encoder=runner)

    async def main() -> None:
        alone = bench()
        expected = alone.read(written(5))
        await alone.run_dry()
        monkeypatch.setattr(BeamSearch, "advance", raising(NO_MEMORY))
        together = bench()
        plain, reader = written(5), written(6)
        BeamSearch([reader], [written(6), written(6)], BeamParams(2))
        lucky, unlucky = together.read(plain), together.read(reader)
        await together.run_dry()
        with pytest.raises(GenerationError, match="a beam search of model 'fake' failed"):
            await unlucky.task
        assert lucky.token_ids == expected.token_ids

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())


def test_a_text_goes_on_without_drafts_if_looking_for_them_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = PromptLookup.reader

    def stumble(self: PromptLookup, sequence: Sequence) -> Any:
        return raising(NO_MEMORY)() if sequence.prompt_ids[0] == 9 else reader(self, sequence)

    monkeypatch.setattr(PromptLookup, "reader", stumble)

    async def main() -> None:
        bench = Bench(FakeRunner(slots=2, shares_passes=True), overlaps=False, max_drafts=3)
        prompts = ([9, 4], [5, 6])
        readers = [bench.read(make_sequence(prompt, 12)) for prompt in prompts]
        await bench.run_dry()
        assert [each.token_ids for each in readers] == [expected_tokens(p, 12) for p in prompts]

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert caplog.text.count("their text goes on without them") == 1


@pytest.mark.parametrize("where", [(Sampler, "sample"), (Sequence, "accept")])
def test_a_lost_device_ends_the_engine_wherever_it_is_noticed(
    monkeypatch: pytest.MonkeyPatch, where: tuple[type, str], overlaps: bool
) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=1), overlaps=overlaps)
        monkeypatch.setattr(*where, raising(LOST))
        reader = bench.read(make_sequence([1]))
        with pytest.raises(DeviceLostError):
            bench.engine.step()
        reader.task.cancel()

    asyncio.run(main())


def test_a_device_lost_in_a_search_or_a_block_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BeamSearch, "advance", raising(LOST))
    monkeypatch.setattr(Sequence, "unmask", raising(LOST))
    processor = OutputProcessor(
        Sampler(VOCAB, frozenset({EOS})),
        LetterDetokenizer(),
        eos_token_ids=frozenset({EOS}),
        max_length=MAX_LENGTH,
        metrics=Metrics().declare(NAME),
        name=NAME,
    )
    logits = np.zeros((1, VOCAB), np.float32)
    reader, beam = make_sequence([1]), make_sequence([1])
    BeamSearch([reader], [beam], BeamParams(1))
    for output in (Output((beam,), logits), Output((make_sequence([2]),), logits, unmasks=True)):
        with pytest.raises(DeviceLostError):
            processor.process([output], may_wait=False)


def test_a_block_that_cannot_be_filled_fails_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Sequence, "unmask", raising(NO_MEMORY))
    processor = OutputProcessor(
        Sampler(VOCAB, frozenset({EOS})),
        LetterDetokenizer(),
        eos_token_ids=frozenset({EOS}),
        max_length=MAX_LENGTH,
        metrics=Metrics().declare(NAME),
        name=NAME,
    )
    logits = np.zeros((1, VOCAB), np.float32)
    block, other = make_sequence([1]), make_sequence([2])
    outputs = [Output((block,), logits, unmasks=True), Output((other,), logits)]
    with caplog.at_level(logging.CRITICAL):
        replies = dict(processor.process(outputs, may_wait=False))
    assert isinstance(replies[block], GenerationError)
    assert not isinstance(replies[other], GenerationError)


def test_a_lost_device_is_no_mere_lack_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    runner: Any = FakeRunner(slots=1, shares_passes=True)
    model = DraftModel(runner, slots=1, max_length=MAX_LENGTH, chunk_tokens=8, name=NAME)
    runner.on_pass = raising(LOST)
    with pytest.raises(DeviceLostError):
        model.propose([make_sequence([1, 2])], [2])
