"""How long running streams wait while a long prompt is read."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from loadtests.engine.model import NUM_STREAMS, Model
from loadtests.engine.recorder import Pass, Step
from loadtests.engine.rig import Reader, Rig, running
from loadtests.engine.section import Section
from loadtests.engine.turns import median, median_ratio, take_turns
from loadtests.errors import LoadTestError
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence

_QUESTION = "gaps between the tokens of 7 streams while a long prompt is read"
_PROMPT_TOKENS = 1500
_NUM_RUNNING = NUM_STREAMS - 1
_START_TOKENS = 16
_STEPS_BEFORE = 12
_STEPS_AFTER = 4
_MOST_TRIES = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One chunk size; ``ms`` are milliseconds.

    Attributes:
        chunk_tokens: prompt tokens read between two steps.
        step_ms: an undisturbed decode step of the running streams, median.
        chunk_ms: the pass that reads a whole chunk, median.
        both_ms: the passes of an iteration that decodes and reads a whole chunk, median.
        gap_ms: a gap while the prompt was read, median.
        longest_gap_ms: the longest gap of any stream, median over the rounds.
        gap_to_both: the median gap of a round, divided by its median iteration of both; median over
            the rounds.
        longest_to_longest: the same of the round's longest gap and its longest such iteration.
        worst_gap_ms: the longest gap of all rounds.
        prompt_ms: from the long prompt's arrival to its first token, median.
    """

    chunk_tokens: int
    step_ms: float
    chunk_ms: float
    both_ms: float
    gap_ms: float
    longest_gap_ms: float
    gap_to_both: float
    longest_to_longest: float
    worst_gap_ms: float
    prompt_ms: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One arrival of the long prompt; times in seconds."""

    gaps: tuple[float, ...]
    steps: tuple[float, ...]
    chunks: tuple[float, ...]
    both: tuple[float, ...]
    """Of the same iterations: the chunk's pass and the decode step's."""
    time_to_first_token: float

    @property
    def whole(self) -> slice:
        """The chunks that are not the last, shorter one; all of one."""
        return slice(max(len(self.chunks) - 1, 1))

    @property
    def gaps_with_chunk(self) -> tuple[float, ...]:
        """The gaps that hold a whole chunk: at the ends of the reading, some hold less."""
        shortest = min(self.both[self.whole])
        return tuple(gap for gap in self.gaps if gap >= shortest) or self.gaps


async def measure(model: Model, seconds: float, rng: np.random.Generator) -> Section:
    """Compares the configured chunk with half of it and with the whole prompt in one piece."""
    room = model.max_length - _START_TOKENS
    num_prompt = min(_PROMPT_TOKENS, model.max_length * 3 // 4)
    configured = model.chunk_tokens
    sizes = {model.whole_blocks(configured // 2), configured, model.whole_blocks(num_prompt)}
    async with AsyncExitStack() as stack:
        variants = {}
        for size in sorted(sizes):
            rig = await stack.enter_async_context(running(model, chunk_tokens=size))
            variants[size] = partial(_arrive, model, rig, rng, num_prompt, room)
        samples = await take_turns(variants, seconds)
    rows = tuple(summarize(size, samples[size]) for size in samples)
    notes = []
    if num_prompt < _PROMPT_TOKENS:
        notes.append(f"the context allows a prompt of {num_prompt} tokens, not {_PROMPT_TOKENS}")
    return Section(
        "stall",
        _QUESTION,
        len(samples[configured]),
        rows,
        tuple(_finding(row) for row in rows if row.chunk_tokens == configured),
        tuple(notes),
    )


async def _arrive(
    model: Model, rig: Rig, rng: np.random.Generator, num_prompt: int, room: int
) -> Sample:
    """One arrival, tried again where the streams ran out of context before they had seen it."""
    for _ in range(_MOST_TRIES):
        sample = await _try(model, rig, rng, num_prompt, room)
        if sample.gaps and sample.chunks and sample.steps:
            return sample
    raise LoadTestError("the streams ended before a prompt came: this machine is too busy")


async def _try(
    model: Model, rig: Rig, rng: np.random.Generator, num_prompt: int, room: int
) -> Sample:
    """Lets the streams run, submits the long prompt, and reads on until shortly after it."""
    params = SamplingParams(max_new_tokens=room, ignore_eos=True)
    readers = [
        rig.read(Sequence(model.random_prompt(rng, _START_TOKENS), params))
        for _ in range(_NUM_RUNNING)
    ]
    for reader in readers:
        await reader.until(1)
    await readers[-1].until(_STEPS_BEFORE)
    long = rig.read(
        Sequence(
            model.random_prompt(rng, num_prompt), SamplingParams(max_new_tokens=1, ignore_eos=True)
        )
    )
    await long.end()
    await readers[0].until(len(readers[0].times) + _STEPS_AFTER)
    await rig.close(readers)
    steps = rig.recorder.take_steps()
    mixed = reading_passes(steps)
    return Sample(
        gaps=tuple(gaps_during(readers, long.submitted, long.times[0])),
        steps=tuple(step.total for step in steps if step.num_decoded == _NUM_RUNNING),
        chunks=tuple(chunk.seconds for _, chunk in mixed),
        both=tuple(decode.seconds + chunk.seconds for decode, chunk in mixed),
        time_to_first_token=long.time_to_first_token,
    )


def reading_passes(steps: list[Step]) -> list[tuple[Pass, Pass]]:
    """The decode step and the chunk of each iteration in which all streams ran and one prompt was
    read; when the streams began, some iterations did both, too.
    """
    pairs = [(step.passes[0], step.passes[1]) for step in steps if len(step.passes) == 2]
    return [
        (decode, chunk)
        for decode, chunk in pairs
        if decode.num_rows == _NUM_RUNNING and chunk.num_rows == 1
    ]


def gaps_during(readers: list[Reader], start: float, end: float) -> list[float]:
    """The gaps between tokens, in seconds, that overlap a time."""
    return [
        after - before
        for reader in readers
        for before, after in pairwise(reader.times)
        if after > start and before < end
    ]


def summarize(chunk_tokens: int, samples: list[Sample]) -> Row:
    """Adds the rounds of one chunk size up."""
    longest = [max(sample.gaps) for sample in samples]
    return Row(
        chunk_tokens=chunk_tokens,
        step_ms=1000 * median(time for s in samples for time in s.steps),
        chunk_ms=1000 * median(time for s in samples for time in s.chunks[s.whole]),
        both_ms=1000 * median(time for s in samples for time in s.both[s.whole]),
        gap_ms=1000 * median(gap for s in samples for gap in s.gaps_with_chunk),
        longest_gap_ms=1000 * median(longest),
        gap_to_both=median_ratio(
            (median(s.gaps_with_chunk) for s in samples), (median(s.both[s.whole]) for s in samples)
        ),
        longest_to_longest=median_ratio(longest, (max(s.both) for s in samples)),
        worst_gap_ms=1000 * max(longest),
        prompt_ms=1000 * median(sample.time_to_first_token for sample in samples),
    )


def _finding(row: Row) -> str:
    return (
        f"with chunks of {row.chunk_tokens} tokens the median gap is {row.gap_to_both:.2f} x (one "
        f"chunk + one step), and the longest {row.longest_to_longest:.2f} x the longest of those; "
        "wanted: about 1"
    )
