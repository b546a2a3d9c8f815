"""How much sooner the first token comes when the beginning of a prompt is cached."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np

from loadtests.engine.model import Model
from loadtests.engine.rig import Rig, running
from loadtests.engine.section import Section
from loadtests.engine.turns import median, median_ratio, take_turns
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence

_QUESTION = "time to first token of a system prompt and a short question"
_TARGET = 5.0
_SYSTEM_TOKENS = 1000
_QUESTION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One state of the prefix cache; times in milliseconds.

    ``times_faster`` compares with the first row, round by round; ``cached_tokens`` came from the
    cache (median).
    """

    prefix_cache: str
    prompt_tokens: int
    cached_tokens: int
    median_ms: float
    min_ms: float
    max_ms: float
    times_faster: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt: seconds to its first token, and its tokens that were cached."""

    seconds: float
    num_cached: int


async def measure(model: Model, seconds: float, rng: np.random.Generator) -> Section:
    """Asks about new and about known system prompts, with the cache, and without it."""
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
        summarize(name, num_system + _QUESTION_TOKENS, each, baseline)
        for name, each in samples.items()
    )
    new, repeated = samples["on, new prompt"], samples["on, repeated prompt"]
    ratio = median_ratio((s.seconds for s in new), (s.seconds for s in repeated))
    notes = []
    if num_system < _SYSTEM_TOKENS:
        notes.append(
            f"the context allows a system prompt of {num_system} tokens, not {_SYSTEM_TOKENS}"
        )
    finding = (
        f"a repeated system prompt answers {ratio:.1f} times as fast as a new one; "
        f"wanted: {_TARGET:g} at {_SYSTEM_TOKENS:,} tokens"
    )
    return Section("prefix", _QUESTION, len(baseline), rows, (finding,), tuple(notes))


async def _ask(
    model: Model, rig: Rig, rng: np.random.Generator, num_system: int, system: list[int] | None
) -> Sample:
    """Asks a new question under a system prompt, or under a new one where it is None."""
    if system is None:
        system = model.random_prompt(rng, num_system)
    prompt = system + model.random_prompt(rng, _QUESTION_TOKENS)
    before = rig.recorder.num_hit
    reader = rig.read(Sequence(prompt, SamplingParams(max_new_tokens=1, ignore_eos=True)))
    await reader.end()
    await rig.close([])
    return Sample(reader.time_to_first_token, rig.recorder.num_hit - before)


def summarize(name: str, num_tokens: int, samples: list[Sample], baseline: list[Sample]) -> Row:
    """Adds the rounds up."""
    times = [1000 * sample.seconds for sample in samples]
    return Row(
        prefix_cache=name,
        prompt_tokens=num_tokens,
        cached_tokens=int(median(sample.num_cached for sample in samples)),
        median_ms=median(times),
        min_ms=min(times),
        max_ms=max(times),
        times_faster=median_ratio((1000 * s.seconds for s in baseline), times),
    )
