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
_SHORT_PROMPT = 16
_NEW_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Row:
    """Steps that did the same, without HTTP; times in milliseconds.

    Attributes:
        kind: ``decode``: a step with one token for each row; ``prefill``: the pass that reads (a
            part of) a prompt, in a step that also decodes another text.
        rows: sequences in the pass.
        tokens: tokens of each that were computed.
        context: tokens of each that were in the cache before.
        mean_ms, median_ms: of the step, with all that the engine does for it, or of the pass.
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
    """Measures decode steps of 1 to 8 rows, and the reading of prompts, in turns."""
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
    long = model.max_length // 2
    for rows, prompt in (*((rows, _SHORT_PROMPT) for rows in _ROWS), (NUM_STREAMS, long)):
        context = prompt + _NEW_TOKENS // 2
        found[Variant("decode", rows, 1, context)] = partial(decode, rows, prompt)
    chunk = model.chunk_tokens
    piece = min(chunk, model.max_length // 2)
    if chunk < model.max_length - 2 - _SHORT_PROMPT:  # the longest that also fits behind a chunk
        piece = min(chunk, model.max_length - 2 - chunk)
    for tokens in sorted({_SHORT_PROMPT, piece // 4, piece // 2, piece}):
        found[Variant("prefill", 1, tokens, 0)] = partial(read, tokens, 0)
    before = (model.max_length - 2 - piece) // chunk * chunk
    if before > 0:
        found[Variant("prefill", 1, piece, before)] = partial(read, piece, before)
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
    model: LoadedCausal, rig: Rig, rng: np.random.Generator, tokens: int, before: int
) -> list[float]:
    """The pass that read the last ``tokens`` of a prompt, while another text went on.

    With kernels it is the other text's decode step as well, a row among many.
    """
    other = rig.read(model.random_prompt(rng, _SHORT_PROMPT), model.max_length - _SHORT_PROMPT)
    await other.until(2)
    reader = rig.read(model.random_prompt(rng, before + tokens), 1)
    await reader.end()
    await other.until(len(other.times) + 2)  # then the step that read has been recorded
    await rig.close([reader, other])
    passes = (each for step in rig.recorder.take_steps() for each in step.passes)
    return [each.seconds for each in passes if each.reads_prompt][-1:]


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
