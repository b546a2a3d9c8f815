"""What drafting from the text itself (prompt lookup) gains for a sequence that runs alone."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from loadtests import LoadTestError
from loadtests.engine.rig import Rig, running
from loadtests.engines import LoadedCausal
from loadtests.measurement import Section, median, median_ratio, take_turns
from loadtests.texts import TASKS
from maskdial.causal.executor import Cache, ModelRunner

_QUESTION = "speed of one stream alone, by the limit of drafted tokens"
_DRAFTS = (0, 4, 8, 16)
_MIN_KEPT = 0.95
_NEW_TOKENS = 72
_MIN_NEW_TOKENS = 16
_LEAD = np.float32(10.0)


class ScriptedRunner:
    """A model runner whose greedy decoding follows a given text, at the model's real cost.

    What drafting gains depends on the text, and a model with random weights never repeats its
    prompt. So every pass runs as it is, and then the script's next token is made the likeliest. For
    one sequence at a time, in slot 0.

    Args:
        runner: the model.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._script: NDArray[np.int64] = np.empty(0, np.int64)

    decode_and_prefill = None
    """One sequence runs at a time."""

    @property
    def cache(self) -> Cache:
        return self._runner.cache

    @property
    def adapters(self) -> NDArray[np.int64] | None:
        return self._runner.adapters

    def follow(self, token_ids: Sequence[int]) -> None:
        """Sets the script, prompt included. Call it between two texts."""
        self._script = np.array(token_ids, np.int64)

    def prefill(
        self, slot: int, token_ids: NDArray[np.int64], start: int, num_logits: int = 1
    ) -> NDArray[np.float32]:
        logits = np.array(self._runner.prefill(slot, token_ids, start, num_logits))
        self._direct(logits, start + len(token_ids) - num_logits)
        return logits

    def prefill_together(self, slot: int, prompts: list[NDArray[np.int64]]) -> NDArray[np.float32]:
        raise NotImplementedError("a scripted runner reads one prompt at a time")

    def decode(
        self, token_ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        logits = np.array(self._runner.decode(token_ids, lengths, rows))
        self._direct(logits, int(lengths[0]))
        return logits

    def warm_up(self) -> None:
        self._runner.warm_up()

    def _direct(self, logits: NDArray[np.float32], position: int) -> None:
        """Row i of the logits is for the token after position ``position + i``."""
        for row, token_id in zip(logits, self._script[position + 1 :], strict=False):
            row[token_id] = row.max() + _LEAD


@dataclass(frozen=True, slots=True)
class Row:
    """One text and one limit of drafted tokens; medians over the rounds.

    Attributes:
        text: what is written.
        max_drafts: most tokens drafted per pass; 0 is off.
        tokens_per_second: without the first token.
        times_faster: relative to 0, round by round.
        tokens_per_pass: tokens generated per pass.
        drafts: drafted tokens.
        accepted_percent: share of them that was accepted.
        new_tokens: length of the text.
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
    """One text, written once; the drafts are the same every time."""

    tokens_per_second: float
    num_tokens: int
    num_passes: int
    num_drafts: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Script:
    """A prompt and the text to write after it, as token ids."""

    prompt: tuple[int, ...]
    target: tuple[int, ...]


async def measure(model: LoadedCausal, seconds: float, rng: np.random.Generator) -> Section:
    """Writes each text with each limit in turn; the text is always the same."""
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
        ("the texts are scripted: the model's passes run, and their outcome is set",),
    )


def fit(prompt: list[int], target: list[int], max_length: int) -> Script:
    """Shortens the target, then the beginning of the prompt, until both fit into the context.

    Raises:
        LoadTestError: one of them is empty.
    """
    if not prompt or not target:
        raise LoadTestError("the tokenizer makes no tokens of English text")
    room = max_length - len(prompt)
    target = target[: max(room, _MIN_NEW_TOKENS)]
    prompt = prompt[-(max_length - len(target)) :]
    return Script(tuple(prompt), tuple(target))


async def _write(rig: Rig, runner: ScriptedRunner, script: Script) -> Sample:
    runner.follow((*script.prompt, *script.target))
    drafts, accepted = rig.recorder.num_drafts, rig.recorder.num_accepted
    num_new = len(script.target)
    reader = rig.read(script.prompt, num_new)
    await reader.end()
    await rig.close([])
    if tuple(reader.token_ids) != script.target:
        raise LoadTestError("the engine wrote another text than its script")
    accepted = rig.recorder.num_accepted - accepted
    return Sample(
        tokens_per_second=(num_new - 1) / (reader.times[-1] - reader.times[0]),
        num_tokens=num_new - 1,
        num_passes=num_new - 1 - accepted,
        num_drafts=rig.recorder.num_drafts - drafts,
        num_accepted=accepted,
    )


def summarize(name: str, max_drafts: int, samples: list[Sample], off: list[Sample]) -> Row:
    """Summarizes the rounds of one text and limit."""
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
    target = "above 1" if repeats else f"at least {_MIN_KEPT}"
    return f"{name}: {gains}; target: {target}"
