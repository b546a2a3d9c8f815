"""How long running streams wait while a long prompt is read."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from loadtests.engine.model import NUM_STREAMS, Model
from loadtests.engine.rig import Reader, Rig, running
from loadtests.engine.section import Section
from loadtests.engine.turns import median, take_turns
from maskdial.causal.params import SamplingParams
from maskdial.causal.sequence import Sequence

_QUESTION = "gaps between the tokens of 7 streams while a long prompt is read"
_PROMPT_TOKENS = 1500
_NUM_RUNNING = NUM_STREAMS - 1
_START_TOKENS = 16
_STEPS_BEFORE = 12
_STEPS_AFTER = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One chunk size; ``ms`` are milliseconds.

    Attributes:
        chunk_tokens: prompt tokens read between two steps.
        step_ms: an undisturbed decode step of the running streams, median.
        chunk_ms: the pass that reads a whole chunk, median.
        gap_ms: a gap while the prompt was read, median.
        longest_gap_ms: the longest gap of any stream, median over the rounds.
        gap_to_chunk_and_step: the median gap, divided by chunk and step (medians).
        longest_to_longest: the longest gap of a round, divided by that round's longest chunk and
            longest undisturbed step; median over the rounds.
        worst_gap_ms: the longest gap of all rounds.
        prompt_ms: from the long prompt's arrival to its first token, median.
    """

    chunk_tokens: int
    step_ms: float
    chunk_ms: float
    gap_ms: float
    longest_gap_ms: float
    gap_to_chunk_and_step: float
    longest_to_longest: float
    worst_gap_ms: float
    prompt_ms: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One arrival of the long prompt; times in seconds."""

    gaps: tuple[float, ...]
    chunks: tuple[float, ...]
    steps: tuple[float, ...]
    time_to_first_token: float


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
    chunks = [p.seconds for step in steps if len(step.passes) == 2 for p in step.passes[1:]]
    undisturbed = [step.total for step in steps if step.is_decode_of(_NUM_RUNNING)]
    return Sample(
        gaps=tuple(gaps_during(readers, long.submitted, long.times[0])),
        chunks=tuple(chunks),
        steps=tuple(undisturbed),
        time_to_first_token=long.time_to_first_token,
    )


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
    step = median(s for sample in samples for s in sample.steps)
    # Of a prompt's chunks the last is shorter: it would pull the median of a few down.
    chunk = median(c for sample in samples for c in sample.chunks[:-1] or sample.chunks)
    gap = median(g for sample in samples for g in _read_gaps(sample))
    longest = [max(sample.gaps) for sample in samples]
    bounds = [max(sample.chunks) + max(sample.steps) for sample in samples]
    return Row(
        chunk_tokens=chunk_tokens,
        step_ms=1000 * step,
        chunk_ms=1000 * chunk,
        gap_ms=1000 * gap,
        longest_gap_ms=1000 * median(longest),
        gap_to_chunk_and_step=gap / (chunk + step),
        longest_to_longest=median(g / b for g, b in zip(longest, bounds, strict=True)),
        worst_gap_ms=1000 * max(longest),
        prompt_ms=1000 * median(sample.time_to_first_token for sample in samples),
    )


def _read_gaps(sample: Sample) -> tuple[float, ...]:
    """The gaps that hold a whole chunk: at the ends of the reading, some hold less."""
    shortest = min(sample.chunks[:-1] or sample.chunks)
    return tuple(gap for gap in sample.gaps if gap >= shortest) or sample.gaps


def _finding(row: Row) -> str:
    return (
        f"with chunks of {row.chunk_tokens} tokens the median gap is "
        f"{row.gap_to_chunk_and_step:.2f} x (one chunk + one step), the longest "
        f"{row.longest_to_longest:.2f} x (the longest chunk + the longest step); wanted: about 1"
    )
