"""What drafting gains, from the text itself (prompt lookup) and by a draft model."""

from collections.abc import Iterable, Sequence
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
from maskdial.runtime.logits import Logits, SummarizedLogits
from maskdial.runtime.piece import Piece

_QUESTION = "speed with and without drafts of 16 tokens, by the number of streams"
_DRAFTS = 16
_STREAMS = (1, 2, 4, 8, 16)
_SEVERAL = ("copy", "free text")
_DRAFTED = "free text"
_RIGHT = (0.9, 0.7, 0.0)
_MIN_KEPT = 0.98
_NEW_TOKENS = 72
_MIN_NEW_TOKENS = 16
_GREATEST = np.float32(1e4)


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
    ) -> Logits:
        logits = self._runner.prefill(slot, token_ids, start, num_logits)
        return self._direct(
            logits, range(start + len(token_ids) - num_logits, start + len(token_ids))
        )

    def prefill_together(self, slot: int, prompts: list[NDArray[np.int64]]) -> Logits:
        logits = self._runner.prefill_together(slot, prompts)
        return self._direct(logits, (len(prompt) - 1 for prompt in prompts))

    def decode(
        self, token_ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> Logits:
        return self._direct(self._runner.decode(token_ids, lengths, rows), lengths[rows].tolist())

    def _together(
        self,
        together: DecodeAndPrefill,
        token_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        rows: NDArray[np.int64],
        pieces: list[Piece],
    ) -> Logits:
        positions = lengths[rows].tolist()
        for piece in pieces:
            positions += [piece.start + row for row in piece.rows.tolist()]
        return self._direct(together(token_ids, lengths, rows, pieces), positions)

    def warm_up(self) -> None:
        self._runner.warm_up()

    def _direct(self, logits: Logits, positions: Iterable[int]) -> Logits:
        """Row i of the logits is for the token after the i-th position; changed in place."""
        summary = logits if isinstance(logits, SummarizedLogits) else None
        values = np.asarray(logits) if summary is None else summary.values
        for row, position in zip(range(len(values)), positions, strict=False):
            if position + 1 < len(self._script):
                token_id = self._script[position + 1]
                values[row, token_id] = _GREATEST
                if summary is not None:
                    summary.best[row], summary.max_logits[row] = token_id, _GREATEST
        return logits


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


async def measure(
    model: LoadedCausal,
    seconds: float,
    rng: np.random.Generator,
    *,
    draft: LoadedCausal | None = None,
) -> Section:
    """Writes each text with and without drafts in turn; the text is always the same.

    A draft model writes the text that repeats nothing, and is wrong at random places.

    Raises:
        LoadTestError: it cannot draft for the model.
    """
    if draft is not None and not (
        draft.packs
        and draft.vocab_size == model.vocab_size
        and draft.max_length >= model.max_length
    ):
        raise LoadTestError(
            "a draft model needs the kernels, the model's vocabulary and a context as long"
        )
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
    names = list(scripts)
    slots = max(_STREAMS)
    async with AsyncExitStack() as stack:
        variants = {}
        for max_drafts in (0, _DRAFTS):
            runner = ScriptedRunner(model.runner(slots))
            rig = await stack.enter_async_context(
                running(model, runner, slots=slots, max_drafts=max_drafts)
            )
            for name, streams in shown:
                variants[name, streams, max_drafts] = partial(
                    _write, rig, runner, scripts[name], streams
                )
        for right in _RIGHT if draft is not None else ():
            assert draft is not None
            runner, drafting = (
                ScriptedRunner(model.runner(slots)),
                ScriptedRunner(draft.runner(slots)),
            )
            rig = await stack.enter_async_context(
                running(model, runner, slots=slots, max_drafts=_DRAFTS, draft=drafting)
            )
            script = scripts[_DRAFTED]
            drafting.follow(_wrong_in_places((*script.prompt, *script.target), right, rng))
            names.append(f"{_DRAFTED}, draft model right at {right:.0%}")
            for streams in _STREAMS:
                variants[names[-1], streams, _DRAFTS] = partial(
                    _write, rig, runner, script, streams
                )
                shown.append((names[-1], streams))
        samples = await take_turns(variants, seconds)
    without = {each: each[0] if each[0] in scripts else _DRAFTED for each in shown}
    rows = tuple(
        summarize(*each, samples[(*each, _DRAFTS)], samples[(without[each], each[1], 0)])
        for each in shown
    )
    return Section(
        "speculation",
        _QUESTION,
        len(next(iter(samples.values()))),
        rows,
        tuple(_finding(name, [row for row in rows if row.text == name]) for name in names),
        ("the texts are scripted: the model's passes run, and their outcome is set",),
    )


def _wrong_in_places(token_ids: Sequence[int], right: float, rng: np.random.Generator) -> list[int]:
    """A text with another token in the place of some, which are drawn."""
    kept = rng.random(len(token_ids)) < right
    return [each if keeps else abs(each - 1) for each, keeps in zip(token_ids, kept, strict=True)]


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
    if name.endswith("70%"):
        target = "1.6 alone"
    return f"{name}: {gains}; target: {target}"
