"""How the time of a step follows its rows, their context, and the prompt that it reads."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from loadtests.engine.rig import Rig, running
from loadtests.engines import NUM_STREAMS, LoadedCausal
from loadtests.measurement import Section, median, take_turns

_QUESTION = "time of a step by its rows, their context, and the prompt that it reads"
_ROWS = (1, 2, 4, NUM_STREAMS)
_MIXED_ROWS = (1, 4, NUM_STREAMS - 1)
_SHORT_PROMPT = 16
_LONG_PROMPT = 512
_LONG_BEFORE = 1024
_NEW_TOKENS = 32
_READINGS = 3


@dataclass(frozen=True, slots=True)
class Row:
    """Steps that did the same, without HTTP; times in milliseconds.

    Attributes:
        kind: ``decode``: a step with one token for each row; ``prefill``: one that reads (a
            part of) a prompt; ``mixed``: one that does both, in one pass or in two.
        rows: sequences that decode; 1 where a prompt is read alone.
        tokens: tokens of the prompt that were read; 1 where all decode.
        context: tokens of each row that were in the cache before.
        mean_ms, median_ms: of the step, with all that the engine does for it.
        steps: how many were measured.
    """

    kind: str
    rows: int
    tokens: int
    context: int
    mean_ms: float
    median_ms: float
    steps: int

    @property
    def work(self) -> int:
        """Pairs of a token that is computed and one in the cache."""
        return self.rows * self.tokens * self.context


@dataclass(frozen=True, slots=True)
class Variant:
    """What is measured together: `Row` without the times."""

    kind: str
    rows: int
    tokens: int
    context: int


async def measure(model: LoadedCausal, seconds: float, rng: np.random.Generator) -> Section:
    """Measures decode steps of 1 to 8 rows, the reading of prompts, and both at once, in turns."""
    async with running(model) as rig:
        samples = await take_turns(variants(model, rig, rng), seconds)
    rows = tuple(
        summarize(variant, [time for times in rounds for time in times])
        for variant, rounds in samples.items()
    )
    one, most = rows[0], next(row for row in rows if row.rows == NUM_STREAMS)
    finding = (
        f"a decode step of {NUM_STREAMS} rows takes {most.mean_ms / one.mean_ms:.2f} times as long "
        "as that of one"
    )
    notes = ("means count what the machine did meanwhile, medians do not",)
    return Section("steps", _QUESTION, len(next(iter(samples.values()))), rows, (finding,), notes)


def variants(
    model: LoadedCausal, rig: Rig, rng: np.random.Generator
) -> dict[Variant, Callable[[], Awaitable[list[float]]]]:
    """What to measure, for `take_turns`: each returns the seconds of steps that did the same.

    Args:
        model: whose context limits the lengths.
        rig: its engine, without a prefix cache.
        rng: draws the prompts.
    """
    decode = partial(_decode, model, rig, rng)
    read = partial(_read, model, rig, rng)
    found: dict[Variant, Callable[[], Awaitable[list[float]]]] = {}
    long = min(_LONG_PROMPT, model.max_length // 2)
    for rows, prompt in (*((rows, _SHORT_PROMPT) for rows in _ROWS), (NUM_STREAMS, long)):
        context = prompt + _NEW_TOKENS // 2
        found[Variant("decode", rows, 1, context)] = partial(decode, rows, prompt)
    chunk = model.chunk_tokens
    piece = min(chunk, model.max_length // 2)
    if chunk < model.max_length - 2 - _SHORT_PROMPT:  # the longest that also fits behind a chunk
        piece = min(chunk, model.max_length - 2 - chunk)
    for tokens in sorted({_SHORT_PROMPT, piece // 4, piece // 2, piece}):
        found[Variant("prefill", 1, tokens, 0)] = partial(read, 0, tokens, 0)
    before = min(model.max_length - 2 - piece, max(chunk, _LONG_BEFORE)) // chunk * chunk
    if before > 0:
        found[Variant("prefill", 1, piece, before)] = partial(read, 0, piece, before)
    for rows in _MIXED_ROWS:
        for tokens in sorted({_SHORT_PROMPT, piece // 4, piece}):
            found[Variant("mixed", rows, tokens, _SHORT_PROMPT + rows)] = partial(
                read, rows, tokens, 0
            )
    return found


async def _decode(
    model: LoadedCausal, rig: Rig, rng: np.random.Generator, rows: int, num_prompt: int
) -> list[float]:
    """Steps that decoded all rows and read nothing."""
    readers = [
        # Prompts that are read one by one start one by one, and all have to run at some time.
        rig.read(model.random_prompt(rng, num_prompt), _NEW_TOKENS + rows)
        for _ in range(rows)
    ]
    for reader in readers:
        await reader.end()
    await rig.close(readers)
    return [step.total for step in rig.recorder.take_steps() if step.num_decoded == rows]


async def _read(
    model: LoadedCausal, rig: Rig, rng: np.random.Generator, rows: int, tokens: int, before: int
) -> list[float]:
    """Steps that read the last ``tokens`` of a prompt, while ``rows`` other texts went on."""
    found = []
    for _ in range(_READINGS):
        prompt = model.random_prompt(rng, before + tokens)
        others = [
            rig.read(model.random_prompt(rng, _SHORT_PROMPT), _NEW_TOKENS + rows)
            for _ in range(rows)
        ]
        for other in others:
            await other.until(2)
        rig.recorder.take_steps()
        reader = rig.read(prompt, 3)
        await reader.end()  # so the step that gave its first token has been recorded
        await rig.close([reader, *others])
        steps = rig.recorder.take_steps()
        reading = [step for step in steps if any(each.reads_prompt for each in step.passes)]
        found += [step.total for step in reading[-1:]]
    return found


def summarize(variant: Variant, seconds: list[float]) -> Row:
    """Summarizes the steps of a variant."""
    return Row(
        kind=variant.kind,
        rows=variant.rows,
        tokens=variant.tokens,
        context=variant.context,
        mean_ms=1000 * sum(seconds) / max(len(seconds), 1),
        median_ms=1000 * median(seconds),
        steps=len(seconds),
    )
