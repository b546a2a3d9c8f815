"""Time to first token: with a cached prefix, and for prompts that arrive together."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np

from loadtests.engine.rig import Rig, running
from loadtests.engines import NUM_STREAMS, LoadedCausal
from loadtests.measurement import Section, median, median_ratio, take_turns

_TARGET = 5.0
_SYSTEM_TOKENS = 1000
_QUESTION_TOKENS = 16
_LENGTHS = ((8, 16), (8, 64), (64, 64))
_NEW_TOKENS = 32


@dataclass(frozen=True, slots=True)
class PrefixRow:
    """One state of the prefix cache; times in milliseconds.

    ``times_faster`` is relative to the first row, round by round; ``cached_tokens`` is a median.
    """

    prefix_cache: str
    prompt_tokens: int
    cached_tokens: int
    median_ms: float
    min_ms: float
    max_ms: float
    times_faster: float


@dataclass(frozen=True, slots=True)
class PrefixSample:
    """One prompt: seconds to its first token, and how many of its tokens were cached."""

    seconds: float
    num_cached: int


async def measure_prefix(model: LoadedCausal, seconds: float, rng: np.random.Generator) -> Section:
    """Asks questions under new and under repeated system prompts, with and without the cache."""
    num_system = min(_SYSTEM_TOKENS, model.max_length - 2 * _QUESTION_TOKENS)
    known = model.random_prompt(rng, num_system)
    async with AsyncExitStack() as stack:
        without = await stack.enter_async_context(running(model))
        cached = await stack.enter_async_context(running(model, prefix_cache=True))
        await _ask(model, cached, rng, num_system, known)
        samples = await take_turns(
            {
                "off": partial(_ask, model, without, rng, num_system, known),
                "on, new prompt": partial(_ask, model, cached, rng, num_system, None),
                "on, repeated prompt": partial(_ask, model, cached, rng, num_system, known),
            },
            seconds,
        )
    baseline = samples["off"]
    rows = tuple(
        summarize_prefix(name, num_system + _QUESTION_TOKENS, each, baseline)
        for name, each in samples.items()
    )
    new, repeated = samples["on, new prompt"], samples["on, repeated prompt"]
    ratio = median_ratio((s.seconds for s in new), (s.seconds for s in repeated))
    notes = []
    if num_system < _SYSTEM_TOKENS:
        notes.append(
            f"the context limits the system prompt to {num_system} tokens instead of "
            f"{_SYSTEM_TOKENS}"
        )
    finding = (
        f"after a repeated system prompt the first token comes {ratio:.1f} times as fast as after "
        f"a new one; target: {_TARGET:g} at {_SYSTEM_TOKENS:,} tokens"
    )
    question = "time to first token of a system prompt and a short question"
    return Section("prefix", question, len(baseline), rows, (finding,), tuple(notes))


async def _ask(
    model: LoadedCausal,
    rig: Rig,
    rng: np.random.Generator,
    num_system: int,
    system: list[int] | None,
) -> PrefixSample:
    """Asks a new question under a system prompt; None stands for a new system prompt."""
    if system is None:
        system = model.random_prompt(rng, num_system)
    prompt = system + model.random_prompt(rng, _QUESTION_TOKENS)
    before = rig.recorder.num_hit
    reader = rig.read(prompt, 1)
    await reader.end()
    await rig.close([])
    return PrefixSample(reader.time_to_first_token, rig.recorder.num_hit - before)


def summarize_prefix(
    name: str, num_tokens: int, samples: list[PrefixSample], baseline: list[PrefixSample]
) -> PrefixRow:
    """Summarizes the rounds of one state of the cache."""
    times = [1000 * sample.seconds for sample in samples]
    return PrefixRow(
        prefix_cache=name,
        prompt_tokens=num_tokens,
        cached_tokens=int(median(sample.num_cached for sample in samples)),
        median_ms=median(times),
        min_ms=min(times),
        max_ms=max(times),
        times_faster=median_ratio((1000 * s.seconds for s in baseline), times),
    )


@dataclass(frozen=True, slots=True)
class TogetherRow:
    """One range of prompt lengths; times in milliseconds, medians over the rounds.

    ``all`` is the time until every prompt has its first token, ``mean`` the prompts' mean time to
    first token, ``passes`` the number of passes that read prompts. ``times_faster`` is the ratio of
    the two ``all``, round by round.
    """

    prompt_tokens: str
    together_all_ms: float
    together_mean_ms: float
    together_passes: float
    alone_all_ms: float
    alone_mean_ms: float
    alone_passes: float
    times_faster: float


@dataclass(frozen=True, slots=True)
class TogetherSample:
    """One arrival of all prompts; times in seconds."""

    last: float
    mean: float
    num_passes: int


async def measure_together(
    model: LoadedCausal, seconds: float, rng: np.random.Generator
) -> Section:
    """Compares two engines that differ only in whether they read short prompts in one pass."""
    async with AsyncExitStack() as stack:
        together = await stack.enter_async_context(running(model))
        alone = await stack.enter_async_context(running(model, block_tokens=1))
        variants = {
            (lengths, rig is together): partial(_arrive, model, rig, rng, lengths)
            for lengths in _LENGTHS
            for rig in (together, alone)
        }
        samples = await take_turns(variants, seconds)
    rows = tuple(
        summarize_together(lengths, samples[lengths, True], samples[lengths, False])
        for lengths in _LENGTHS
    )
    ratios = ", ".join(f"{row.times_faster:.2f} x ({row.prompt_tokens} tokens)" for row in rows)
    return Section(
        "together",
        "8 short prompts arrive together: time until all have a token",
        len(samples[_LENGTHS[0], True]),
        rows,
        (f"read together, all prompts have a token sooner: {ratios}; target: above 1",),
    )


async def _arrive(
    model: LoadedCausal, rig: Rig, rng: np.random.Generator, lengths: tuple[int, int]
) -> TogetherSample:
    shortest, longest = lengths
    sizes = rng.integers(shortest, longest + 1, NUM_STREAMS).tolist()
    prompts = [model.random_prompt(rng, size) for size in sizes]
    readers = [rig.read(prompt, _NEW_TOKENS) for prompt in prompts]
    for reader in readers:
        await reader.until(1)
    await rig.close(readers)
    passes = [each for step in rig.recorder.take_steps() for each in step.passes]
    first = readers[0].submitted
    return TogetherSample(
        last=max(reader.times[0] for reader in readers) - first,
        mean=sum(reader.time_to_first_token for reader in readers) / len(readers),
        num_passes=sum(each.reads_prompt for each in passes),
    )


def summarize_together(
    lengths: tuple[int, int], together: list[TogetherSample], alone: list[TogetherSample]
) -> TogetherRow:
    """Summarizes the rounds of one range of lengths."""
    shortest, longest = lengths
    return TogetherRow(
        prompt_tokens=str(shortest) if shortest == longest else f"{shortest}-{longest}",
        together_all_ms=1000 * median(s.last for s in together),
        together_mean_ms=1000 * median(s.mean for s in together),
        together_passes=median(s.num_passes for s in together),
        alone_all_ms=1000 * median(s.last for s in alone),
        alone_mean_ms=1000 * median(s.mean for s in alone),
        alone_passes=median(s.num_passes for s in alone),
        times_faster=median_ratio((s.last for s in alone), (s.last for s in together)),
    )
