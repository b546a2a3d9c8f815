"""Whether short prompts that arrive together are better read together or one by one."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np

from loadtests.engine.model import NUM_STREAMS, Model
from loadtests.engine.rig import Rig, running
from loadtests.engine.section import Section
from loadtests.engine.turns import median, median_ratio, take_turns
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence

_QUESTION = "8 short prompts arrive together: time until all have a token"
_LENGTHS = ((8, 16), (8, 64), (64, 64))
_NEW_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Row:
    """One range of prompt lengths; times in milliseconds, medians over the rounds.

    ``all`` is the time until the last prompt has its first token, ``mean`` the prompts' mean time
    to first token, ``passes`` how many passes read prompts. ``times_faster`` is the ratio of the
    two ``all``, round by round.
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
class Sample:
    """One arrival of all prompts; times in seconds."""

    last: float
    mean: float
    num_passes: int


async def measure(model: Model, seconds: float, rng: np.random.Generator) -> Section:
    """Compares two engines that differ in nothing else."""
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
        summarize(lengths, samples[lengths, True], samples[lengths, False]) for lengths in _LENGTHS
    )
    ratios = ", ".join(f"{row.times_faster:.2f} x ({row.prompt_tokens} tokens)" for row in rows)
    return Section(
        "together",
        _QUESTION,
        len(samples[_LENGTHS[0], True]),
        rows,
        (f"read together, all prompts have a token sooner: {ratios}; wanted: above 1",),
    )


async def _arrive(
    model: Model, rig: Rig, rng: np.random.Generator, lengths: tuple[int, int]
) -> Sample:
    params = SamplingParams(max_new_tokens=_NEW_TOKENS, ignore_eos=True)
    shortest, longest = lengths
    sizes = rng.integers(shortest, longest + 1, NUM_STREAMS).tolist()
    prompts = [Sequence(model.random_prompt(rng, size), params) for size in sizes]
    readers = [rig.read(prompt) for prompt in prompts]
    for reader in readers:
        await reader.until(1)
    await rig.close(readers)
    passes = [each for step in rig.recorder.take_steps() for each in step.passes]
    first = readers[0].submitted
    return Sample(
        last=max(reader.times[0] for reader in readers) - first,
        mean=sum(reader.time_to_first_token for reader in readers) / len(readers),
        num_passes=sum(each.reads_prompt for each in passes),
    )


def summarize(lengths: tuple[int, int], together: list[Sample], alone: list[Sample]) -> Row:
    """Adds the rounds up."""
    shortest, longest = lengths
    return Row(
        prompt_tokens=str(shortest) if shortest == longest else f"{shortest}-{longest}",
        together_all_ms=1000 * median(s.last for s in together),
        together_mean_ms=1000 * median(s.mean for s in together),
        together_passes=median(s.num_passes for s in together),
        alone_all_ms=1000 * median(s.last for s in alone),
        alone_mean_ms=1000 * median(s.mean for s in alone),
        alone_passes=median(s.num_passes for s in alone),
        times_faster=median_ratio((s.last for s in alone), (s.last for s in together)),
    )
