"""Two ways to write on from the same prompts, and where their texts part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loadtests.engine.section import Section

NUM_TOP = 10
"""Tokens of which the engine says how likely they are."""

_NUM_MEASURED = 100

_SAME, _TIE, _OTHER = "same", "near tie", "other"
_RULE = (
    "texts part at a near tie if, in the finer precision, the two tokens are no further apart than "
    "twice as far as torch's own rounding moves one of the 100 likeliest tokens there; what the "
    "engine computes has no part in that"
)

Top = Sequence[tuple[int, float]]


class Reference(Protocol):
    """What `loadtests.agreement.reference` has."""

    def write(self, prompt: Sequence[int], num_tokens: int) -> list[int]: ...
    def logprobs(self, text: Sequence[int]) -> NDArray[np.float64]: ...
    def finer_logprobs(self, text: Sequence[int]) -> NDArray[np.float64]: ...


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt's tokens, and those that the engine wrote on with."""

    prompt: list[int]
    written: list[int]


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt.

    Attributes:
        number: the prompt's, from 1.
        same_tokens: new ones before the first that differs; all of them where none does.
        engine: the first token that differs, by the engine.
        torch: the same by torch.
        gap: how much likelier torch finds its own token than the engine's, as a difference of
            log-probabilities.
        finer_gap: the same in the finer precision; negative where that finds the engine's likelier.
        rounding: how far torch's own rounding moves a log-probability there, at most.
        engine_off: how far the engine's log-probabilities are there from those in the finer
            precision, at most; None where the engine writes another text a second time.
        verdict: "same", "near tie" or "other".
    """

    number: int
    same_tokens: int
    engine: str = ""
    torch: str = ""
    gap: float | None = None
    finer_gap: float | None = None
    rounding: float | None = None
    engine_off: float | None = None
    verdict: str = _SAME


def compare(
    texts: Sequence[Text],
    reference: Reference,
    top: Callable[[Text, int], Top],
    decode: Callable[[int], str],
) -> list[Row]:
    """Lets the reference write on from the same prompts; a row for each.

    ``top`` has the engine's likeliest tokens after so many of those it wrote, and none where it
    cannot tell; ``decode`` shows a token.
    """
    rows = []
    for number, text in enumerate(texts, 1):
        expected = reference.write(text.prompt, len(text.written))
        pairs = list(zip(text.written, expected, strict=True))
        step = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if step is None:
            rows.append(Row(number, len(pairs)))
            continue
        ours, theirs = pairs[step]
        prefix = [*text.prompt, *text.written[:step]]
        rounded, exact = reference.logprobs(prefix), reference.finer_logprobs(prefix)
        best = np.argsort(-exact)[:_NUM_MEASURED]
        rounding = float(np.abs(rounded - exact)[best].max())
        gap = float(exact[theirs] - exact[ours])
        row = Row(
            number,
            step,
            engine=decode(ours),
            torch=decode(theirs),
            gap=float(rounded[theirs] - rounded[ours]),
            finer_gap=gap,
            rounding=rounding,
            engine_off=max(
                (abs(logprob - exact[i]) for i, logprob in top(text, step)), default=None
            ),
            verdict=_TIE if abs(gap) <= 2 * rounding else _OTHER,
        )
        rows.append(row)
    return rows


def section_of(rows: Sequence[Row], num_tokens: int) -> Section:
    """The report."""
    same = [row for row in rows if row.verdict == _SAME]
    ties = [row for row in rows if row.verdict == _TIE]
    findings = [
        f"{len(same)} of {len(rows)} texts have the same {num_tokens} tokens, {len(ties)} part at "
        f"a near tie and {len(rows) - len(same) - len(ties)} elsewhere",
        f"{sum(row.same_tokens for row in rows):,} tokens are the same before the texts part",
    ]
    question = "greedy texts of the engine and of torch"
    return Section("agreement", question, 1, tuple(rows), tuple(findings), (_RULE,))


def agree(rows: Sequence[Row]) -> bool:
    """Whether no text parts at more than a near tie."""
    return all(row.verdict != _OTHER for row in rows)
