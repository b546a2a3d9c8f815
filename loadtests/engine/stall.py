"""How long running streams stall while a long prompt is read."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from loadtests import LoadTestError
from loadtests.engine.rig import Reader, Rig, Step, running
from loadtests.engines import NUM_STREAMS, LoadedCausal
from loadtests.measurement import Section, median, median_ratio, take_turns

_QUESTION = "gaps between the tokens of 7 streams while a long prompt is read"
_PROMPT_TOKENS = 1500
_NUM_RUNNING = NUM_STREAMS - 1
_START_TOKENS = 16
_STEPS_BEFORE = 12
_STEPS_AFTER = 4
_MAX_TRIES = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One chunk size; times in milliseconds.

    Attributes:
        chunk_tokens: prompt tokens read between two decode steps.
        step_ms: an undisturbed decode step of the running streams, median.
        both_ms: an iteration's passes, or its one, for a decode step and a whole chunk, median.
        gap_ms: a gap while the prompt was read, median.
        longest_gap_ms: the longest gap of any stream, median over the rounds.
        gap_to_both: the median gap of a round divided by its median iteration of both; median over
            the rounds.
        longest_to_longest: the round's longest gap divided by its longest such iteration; median.
        worst_gap_ms: the longest gap of all rounds.
        prompt_ms: from the submission of the long prompt to its first token, median.
    """

    chunk_tokens: int
    step_ms: float
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
    both: tuple[float, ...]
    """The passes of iterations that decode and read a chunk."""
    time_to_first_token: float

    @property
    def whole(self) -> slice:
        """The chunks without the last, shorter one, or the only one."""
        return slice(max(len(self.both) - 1, 1))

    @property
    def gaps_with_chunk(self) -> tuple[float, ...]:
        """Gaps that contain a whole chunk; those at either end may contain less."""
        shortest = min(self.both[self.whole])
        return tuple(gap for gap in self.gaps if gap >= shortest) or self.gaps


async def measure(model: LoadedCausal, seconds: float, rng: np.random.Generator) -> Section:
    """Compares the configured chunk with half of it and with the whole prompt at once."""
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
        notes.append(
            f"the context limits the prompt to {num_prompt} tokens instead of {_PROMPT_TOKENS}"
        )
    return Section(
        "stall",
        _QUESTION,
        len(samples[configured]),
        rows,
        tuple(_finding(row) for row in rows if row.chunk_tokens == configured),
        tuple(notes),
    )


async def _arrive(
    model: LoadedCausal, rig: Rig, rng: np.random.Generator, num_prompt: int, room: int
) -> Sample:
    """Repeats the arrival if the streams ran out of context before they saw it."""
    for _ in range(_MAX_TRIES):
        sample = await _try(model, rig, rng, num_prompt, room)
        if sample.gaps and sample.both and sample.steps:
            return sample
    raise LoadTestError("the streams ended before the prompt was read: this machine is too busy")


async def _try(
    model: LoadedCausal, rig: Rig, rng: np.random.Generator, num_prompt: int, room: int
) -> Sample:
    """Runs the streams, submits the long prompt, and reads on until shortly after it."""
    readers = [rig.read(model.random_prompt(rng, _START_TOKENS), room) for _ in range(_NUM_RUNNING)]
    for reader in readers:
        await reader.until(1)
    await readers[-1].until(_STEPS_BEFORE)
    long = rig.read(model.random_prompt(rng, num_prompt), 1)
    await long.end()
    await readers[0].until(len(readers[0].times) + _STEPS_AFTER)
    await rig.close(readers)
    steps = rig.recorder.take_steps()
    return Sample(
        gaps=tuple(gaps_during(readers, long.submitted, long.times[0])),
        steps=tuple(step.total for step in steps if step.num_decoded == _NUM_RUNNING),
        both=tuple(seconds_beside_streams(steps)),
        time_to_first_token=long.time_to_first_token,
    )


def seconds_beside_streams(steps: list[Step]) -> list[float]:
    """The passes of each iteration that decoded all streams and read a chunk of one prompt.

    The start of the streams also decodes and reads prompts in one iteration, but not with all rows.
    """
    return [
        sum(each.seconds for each in step.passes)
        for step in steps
        if any(each.reads_prompt for each in step.passes)
        and sum(each.num_rows for each in step.passes) == _NUM_RUNNING + 1
    ]


def gaps_during(readers: list[Reader], start: float, end: float) -> list[float]:
    """The gaps between tokens, in seconds, that overlap a period."""
    return [
        after - before
        for reader in readers
        for before, after in pairwise(reader.times)
        if after > start and before < end
    ]


def summarize(chunk_tokens: int, samples: list[Sample]) -> Row:
    """Summarizes the rounds of one chunk size."""
    longest = [max(sample.gaps) for sample in samples]
    return Row(
        chunk_tokens=chunk_tokens,
        step_ms=1000 * median(time for s in samples for time in s.steps),
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
        "target: about 1"
    )
