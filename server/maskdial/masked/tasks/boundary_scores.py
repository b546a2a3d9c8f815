"""The scores of what a schema names in a text, by a model that pairs boundaries (GLiNER2.5).

Columns are those of `maskdial.bundle.manifest.Extraction`; the result is the table of
`maskdial.masked.tasks.extraction_scores`. Each field's spans are those of the highest total score
that do not overlap, as in gliner2.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskdial.errors import ValidationError
from maskdial.masked.tasks.entity_spans import check_finite, span_probabilities
from maskdial.masked.tasks.extraction_prompt import PromptTask
from maskdial.masked.tasks.extraction_scores import (
    Floats,
    findings_table,
    join_tables,
    label_logits,
)
from maskdial.masked.tasks.task import PairedSpans

_LABEL, _ABSENT, _HIDDEN = 0, 1, 2  # columns; hidden states are the last ones
_NONE = np.zeros((0, 2), np.int64)


@dataclass(frozen=True, slots=True)
class BoundaryScorer:
    """From a text's rows to a table of what reaches the thresholds, and of all labels' logits.

    The rows are those of a prompt's markers, of the words before the text, and of its own words.

    Attributes:
        tasks: of the prompt.
        thresholds: for each task, those of its names.
        num_markers: rows of markers.
        num_before: rows of words before the text.
        spans: the model's.
        flat: whether spans of one field may not overlap.
    """

    tasks: Sequence[PromptTask]
    thresholds: Sequence[Sequence[float]]
    num_markers: int
    num_before: int
    spans: PairedSpans
    flat: bool

    def __call__(self, rows: Floats) -> Floats:
        """The table, float32 (num_findings, `NUM_COLUMNS`).

        Raises:
            InferenceError: a number is not finite.
            ValidationError: a field has more choices than the model scores.
        """
        check_finite(rows)
        markers = rows[: self.num_markers]
        words = np.ascontiguousarray(rows[self.num_markers :, _HIDDEN:])
        asked = [
            (number, name, task.rows.start + name)
            for number, task in enumerate(self.tasks)
            for name in range(len(task.names))
            if task.kind != "choice"
        ]
        parts = [
            label_logits(number, markers[task.rows, _LABEL])
            for number, task in enumerate(self.tasks)
            if task.kind == "choice"
        ]
        if asked and len(words):
            places = [place for _, _, place in asked]
            fields = np.ascontiguousarray(markers[places, _HIDDEN:])
            spans = self.spans(words, fields, _NONE)
            check_finite(spans)
            for (number, name, place), found, field in zip(asked, spans, fields, strict=True):
                task = self.tasks[number]
                if task.choices[name]:
                    parts.append(self._chosen(number, name, words, field))
                elif task.kind != "entities" or markers[place, _ABSENT] <= 0:
                    parts.append(self._found(number, name, found))
        return join_tables(parts)

    def _chosen(self, task: int, name: int, words: Floats, field: Floats) -> Floats:
        """The choices of a field, each by its word before the text; as in gliner2, the field is
        read without the others."""
        places = np.array(self.tasks[task].choices[name])
        forced = np.stack([places, places + 1], axis=1)
        (found,) = self.spans(words, field[None], forced)
        is_choice = (found[:, None, :2] == forced).all(axis=2)  # (num_candidates, num_choices)
        if not is_choice.any(axis=0).all():
            raise ValidationError(
                f"a field has {len(places)} choices, more than the model scores at once; leave "
                "some out",
                field="schema",
            )
        scores = span_probabilities(found[is_choice.argmax(axis=0), 2])
        kept = np.flatnonzero(scores >= np.float32(self.thresholds[task][name]))
        return findings_table(task, 0, name, kept, kept, scores[kept])

    def _found(self, task: int, name: int, spans: Floats) -> Floats:
        """What a field has of ``spans`` (num_candidates, 3)."""
        starts, ends = spans[:, :2].astype(np.int64).T
        scores = span_probabilities(spans[:, 2])
        kept = np.flatnonzero((ends > starts) & (scores >= np.float32(self.thresholds[task][name])))
        if self.flat:
            kept = kept[disjoint(starts[kept], ends[kept], scores[kept])]
        kept = kept[starts[kept] >= self.num_before]
        first, last = starts[kept] - self.num_before, ends[kept] - self.num_before - 1
        return findings_table(task, 0, name, first, last, scores[kept])


def disjoint(
    starts: NDArray[np.int64], ends: NDArray[np.int64], scores: NDArray[np.float64]
) -> list[int]:
    """The indices of spans [start, end), int64 (num_spans,) each, that do not overlap and have the
    highest total score, in order.

    Of equal totals the one of more spans counts, then the one whose best spans have higher scores,
    and then those that begin earlier.
    """
    order = np.lexsort((starts, ends)).tolist()
    spans = list(zip(starts.tolist(), ends.tolist(), scores.tolist(), strict=True))
    closed = [spans[index][1] for index in order]
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for number, index in enumerate(order):
        start, _, score = spans[index]
        total, chosen = best[bisect_right(closed, start, 0, number)]
        taken, left = (total + score, (*chosen, index)), best[-1]
        if taken[0] == left[0]:
            best.append(max(taken, left, key=lambda each: (len(each[1]), _ranks(spans, each[1]))))
        else:
            best.append(max(taken, left, key=lambda each: each[0]))
    return sorted(best[-1][1])


def _ranks(
    spans: Sequence[tuple[int, int, float]], chosen: Sequence[int]
) -> list[tuple[float, int, int]]:
    """Of a choice, to compare it with another: the greater one is the better one."""
    return sorted(((spans[at][2], -spans[at][0], -spans[at][1]) for at in chosen), reverse=True)
