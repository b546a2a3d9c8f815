"""The engine over a scripted model whose every token depends on all that is in its cache."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
import pytest
from numpy.typing import NDArray

import maskdial.causal.engine as engine_module
from maskdial.causal.engine import CausalEngine
from maskdial.causal.prefix_cache import PrefixCache
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Finish, Sequence, SharedPrompt, State, TokenEvent
from maskdial.causal.stream import TokenStream
from maskdial.errors import (
    DeadlineError,
    GenerationError,
    MaskdialError,
    OverloadedError,
    UnavailableError,
    ValidationError,
)
from maskdial.metrics import NullMetrics

VOCAB = 64
EOS = 63  # the scripted model never says it unless told to
MAX_LENGTH = 200
BLOCK = 4


def next_token(context: Iterable[int]) -> int:
    """What the scripted model says after a context: any change in it changes the answer."""
    state = 7
    for token in context:
        state = (state * 31 + int(token) + 1) % 1_000_003
    return state % (VOCAB - 1)


def expected_tokens(prompt: SequenceOf[int], count: int) -> list[int]:
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context))
    return context[len(prompt) :]


class FakeCache:
    """Token ids where a real one has keys and values."""

    bytes_per_token = 10

    def __init__(self, slots: int) -> None:
        self.tokens = np.zeros((slots, MAX_LENGTH), np.int64)
        self.released: list[int] = []

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        self.tokens[target, :num_tokens] = self.tokens[source, :num_tokens]

    def read(self, slot: int, start: int, num_tokens: int) -> NDArray[np.int64]:
        return self.tokens[slot, start : start + num_tokens].copy()

    def write(self, slot: int, start: int, block: NDArray[np.generic]) -> None:
        self.tokens[slot, start : start + len(block)] = block

    def release_pages(self, slot: int) -> None:
        self.tokens[slot] = 0
        self.released.append(slot)


class FakeRunner:
    """Keeps token ids where a model keeps keys, and counts its passes.

    ``on_pass`` is called before each one, with its kind, and may raise or block.
    """

    def __init__(
        self, slots: int, *, eos_after: int | None = None, nan_after: int | None = None
    ) -> None:
        self.cache = FakeCache(slots)
        self.eos_after = eos_after
        self.nan_after = nan_after
        self.passes: list[str] = []
        self.num_read = 0
        self.period = 0  # with one, the model soon says the same over and over
        self.on_pass: Callable[[str], None] = lambda kind: None

    def prefill(
        self, slot: int, token_ids: NDArray[np.int64], start: int, num_logits: int = 1
    ) -> NDArray[np.float32]:
        self._begin("prefill")
        end = start + len(token_ids)
        self.num_read += len(token_ids)
        self.cache.tokens[slot, start:end] = token_ids
        return np.stack([self._logits(slot, end - i) for i in reversed(range(num_logits))])

    def prefill_together(
        self, slot: int, prompts: SequenceOf[NDArray[np.int64]]
    ) -> NDArray[np.float32]:
        self._begin("prefill together")
        for row, prompt in enumerate(prompts):
            self.cache.tokens[slot + row, : len(prompt)] = prompt
        return np.stack([self._logits(slot + row, len(p)) for row, p in enumerate(prompts)])

    def decode(
        self, token_ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        self._begin("decode")
        self.cache.tokens[np.arange(len(token_ids)), lengths] = token_ids
        return np.stack([self._logits(row, lengths[row] + 1) for row in rows])

    def warm_up(self) -> None:
        self.prefill(0, np.zeros(1, np.int64), 0)
        self.decode(*np.array([[0], [1], [0]], np.int64))

    def _begin(self, kind: str) -> None:
        self.passes.append(kind)
        self.on_pass(kind)

    def _logits(self, slot: int, length: int) -> NDArray[np.float32]:
        logits = np.zeros(VOCAB, np.float32)
        if length == self.nan_after:
            logits[3] = np.nan
        context = self.cache.tokens[slot, :length]
        if self.period:
            context = context[-1:] % self.period
        logits[EOS if self.eos_after == length else next_token(context)] = 5
        return logits


class LetterDetokenizer:
    """Token n is one letter, and special tokens are silent."""

    special_ids = frozenset({EOS})

    def decoder(self, prompt_ids: SequenceOf[int]) -> "LetterDetokenizer":
        return self

    def push(self, token_id: int) -> str:
        return "" if token_id in self.special_ids else letters([token_id])

    def flush(self) -> str:
        return ""


def letters(token_ids: SequenceOf[int]) -> str:
    return "".join(chr(ord("A") + token) for token in token_ids)


class RecordingMetrics(NullMetrics):
    """Remembers what the tests look at."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.up: list[bool] = []
        self.num_generated = 0
        self.used_bytes = 0
        self.num_queried = 0
        self.num_hit = 0

    def prefix_cache(self, num_queried: int, num_hit: int) -> None:
        self.num_queried += num_queried
        self.num_hit += num_hit

    def cancelled(self, reason: str) -> None:
        self.reasons.append(reason)

    def engine_up(self, up: bool) -> None:
        self.up.append(up)

    def generated_tokens(self, n: int) -> None:
        self.num_generated += n

    def kv_cache(self, used_bytes: int, ratio: float) -> None:
        self.used_bytes = used_bytes


_overlaps = False


@pytest.fixture(params=[False, True], ids=["in turns", "overlapping"], autouse=True)
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs with tokens delivered before the next step, and beside it.

    In the second way a pass has run ahead before a step sees what changed: until it is delivered,
    that takes a step more.
    """
    monkeypatch.setitem(globals(), "_overlaps", request.param)


def make_engine(
    runner: FakeRunner,
    *,
    max_queue: int = 100,
    chunk: int = 8,
    prefix_cache: PrefixCache | None = None,
    max_drafts: int = 0,
    detokenizer: LetterDetokenizer | None = None,
    overlaps: bool | None = None,
    metrics: NullMetrics | None = None,
) -> CausalEngine:
    return CausalEngine(
        runner,
        detokenizer or LetterDetokenizer(),
        slots=len(runner.cache.tokens),
        max_length=MAX_LENGTH,
        vocab_size=VOCAB,
        prefill_chunk_tokens=chunk,
        block_tokens=BLOCK,
        max_queue=max_queue,
        eos_token_ids=[EOS],
        prefix_cache=prefix_cache,
        max_drafts=max_drafts,
        overlaps=_overlaps if overlaps is None else overlaps,
        metrics=metrics or NullMetrics(),
        name="fake",
    )


def make_sequence(prompt: SequenceOf[int], max_new_tokens: int = 5, **params: object) -> Sequence:
    return Sequence(prompt, SamplingParams(max_new_tokens=max_new_tokens, **params))  # type: ignore[arg-type]


class Reader:
    """Reads a stream in a task of its own."""

    def __init__(self, stream: TokenStream) -> None:
        self.events: list[TokenEvent] = []
        self.task = asyncio.create_task(self._read(stream))

    async def _read(self, stream: TokenStream) -> None:
        async for event in stream:
            self.events.append(event)

    @property
    def token_ids(self) -> list[int]:
        return [event.token_id for event in self.events]

    @property
    def finish(self) -> Finish:
        finish = self.events[-1].finish
        assert finish is not None
        return finish


async def settle() -> None:
    """Lets the event loop deliver what was published."""
    for _ in range(3):
        await asyncio.sleep(0)


async def step(engine: CausalEngine, times: int = 1) -> None:
    """Runs the engine by hand, on this thread, so that tests count steps instead of seconds."""
    for _ in range(times):
        engine.step()
        await settle()


async def run_dry(engine: CausalEngine) -> None:
    while engine.num_running or engine.num_waiting:
        await step(engine)
    await settle()


def test_a_sequence_from_start_to_end() -> None:
    async def main() -> None:
        metrics = RecordingMetrics()
        engine = make_engine(FakeRunner(slots=2), metrics=metrics)
        reader = Reader(engine.stream(make_sequence(range(20), 6)))
        await run_dry(engine)
        wanted = expected_tokens(range(20), 6)
        assert reader.token_ids == wanted
        assert [event.index for event in reader.events] == [1, 2, 3, 4, 5, 6]
        assert [event.text for event in reader.events] == [letters([t]) for t in wanted]
        assert [event.finish is None for event in reader.events] == [True] * 5 + [False]
        finish = reader.finish
        assert finish.reason == "length"
        assert finish.generated_text == letters(wanted)
        assert (finish.generated_tokens, finish.input_length, finish.seed) == (6, 20, None)
        assert finish.queue_seconds >= 0
        assert finish.inference_seconds > 0
        assert (metrics.num_generated, metrics.used_bytes, metrics.reasons) == (6, 0, [])

    asyncio.run(main())


def test_eight_streams_started_at_different_times_progress_together() -> None:
    async def main() -> None:
        engine = make_engine(FakeRunner(slots=8))
        readers = []
        for number in range(8):
            readers.append(Reader(engine.stream(make_sequence([number] * (number + 1), 60))))
            await step(engine, 3)
        before = [len(reader.events) for reader in readers]
        assert before == sorted(before, reverse=True)
        assert min(before) > 0
        await step(engine, 10)
        assert [len(r.events) - b for r, b in zip(readers, before, strict=True)] == [10] * 8
        await run_dry(engine)
        for number, reader in enumerate(readers):
            assert reader.token_ids == expected_tokens([number] * (number + 1), 60)

    asyncio.run(main())


def test_a_long_prompt_does_not_stall_the_others() -> None:
    async def main() -> None:
        runner = FakeRunner(slots=4)
        engine = make_engine(runner)
        readers = [Reader(engine.stream(make_sequence([n], 100))) for n in range(3)]
        await step(engine, 4)
        long = Reader(engine.stream(make_sequence(range(100), 5)))
        await step(engine, _overlaps)
        for _ in range(12):
            before = [len(reader.events) for reader in readers]
            await step(engine)
            assert [len(r.events) - b for r, b in zip(readers, before, strict=True)] == [1] * 3
            assert long.events == []
        await step(engine)
        assert long.token_ids == expected_tokens(range(100), 1)
        assert runner.passes[-26:] == ["decode", "prefill"] * 13
        await run_dry(engine)
        assert long.token_ids == expected_tokens(range(100), 5)

    asyncio.run(main())


def test_many_sequences_through_few_slots() -> None:
    """Slots are reused, holes filled and rows moved: every text still comes out as if alone."""

    async def main() -> None:
        rng = np.random.default_rng(0)
        engine = make_engine(FakeRunner(slots=3))
        wanted = []
        readers = []
        for _ in range(40):
            prompt = rng.integers(0, VOCAB - 1, rng.integers(1, 30)).tolist()
            count = int(rng.integers(1, 12))
            wanted.append(expected_tokens(prompt, count))
            readers.append(Reader(engine.stream(make_sequence(prompt, count))))
            await step(engine, int(rng.integers(0, 6)))
        await run_dry(engine)
        assert [reader.token_ids for reader in readers] == wanted

    asyncio.run(main())


def test_closing_a_stream_frees_its_slot_within_one_step() -> None:
    async def main() -> None:
        metrics = RecordingMetrics()
        engine = make_engine(FakeRunner(slots=2), metrics=metrics)
        async with engine.stream(make_sequence([1], 100)) as leaving:
            stayer = Reader(engine.stream(make_sequence([2], 100)))
            await step(engine, 5)
            waiting = Reader(engine.stream(make_sequence([3], 4)))
            await step(engine, 2)
            assert (await anext(leaving)).token_id == expected_tokens([1], 1)[0]
            assert (engine.num_running, engine.num_waiting) == (2, 1)
        before = len(stayer.events)
        await step(engine, _overlaps)
        await step(engine)
        assert waiting.token_ids == expected_tokens([3], 1)
        assert len(stayer.events) == before + 1 + _overlaps
        assert metrics.reasons == ["disconnect"]
        await run_dry(engine)
        assert stayer.token_ids == expected_tokens([2], 100)
        assert waiting.token_ids == expected_tokens([3], 4)

    asyncio.run(main())


@pytest.mark.parametrize("steps_before", [0, 1, 4], ids=["queued", "prefilling", "decoding"])
def test_cancelling_the_reader_drops_the_sequence_only(steps_before: int) -> None:
    async def main() -> None:
        metrics = RecordingMetrics()
        engine = make_engine(FakeRunner(slots=3), metrics=metrics)
        other = Reader(engine.stream(make_sequence([5], 30)))
        await step(engine, 3)
        sequence = make_sequence(range(20), 50)
        reader = Reader(engine.stream(sequence))
        await settle()
        await step(engine, steps_before)
        before = len(other.events)
        reader.task.cancel()
        await settle()
        assert reader.task.cancelled()
        await step(engine)
        assert (engine.num_running, engine.num_waiting) == (1, 0)
        assert sequence.state is State.ENDED
        assert len(other.events) == before + 1
        await run_dry(engine)
        assert other.token_ids == expected_tokens([5], 30)
        assert metrics.reasons == ["disconnect"]

    asyncio.run(main())


def test_closing_after_the_end_is_no_disconnect() -> None:
    async def main() -> None:
        metrics = RecordingMetrics()
        engine = make_engine(FakeRunner(slots=1), metrics=metrics)
        read, unread = (engine.stream(make_sequence([n], 2)) for n in range(2))
        await run_dry(engine)
        assert [event.index async for event in read] == [1, 2]
        await read.aclose()
        await unread.aclose()
        assert metrics.reasons == []

    asyncio.run(main())


def test_end_of_sequence_token() -> None:
    async def main() -> None:
        engine = make_engine(FakeRunner(slots=1, eos_after=6))
        reader = Reader(engine.stream(make_sequence([1, 2, 3], 50)))
        await run_dry(engine)
        assert reader.token_ids == [*expected_tokens([1, 2, 3], 3), EOS]
        assert reader.finish.reason == "eos_token"
        assert reader.finish.generated_tokens == 4
        assert reader.finish.generated_text == letters(expected_tokens([1, 2, 3], 3))
        assert [event.special for event in reader.events] == [False, False, False, True]

    asyncio.run(main())


@pytest.mark.parametrize("include", [True, False])
def test_stop_string(include: bool) -> None:
    async def main() -> None:
        text = letters(expected_tokens([4], 12))
        stop = text[3:6]
        assert text.find(stop) == 3
        engine = make_engine(FakeRunner(slots=1))
        sequence = make_sequence([4], 12, stop=("absent", stop), include_stop=include)
        reader = Reader(engine.stream(sequence))
        await run_dry(engine)
        assert reader.finish.reason == "stop_sequence"
        assert reader.finish.generated_tokens == 6
        assert reader.finish.generated_text == text[: 6 if include else 3]
        assert "".join(event.text for event in reader.events) == reader.finish.generated_text

    asyncio.run(main())


def test_text_held_back_for_a_stop_string_comes_with_the_last_token() -> None:
    async def main() -> None:
        text = letters(expected_tokens([4], 5))
        engine = make_engine(FakeRunner(slots=1))
        sequence = make_sequence([4], 5, stop=(text[3:] + "?",), include_stop=False)
        reader = Reader(engine.stream(sequence))
        await run_dry(engine)
        assert [event.text for event in reader.events] == [*text[:3], "", text[3:]]
        assert reader.finish.reason == "length"

    asyncio.run(main())


@pytest.mark.parametrize(("num_prompt", "count"), [(MAX_LENGTH - 3, 3), (MAX_LENGTH - 1, 1)])
def test_a_full_context_ends_the_text(num_prompt: int, count: int) -> None:
    async def main() -> None:
        engine = make_engine(FakeRunner(slots=2))
        prompt = [n % 50 for n in range(num_prompt)]
        reader = Reader(engine.stream(make_sequence(prompt, 100)))
        other = Reader(engine.stream(make_sequence([3], 40)))
        await run_dry(engine)
        assert reader.token_ids == expected_tokens(prompt, count)
        assert reader.finish.reason == "length"
        assert other.token_ids == expected_tokens([3], 40)

    asyncio.run(main())


@pytest.mark.parametrize("num_prompt", [0, MAX_LENGTH])
def test_a_prompt_that_does_not_fit_is_refused(num_prompt: int) -> None:
    async def main() -> None:
        engine = make_engine(FakeRunner(slots=1))
        with pytest.raises(ValidationError, match=f"{num_prompt} tokens"):
            engine.stream(make_sequence([0] * num_prompt))

    asyncio.run(main())


def test_a_full_queue_refuses_at_once() -> None:
    async def main() -> None:
        engine = make_engine(FakeRunner(slots=1), max_queue=2)
        readers = [Reader(engine.stream(make_sequence([n]))) for n in range(2)]
        with pytest.raises(OverloadedError):
            engine.stream(make_sequence([9]))
        await run_dry(engine)
        assert [reader.finish.reason for reader in readers] == ["length"] * 2

    asyncio.run(main())


def test_a_seed_gives_the_same_text_in_company_and_alone() -> None:
    async def generate(company: int) -> list[int]:
        engine = make_engine(FakeRunner(slots=4))
        others = [
            Reader(engine.stream(make_sequence([n], 20, do_sample=True, seed=n)))
            for n in range(company)
        ]
        await step(engine, company)
        sampled = make_sequence([1, 2], 20, do_sample=True, temperature=3.0, seed=11)
        reader = Reader(engine.stream(sampled))
        await run_dry(engine)
        assert reader.finish.seed == 11
        assert all(other.finish for other in others)
        return reader.token_ids

    assert asyncio.run(generate(0)) == asyncio.run(generate(3))


def test_a_failing_pass_ends_only_what_was_in_it(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        runner = FakeRunner(slots=3)
        engine = make_engine(runner)
        decoding = [Reader(engine.stream(make_sequence([n], 50))) for n in range(2)]
        await step(engine, 3)
        prefilling = Reader(engine.stream(make_sequence(range(30), 5)))
        await step(engine, 2)

        def fail_decode(kind: str) -> None:
            if kind == "decode":
                raise RuntimeError("out of cheese")

        runner.on_pass = fail_decode
        await step(engine)
        assert engine.num_running == 1
        for reader in decoding:
            with pytest.raises(GenerationError, match="out of cheese"):
                await reader.task
        runner.on_pass = lambda kind: None
        assert engine.healthy
        await run_dry(engine)
        assert prefilling.token_ids == expected_tokens(range(30), 5)

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())


def test_a_failing_chunk_ends_its_own_prompt_only(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        runner = FakeRunner(slots=3)
        engine = make_engine(runner)
        decoding = Reader(engine.stream(make_sequence([1], 20)))
        await step(engine, 3)
        prefilling = Reader(engine.stream(make_sequence(range(30), 5)))
        waiting = Reader(engine.stream(make_sequence([2], 5)))

        def fail_prefill(kind: str) -> None:
            if kind == "prefill":
                raise RuntimeError("out of cheese")

        await step(engine, _overlaps)
        runner.on_pass = fail_prefill
        await step(engine)
        assert (engine.num_running, engine.num_waiting) == (1, 1)
        runner.on_pass = lambda kind: None
        with pytest.raises(GenerationError, match="out of cheese"):
            await prefilling.task
        await run_dry(engine)
        assert decoding.token_ids == expected_tokens([1], 20)
        assert waiting.token_ids == expected_tokens([2], 5)

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())


def test_logits_that_are_no_numbers_end_their_own_sequence_only() -> None:
    async def main() -> None:
        engine = make_engine(FakeRunner(slots=3, nan_after=6))
        first = Reader(engine.stream(make_sequence([1] * 4, 30)))
        second = Reader(engine.stream(make_sequence([2] * 10, 30)))
        await run_dry(engine)
        with pytest.raises(GenerationError, match="not numbers"):
            await first.task
        assert first.token_ids == expected_tokens([1] * 4, 2)
        assert second.token_ids == expected_tokens([2] * 10, 30)

    asyncio.run(main())


def test_a_fault_in_one_text_ends_that_text_only(caplog: pytest.LogCaptureFixture) -> None:
    class Stumbling(LetterDetokenizer):
        def push(self, token_id: int) -> str:
            raise KeyError("no such letter")

        def decoder(self, prompt_ids: SequenceOf[int]) -> LetterDetokenizer:
            return self if prompt_ids[0] == 1 else LetterDetokenizer()

    async def main() -> None:
        engine = make_engine(FakeRunner(slots=2), detokenizer=Stumbling())
        unlucky, lucky = (Reader(engine.stream(make_sequence([n, 5], 9))) for n in (1, 2))
        await run_dry(engine)
        with pytest.raises(GenerationError, match="no such letter"):
            await unlucky.task
        assert lucky.token_ids == expected_tokens([2, 5], 9)

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())


class ScriptedGrammar:
    """Allows one token after another, and fails where the script says so."""

    def __init__(self, script: SequenceOf[int | MaskdialError]) -> None:
        self.script = list(script)
        self.num_prepared = 0
        self.ready = True

    @property
    def finished(self) -> bool:
        return not self.script

    def prepare(self) -> None:
        self.num_prepared += 1

    def allowed(self) -> NDArray[np.bool_]:
        if isinstance(self.script[0], MaskdialError):
            raise self.script[0]
        return np.arange(VOCAB) == self.script[0]

    def accept(self, token_id: int) -> None:
        assert token_id == self.script.pop(0)


def test_a_grammar_chooses_and_ends_the_text() -> None:
    async def main() -> None:
        engine = make_engine(FakeRunner(slots=2), max_drafts=8)
        grammar = ScriptedGrammar([7, 8, 7, 8, 7, 8, 9])
        params = SamplingParams(max_new_tokens=20)
        constrained = Reader(engine.stream(Sequence([1, 2, 3], params, grammar=grammar)))
        await run_dry(engine)
        assert constrained.token_ids == [7, 8, 7, 8, 7, 8, 9]
        assert constrained.finish.reason == "eos_token"
        assert grammar.num_prepared == 7

    asyncio.run(main())


def test_a_grammar_that_fails_ends_its_own_text_only() -> None:
    async def main() -> None:
        engine = make_engine(FakeRunner(slots=2))
        grammar = ScriptedGrammar([7, ValidationError("too deep")])
        params = SamplingParams(max_new_tokens=20)
        constrained = Reader(engine.stream(Sequence([1, 2, 3], params, grammar=grammar)))
        free = Reader(engine.stream(make_sequence([4, 5, 6], 9)))
        await run_dry(engine)
        with pytest.raises(ValidationError, match="too deep"):
            await constrained.task
        assert constrained.token_ids == [7]
        assert free.token_ids == expected_tokens([4, 5, 6], 9)

    asyncio.run(main())


@pytest.mark.parametrize("late_from", [0, 1, 3])
def test_a_late_grammar_holds_up_nobody_else(late_from: int) -> None:
    async def main() -> None:
        engine = make_engine(FakeRunner(slots=3))
        script = [7, 8, 9, 10, 11]
        grammar = ScriptedGrammar(script)
        params = SamplingParams(max_new_tokens=20)
        first = Reader(engine.stream(make_sequence([4, 5, 6], 30)))
        constrained = Reader(engine.stream(Sequence([1, 2, 3], params, grammar=grammar)))
        last = Reader(engine.stream(make_sequence([7, 8, 9], 30)))
        for num_tokens in range(30):
            grammar.ready = num_tokens > 12 or len(constrained.events) != late_from
            await step(engine)
            assert len(first.events) == num_tokens + 1
            if 5 < num_tokens < 12:
                assert constrained.token_ids == script[:late_from]
        await run_dry(engine)
        assert constrained.token_ids == script
        assert first.token_ids == expected_tokens([4, 5, 6], 30)
        assert last.token_ids == expected_tokens([7, 8, 9], 30)

    asyncio.run(main())


def test_a_late_grammar_alone_is_waited_for() -> None:
    async def main() -> None:
        engine = make_engine(FakeRunner(slots=3))
        grammar = ScriptedGrammar([7, 8])
        grammar.ready = False
        constrained = Reader(engine.stream(Sequence([1, 2, 3], SamplingParams(), grammar=grammar)))
        await run_dry(engine)
        assert constrained.token_ids == [7, 8]

    asyncio.run(main())


@pytest.mark.parametrize("state", ["waiting", "prefilling", "decoding"])
def test_a_timeout_drops_the_sequence_wherever_it_is(state: str) -> None:
    async def main() -> None:
        metrics = RecordingMetrics()
        slots = 1 if state == "waiting" else 2
        engine = make_engine(FakeRunner(slots), metrics=metrics)
        other = Reader(engine.stream(make_sequence([3], 30)))
        await step(engine)
        late = Reader(engine.stream(make_sequence(range(20), 150), timeout=0.01))
        await step(engine, {"waiting": 0, "prefilling": 1, "decoding": 8}[state])
        with pytest.raises(DeadlineError, match="time limit"):
            await late.task
        assert metrics.reasons == ["timeout"]
        await step(engine, 1 + _overlaps)
        assert (engine.num_running, engine.num_waiting) == (1, 0)
        await run_dry(engine)
        assert other.token_ids == expected_tokens([3], 30)

    asyncio.run(main())


def test_a_timeout_after_the_end_changes_nothing() -> None:
    async def main() -> None:
        metrics = RecordingMetrics()
        engine = make_engine(FakeRunner(slots=1), metrics=metrics)
        stream = engine.stream(make_sequence([1], 3), timeout=0.001)
        for _ in range(4):
            engine.step()
        await asyncio.sleep(0.01)  # the time passes before anyone reads
        assert [event.index async for event in stream] == [1, 2, 3]
        assert metrics.reasons == []

    asyncio.run(main())


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_copies_of_a_prompt_are_as_alone_and_read_once(slots: int) -> None:
    def copies(shared: SharedPrompt | None) -> list[Sequence]:
        return [
            Sequence(
                range(20),
                SamplingParams(max_new_tokens=6, do_sample=True, temperature=4, seed=seed),
                shared_prompt=shared,
            )
            for seed in range(5)
        ]

    async def generate(shared: SharedPrompt | None) -> tuple[list[list[int]], int]:
        runner = FakeRunner(slots=slots)
        engine = make_engine(runner)
        readers = [Reader(engine.stream(sequence)) for sequence in copies(shared)]
        await run_dry(engine)
        return [reader.token_ids for reader in readers], runner.num_read

    alone, num_read_alone = asyncio.run(generate(None))
    together, num_read = asyncio.run(generate(SharedPrompt()))
    assert together == alone
    assert len(set(map(tuple, alone))) > 1
    assert (num_read, num_read_alone) == (20, 100)


def test_a_known_prompt_is_read_from_the_cache() -> None:
    async def main() -> None:
        runner = FakeRunner(slots=2)
        cache = PrefixCache(model="fake", block_tokens=BLOCK, max_bytes=10**6)
        metrics = RecordingMetrics()
        engine = make_engine(runner, prefix_cache=cache, metrics=metrics)
        for num_read in (21, 21 + 5):  # the last block and a token are read again
            reader = Reader(engine.stream(make_sequence(range(21), 5)))
            await run_dry(engine)
            assert reader.token_ids == expected_tokens(range(21), 5)
            assert runner.num_read == num_read
        assert (metrics.num_queried, metrics.num_hit) == (42, 16)

    asyncio.run(main())


def test_guesses_change_nothing_but_the_number_of_passes() -> None:
    """The scripted model repeats itself after a while, so guesses come true, and then do not."""

    async def generate(max_drafts: int) -> tuple[list[TokenEvent], int]:
        runner = FakeRunner(slots=2, eos_after=90)
        runner.period = 7
        engine = make_engine(runner, max_drafts=max_drafts)
        reader = Reader(engine.stream(make_sequence(range(10), 100)))
        await run_dry(engine)
        return reader.events, len(runner.passes)

    plain, num_passes = asyncio.run(generate(0))
    guessed, num_fewer = asyncio.run(generate(8))
    assert plain[-1].finish is not None
    assert plain[-1].finish.reason == "eos_token"
    assert [(e.index, e.token_id, e.text) for e in guessed] == [
        (e.index, e.token_id, e.text) for e in plain
    ]
    assert num_fewer < num_passes / 3


def test_guesses_stay_within_the_context() -> None:
    async def main() -> None:
        runner = FakeRunner(slots=1)
        runner.period = 3
        engine = make_engine(runner, max_drafts=8)
        reader = Reader(engine.stream(make_sequence(range(9), MAX_LENGTH)))
        await run_dry(engine)
        assert reader.finish.generated_tokens == MAX_LENGTH - 9

    asyncio.run(main())


def test_log_probabilities_of_a_prompt_do_not_depend_on_how_it_is_read() -> None:
    async def logprobs(chunk: int) -> tuple[float, ...]:
        engine = make_engine(FakeRunner(slots=1), chunk=chunk)
        reader = Reader(engine.stream(make_sequence(range(21), 2, prompt_logprobs=True)))
        await run_dry(engine)
        return reader.finish.prompt_logprobs

    first = asyncio.run(logprobs(BLOCK))
    assert len(first) == 20
    assert asyncio.run(logprobs(8 * BLOCK)) == first
    likely = [n for n in range(1, 21) if next_token(range(n)) == n]
    assert all(value > -1 for value in (first[n - 1] for n in likely))
    assert all(value < -4 for n, value in enumerate(first, 1) if n not in likely)


def test_memory_of_a_slot_goes_back_when_nobody_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_UNUSED_SLOT_SECONDS", 0.01)

    async def main() -> None:
        runner = FakeRunner(slots=3)
        released = threading.Event()
        release = runner.cache.release_pages

        def release_pages(slot: int) -> None:
            release(slot)
            released.set()

        runner.cache.release_pages = release_pages  # type: ignore[method-assign]
        engine = make_engine(runner)
        engine.start()
        await engine.warm_up()
        for _ in range(2):
            reader = Reader(engine.stream(make_sequence([0, 1], 40)))
            await reader.task
            assert reader.token_ids == expected_tokens([0, 1], 40)
            assert await asyncio.to_thread(released.wait, 30)
            released.clear()
        assert set(runner.cache.released) == {0}
        await asyncio.to_thread(engine.stop, 5)

    asyncio.run(main())


def test_the_thread_serves_until_it_is_stopped() -> None:
    async def main() -> None:
        metrics = RecordingMetrics()
        engine = make_engine(FakeRunner(slots=2), metrics=metrics)
        assert not engine.ready
        engine.start()
        await engine.warm_up()
        assert engine.ready
        readers = [Reader(engine.stream(make_sequence([n, n], 30))) for n in range(5)]
        await asyncio.gather(*(reader.task for reader in readers))
        for number, reader in enumerate(readers):
            assert reader.token_ids == expected_tokens([number, number], 30)
        await asyncio.to_thread(engine.stop, 30)
        assert not engine.ready
        assert metrics.up == [True, False]
        with pytest.raises(UnavailableError):
            engine.stream(make_sequence([1]))

    asyncio.run(main())


class Gate:
    """Lets the engine's thread into a pass only when it is told to."""

    def __init__(self, runner: FakeRunner) -> None:
        self.reached = threading.Semaphore(0)
        self.open = threading.Semaphore(0)
        self.error: BaseException | None = None
        runner.on_pass = self._wait

    def _wait(self, kind: str) -> None:
        self.reached.release()
        self.open.acquire()
        if self.error is not None:
            raise self.error


def test_stop_lets_the_waiting_and_the_running_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        runner = FakeRunner(slots=1)
        engine = make_engine(runner)
        engine.start()
        await engine.warm_up()
        gate = Gate(runner)
        readers = [Reader(engine.stream(make_sequence([n], 3))) for n in range(3)]
        await asyncio.to_thread(gate.reached.acquire)
        draining = threading.Event()
        join = engine._thread.join

        def tell_and_join(timeout: float) -> None:
            draining.set()
            join(timeout)

        monkeypatch.setattr(engine._thread, "join", tell_and_join)
        stopping = asyncio.create_task(asyncio.to_thread(engine.stop, 60))
        await asyncio.to_thread(draining.wait)
        with pytest.raises(UnavailableError, match="shutting down"):
            engine.stream(make_sequence([1]))
        runner.on_pass = lambda kind: None
        gate.open.release()
        await stopping
        await settle()
        for number, reader in enumerate(readers):
            assert reader.token_ids == expected_tokens([number], 3)

    asyncio.run(main())


def test_stop_fails_what_outlives_the_grace_period() -> None:
    async def main() -> None:
        metrics = RecordingMetrics()
        runner = FakeRunner(slots=1)
        engine = make_engine(runner, metrics=metrics)
        engine.start()
        await engine.warm_up()
        gate = Gate(runner)
        readers = [Reader(engine.stream(make_sequence([n], 3))) for n in range(3)]
        await asyncio.to_thread(gate.reached.acquire)
        stopping = asyncio.create_task(asyncio.to_thread(engine.stop, 0))
        for reader in readers:
            with pytest.raises(UnavailableError):
                await reader.task
        gate.open.release()
        await stopping
        assert not engine._thread.is_alive()
        assert metrics.reasons == ["shutdown"] * 3
        assert engine.num_running == engine.num_waiting == 0

    asyncio.run(main())


def test_when_the_thread_dies_everyone_hears_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        metrics = RecordingMetrics()
        runner = FakeRunner(slots=2)
        engine = make_engine(runner, metrics=metrics)
        engine.start()
        await engine.warm_up()
        gate = Gate(runner)
        readers = [Reader(engine.stream(make_sequence([n], 3))) for n in range(5)]
        await asyncio.to_thread(gate.reached.acquire)
        gate.error = SystemExit("bus error")
        gate.open.release()
        for reader in readers:
            with pytest.raises(GenerationError, match="bus error"):
                await reader.task
        assert not engine.healthy
        assert not engine.ready
        assert metrics.up == [True, False]
        with pytest.raises(UnavailableError, match="died"):
            engine.stream(make_sequence([1]))

    with caplog.at_level(logging.CRITICAL + 1):
        asyncio.run(main())


def test_a_model_that_cannot_run_never_becomes_ready(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        runner = FakeRunner(slots=1)
        runner.on_pass = _no_kernel
        engine = make_engine(runner)
        engine.start()
        with pytest.raises(GenerationError, match="no such kernel"):
            await engine.warm_up()
        assert not engine.healthy
        assert not engine.ready

    with caplog.at_level(logging.CRITICAL + 1):
        asyncio.run(main())


def _no_kernel(kind: str) -> None:
    raise RuntimeError("no such kernel")


class AnnouncingMetrics(NullMetrics):
    """Says when tokens were published."""

    def __init__(self) -> None:
        self.published = threading.Event()

    def generated_tokens(self, n: int) -> None:
        self.published.set()


def test_overlapping_steps_deliver_tokens_while_the_next_pass_runs() -> None:
    async def main() -> None:
        runner, metrics = FakeRunner(slots=2), AnnouncingMetrics()
        engine = make_engine(runner, metrics=metrics, overlaps=True)
        reader = Reader(engine.stream(make_sequence([1], 20)))
        await step(engine)  # the prompt
        num_waited = 0

        def wait_for_the_last_tokens(kind: str) -> None:
            nonlocal num_waited
            assert metrics.published.wait(10)
            metrics.published.clear()
            num_waited += 1

        await step(engine)  # a step of its own, and the next one's pass
        metrics.published.clear()
        runner.on_pass = wait_for_the_last_tokens
        await step(engine, 5)
        assert num_waited == 5
        runner.on_pass = lambda kind: None
        await run_dry(engine)
        assert reader.token_ids == expected_tokens([1], 20)
        # Nothing ran ahead of the last token: one pass for each of the others.
        assert runner.passes == ["prefill"] + ["decode"] * 19

    asyncio.run(main())


def test_a_text_that_ends_beside_the_next_pass_leaves_the_others_alone() -> None:
    async def main() -> None:
        runner = FakeRunner(slots=3)
        engine = make_engine(runner, overlaps=True)
        text = expected_tokens([1], 30)
        ending = Reader(engine.stream(make_sequence([1], 30, stop=(letters(text[9:11]),))))
        staying = Reader(engine.stream(make_sequence([2], 30)))
        await step(engine, 20)
        late = Reader(engine.stream(make_sequence([3], 5)))
        await run_dry(engine)
        assert ending.token_ids == text[:11]
        assert ending.finish.reason == "stop_sequence"
        assert staying.token_ids == expected_tokens([2], 30)
        assert late.token_ids == expected_tokens([3], 5)

    asyncio.run(main())


def test_a_failing_pass_that_ran_ahead_ends_its_sequences_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        runner = FakeRunner(slots=2)
        engine = make_engine(runner, overlaps=True)
        failing = Reader(engine.stream(make_sequence([1], 20)))
        await step(engine, 2)

        def fail(kind: str) -> None:
            raise RuntimeError("out of cheese")

        runner.on_pass = fail
        await step(engine)  # delivers what was drawn before the fault
        runner.on_pass = lambda kind: None
        await step(engine)
        with pytest.raises(GenerationError, match="out of cheese"):
            await failing.task
        assert failing.token_ids == expected_tokens([1], len(failing.events))
        assert len(failing.events) == 3
        after = Reader(engine.stream(make_sequence([2], 5)))
        await run_dry(engine)
        assert after.token_ids == expected_tokens([2], 5)

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())


def test_a_fault_in_the_delivery_beside_a_pass_is_the_engines_own() -> None:
    class FaultyMetrics(NullMetrics):
        armed = False

        def generated_tokens(self, n: int) -> None:
            if self.armed:
                raise RuntimeError("out of cheese")

    async def main() -> None:
        metrics = FaultyMetrics()
        engine = make_engine(FakeRunner(slots=2), metrics=metrics, overlaps=True)
        engine.stream(make_sequence([1], 20))
        await step(engine, 2)
        metrics.armed = True
        with pytest.raises(RuntimeError, match="out of cheese"):
            engine.step()

    asyncio.run(main())
