"""What drafting from the text itself (prompt lookup) gains, for one stream and for several."""

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
from maskdial.causal.executor import Cache, DecodeAndPrefill, ModelRunner
from maskdial.runtime.piece import Piece

_QUESTION = "speed with and without drafts of 16 tokens, by the number of streams"
_DRAFTS = 16
_STREAMS = (1, 2, 4, 8, 16)
_SEVERAL = ("copy", "free text")
_MIN_KEPT = 0.98
_NEW_TOKENS = 72
_MIN_NEW_TOKENS = 16
_LEAD = np.float32(10.0)


class ScriptedRunner:
    """A model runner whose greedy decoding follows a given text, at the model's real cost.

    What drafting gains depends on the text, and a model with random weights never repeats its
    prompt. So every pass runs as it is, and then the script's next token is made the likeliest. All
    sequences follow the same script.

    Args:
        runner: the model.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._script: NDArray[np.int64] = np.empty(0, np.int64)
        together = runner.decode_and_prefill
        self.decode_and_prefill = None if together is None else partial(self._together, together)

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
        logits = np.array(self._runner.prefill_together(slot, prompts))
        for row, prompt in enumerate(prompts):
            self._direct(logits[row : row + 1], len(prompt) - 1)
        return logits

    def decode(
        self, token_ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        logits = np.array(self._runner.decode(token_ids, lengths, rows))
        for row, length in enumerate(lengths[rows].tolist()):
            self._direct(logits[row : row + 1], length)
        return logits

    def _together(
        self,
        together: DecodeAndPrefill,
        token_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        rows: NDArray[np.int64],
        pieces: list[Piece],
    ) -> NDArray[np.float32]:
        logits = np.array(together(token_ids, lengths, rows, pieces))
        for row, length in enumerate(lengths[rows].tolist()):
            self._direct(logits[row : row + 1], length)
        first = len(rows)
        for piece in pieces:
            last = first + len(piece.rows)
            self._direct(logits[first:last], piece.start + int(piece.rows[0]))
            first = last
        return logits

    def warm_up(self) -> None:
        self._runner.warm_up()

    def _direct(self, logits: NDArray[np.float32], position: int) -> None:
        """Row i of the logits is for the token after position ``position + i``."""
        for row, token_id in zip(logits, self._script[position + 1 :], strict=False):
            row[token_id] = row.max() + _LEAD


@dataclass(frozen=True, slots=True)
class Row:
    """One text, written by several streams at once; medians over the rounds.

    Attributes:
        text: what is written.
        streams: how many write it.
        off_tokens_per_second: of all streams, without drafts, after the first tokens.
        on_tokens_per_second: with drafts.
        times_faster: the ratio of the two, round by round.
        tokens_per_pass: tokens that a stream gets from a pass, with drafts.
        drafts: drafted tokens of all streams.
        accepted_percent: share of them that was accepted.
        new_tokens: length of the text.
    """

    text: str
    streams: int
    off_tokens_per_second: float
    on_tokens_per_second: float
    times_faster: float
    tokens_per_pass: float
    drafts: int
    accepted_percent: float
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One text, written once by each stream; ``num_passes`` counts those of each stream."""

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
    """Writes each text with and without drafts in turn; the text is always the same."""
    scripts = {
        name: fit(
            model.encode(task.prompt), model.encode(task.target)[:_NEW_TOKENS], model.max_length
        )
        for name, task in TASKS.items()
    }
    shown = [
        (name, streams)
        for name in scripts
        for streams in _STREAMS
        if streams == 1 or name in _SEVERAL
    ]
    async with AsyncExitStack() as stack:
        variants = {}
        for max_drafts in (0, _DRAFTS):
            runner = ScriptedRunner(model.runner(max(_STREAMS)))
            rig = await stack.enter_async_context(
                running(model, runner, slots=max(_STREAMS), max_drafts=max_drafts)
            )
            for name, streams in shown:
                variants[name, streams, max_drafts] = partial(
                    _write, rig, runner, scripts[name], streams
                )
        samples = await take_turns(variants, seconds)
    rows = tuple(summarize(*each, samples[(*each, _DRAFTS)], samples[(*each, 0)]) for each in shown)
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


async def _write(rig: Rig, runner: ScriptedRunner, script: Script, streams: int) -> Sample:
    runner.follow((*script.prompt, *script.target))
    drafts, accepted = rig.recorder.num_drafts, rig.recorder.num_accepted
    num_new = len(script.target)
    # The last one of those whose prompts are read one by one begins when others have some tokens.
    readers = [rig.read(script.prompt, num_new) for _ in range(streams)]
    for reader in readers:
        await reader.end()
    await rig.close([])
    rig.recorder.take_steps()
    if any(tuple(reader.token_ids) != script.target for reader in readers):
        raise LoadTestError("the engine wrote another text than its script")
    begin, end = max(each.times[0] for each in readers), max(each.times[-1] for each in readers)
    accepted = rig.recorder.num_accepted - accepted
    return Sample(
        tokens_per_second=sum(t > begin for each in readers for t in each.times) / (end - begin),
        num_tokens=(num_new - 1) * streams,
        num_passes=(num_new - 1) * streams - accepted,
        num_drafts=rig.recorder.num_drafts - drafts,
        num_accepted=accepted,
    )


def summarize(name: str, streams: int, samples: list[Sample], off: list[Sample]) -> Row:
    """Summarizes the rounds of one text and number of streams."""
    last = samples[-1]
    return Row(
        text=name,
        streams=streams,
        off_tokens_per_second=median(s.tokens_per_second for s in off),
        on_tokens_per_second=median(s.tokens_per_second for s in samples),
        times_faster=median_ratio(
            (s.tokens_per_second for s in samples), (s.tokens_per_second for s in off)
        ),
        tokens_per_pass=last.num_tokens / last.num_passes,
        drafts=last.num_drafts,
        accepted_percent=100 * last.num_accepted / max(last.num_drafts, 1),
        new_tokens=last.num_tokens // streams + 1,
    )


def _finding(name: str, rows: list[Row]) -> str:
    gains = ", ".join(f"{row.times_faster:.2f} x with {row.streams}" for row in rows)
    repeats = name in ("copy", "extractive summary")
    target = "2 alone" if repeats else f"at least {_MIN_KEPT}"
    return f"{name}: {gains}; target: {target}"
