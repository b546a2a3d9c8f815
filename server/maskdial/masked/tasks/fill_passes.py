"""The passes of a masked model that fill the masks of texts."""

from collections.abc import Sequence

from maskdial.masked.request import MaskedInput
from maskdial.masked.tasks.passes import Passes
from maskdial.unmasking.canvas import Canvas, Draft
from maskdial.unmasking.unmasker import Unmasker

MAX_WAVE = 32
"""Texts of one request in a pass, each with a row of logits for each mask."""


def fill(unmasker: Unmasker, canvases: Sequence[Canvas]) -> Passes[None]:
    """Fills the masks of all texts, which then have their drafts, best first."""
    while unfinished := [canvas for canvas in canvases if not canvas.done]:
        yield from step(unmasker, unfinished)


def step(unmasker: Unmasker, canvases: Sequence[Canvas]) -> Passes[None]:
    """One pass over texts that are not done, or several if they are many."""
    grown: dict[int, list[Draft]] = {id(canvas): [] for canvas in canvases}
    work = [(canvas, draft) for canvas in canvases for draft in canvas.drafts]
    for first in range(0, len(work), MAX_WAVE):
        wave = work[first : first + MAX_WAVE]
        rows = [unmasker.positions(canvas, draft) for canvas, draft in wave]
        results = yield [
            MaskedInput(draft.input_ids, positions, canvas.token_type_ids)
            for (canvas, draft), positions in zip(wave, rows, strict=True)
        ]
        for (canvas, draft), positions, result in zip(wave, rows, results, strict=True):
            grown[id(canvas)] += unmasker.grow(canvas, draft, positions, result.logits)
    for canvas in canvases:
        unmasker.advance(canvas, grown[id(canvas)])
