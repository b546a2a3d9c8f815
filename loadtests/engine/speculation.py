"""What guessing ahead from the text itself gains for a sequence that runs alone."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np

from loadtests.engine.model import Model
from loadtests.engine.rig import Rig, running
from loadtests.engine.scripted import ScriptedRunner
from loadtests.engine.section import Section
from loadtests.engine.texts import TASKS
from loadtests.engine.turns import median, median_ratio, take_turns
from loadtests.errors import LoadTestError
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence

_QUESTION = "speed of one stream alone, by how many tokens are guessed ahead"
_DRAFTS = (0, 4, 8, 16)
_LEAST_KEPT = 0.95
_NEW_TOKENS = 72
_MIN_NEW_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One text and one bound of guesses; medians over the rounds.

    Attributes:
        text: what is written.
        max_drafts: most tokens guessed at a time; 0 is off.
        tokens_per_second: without the first token.
        times_faster: than with 0, round by round.
        tokens_per_pass: how many tokens a pass gave.
        drafts: tokens that were guessed.
        accepted_percent: of them.
        new_tokens: how long the text is.
    """

    text: str
    max_drafts: int
    tokens_per_second: float
    times_faster: float
    tokens_per_pass: float
    drafts: int
    accepted_percent: float
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One text written; the same guesses every time."""

    tokens_per_second: float
    num_tokens: int
    num_passes: int
    num_drafts: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Script:
    """A prompt, and the text to write after it, as token ids."""

    prompt: tuple[int, ...]
    target: tuple[int, ...]


async def measure(model: Model, seconds: float, rng: np.random.Generator) -> Section:
    """Writes each text with each bound of guesses in turn; the text is always the same."""
    scripts = {
        name: fit(
            model.encode(task.prompt), model.encode(task.target)[:_NEW_TOKENS], model.max_length
        )
        for name, task in TASKS.items()
    }
    async with AsyncExitStack() as stack:
        variants = {}
        for max_drafts in _DRAFTS:
            runner = ScriptedRunner(model.runner())
            rig = await stack.enter_async_context(running(model, runner, max_drafts=max_drafts))
            for name, script in scripts.items():
                variants[name, max_drafts] = partial(_write, rig, runner, script)
        samples = await take_turns(variants, seconds)
    rows = tuple(
        summarize(name, max_drafts, samples[name, max_drafts], samples[name, 0])
        for name in scripts
        for max_drafts in _DRAFTS
    )
    return Section(
        "speculation",
        _QUESTION,
        len(next(iter(samples.values()))),
        rows,
        tuple(_finding(name, [row for row in rows if row.text == name]) for name in scripts),
        ("the texts are given, not the model's own: its passes run, and their outcome is set",),
    )


def fit(prompt: list[int], target: list[int], max_length: int) -> Script:
    """Shortens a target, and then a prompt's beginning, until both fit into the context.

    Raises:
        LoadTestError: one of them is empty.
    """
    if not prompt or not target:
        raise LoadTestError("this tokenizer makes no tokens of English text")
    room = max_length - len(prompt)
    target = target[: max(room, _MIN_NEW_TOKENS)]
    prompt = prompt[-(max_length - len(target)) :]
    return Script(tuple(prompt), tuple(target))


async def _write(rig: Rig, runner: ScriptedRunner, script: Script) -> Sample:
    runner.follow((*script.prompt, *script.target))
    drafts, accepted = rig.recorder.num_drafts, rig.recorder.num_accepted
    num_new = len(script.target)
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
    reader = rig.read(Sequence(script.prompt, params))
    await reader.end()
    await rig.close([])
    if tuple(reader.token_ids) != script.target:
        raise LoadTestError("the engine wrote another text than the one it was led to")
    accepted = rig.recorder.num_accepted - accepted
    return Sample(
        tokens_per_second=(num_new - 1) / (reader.times[-1] - reader.times[0]),
        num_tokens=num_new - 1,
        num_passes=num_new - 1 - accepted,
        num_drafts=rig.recorder.num_drafts - drafts,
        num_accepted=accepted,
    )


def summarize(name: str, max_drafts: int, samples: list[Sample], off: list[Sample]) -> Row:
    """Adds the rounds up."""
    last = samples[-1]
    return Row(
        text=name,
        max_drafts=max_drafts,
        tokens_per_second=median(s.tokens_per_second for s in samples),
        times_faster=median_ratio(
            (s.tokens_per_second for s in samples), (s.tokens_per_second for s in off)
        ),
        tokens_per_pass=last.num_tokens / last.num_passes,
        drafts=last.num_drafts,
        accepted_percent=100 * last.num_accepted / max(last.num_drafts, 1),
        new_tokens=last.num_tokens + 1,
    )


def _finding(name: str, rows: list[Row]) -> str:
    gains = ", ".join(f"{row.times_faster:.2f} x with {row.max_drafts}" for row in rows[1:])
    repeats = name in ("copy", "extractive summary")
    wanted = "above 1" if repeats else f"at least {_LEAST_KEPT}"
    return f"{name}: {gains}; wanted: {wanted}"
