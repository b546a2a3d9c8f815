"""The scores of what a schema names in a text: from a model's columns to a table of findings.

Columns are those of `maskdial.bundle.manifest.Extraction`. A task's fields occur as often as its
marker's counts say; each occurrence has queries of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import Extraction
from maskdial.errors import ValidationError
from maskdial.masked.tasks.entity_spans import (
    MAX_CANDIDATES,
    check_finite,
    span_probabilities,
    span_scores,
)
from maskdial.masked.tasks.extraction_prompt import PromptTask
from maskdial.masked.tasks.task import Queries

Floats = NDArray[np.float32]
NUM_COLUMNS = 6


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found for the tasks of a prompt; arrays are (num_findings,).

    ``task`` and ``name`` are places in the prompt, ``step`` is the occurrence. A span has
    ``start`` and ``end``, its first and last word; a choice of a field only ``start``, the place of
    the choice. ``score`` is a probability, or the logit of a label.
    """

    task: NDArray[np.int64]
    step: NDArray[np.int64]
    name: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    score: NDArray[np.float64]

    @classmethod
    def of(cls, table: Floats) -> "Findings":
        """Those of a table (num_findings, `NUM_COLUMNS`)."""
        task, step, name, start, end = table[:, :-1].astype(np.int64).T
        return cls(task, step, name, start, end, table[:, -1].astype(np.float64))


@dataclass(frozen=True, slots=True)
class Scorer:
    """From a text's rows to a table of what reaches the thresholds, and of all labels' logits.

    The rows are those of a prompt's markers, of the words before the text, and of its own words.

    Attributes:
        tasks: of the prompt.
        thresholds: for each task, those of its names.
        num_markers: rows of markers.
        num_before: rows of words before the text.
        extraction: the model's.
        queries: the model's.
    """

    tasks: Sequence[PromptTask]
    thresholds: Sequence[Sequence[float]]
    num_markers: int
    num_before: int
    extraction: Extraction
    queries: Queries

    def __call__(self, rows: Floats) -> Floats:
        """The table, float32 (num_findings, `NUM_COLUMNS`).

        Raises:
            InferenceError: a number is not finite.
            ValidationError: there are too many findings.
        """
        check_finite(rows)
        width = 8 * self.extraction.hidden_size
        markers, words = rows[: self.num_markers], rows[self.num_markers :, :width]
        parts: list[Floats] = []
        for number, (task, thresholds) in enumerate(zip(self.tasks, self.thresholds, strict=True)):
            if task.kind == "choice":
                parts.append(label_logits(number, markers[task.rows, width]))
                continue
            count = self._count(markers[task.row])
            if count == 0 or not len(words):
                continue
            steps = 1 if task.kind == "entities" else count
            hidden = np.ascontiguousarray(
                markers[task.rows, width + 1 + self.extraction.max_count :]
            )
            for step, labels in enumerate(self.queries(hidden, steps)):
                logits = span_scores(words, labels, self.extraction.max_width)
                scores = span_probabilities(logits)
                # A field with choices has no spans
                least = np.where([bool(each) for each in task.choices], np.inf, thresholds)
                parts += self._spans(number, step, scores, least)
                parts += self._choices(number, step, scores, task, thresholds)
            if sum(map(len, parts)) > MAX_CANDIDATES:
                raise ValidationError(
                    f"leaves more than {MAX_CANDIDATES:,} spans of a text to choose from; raise it",
                    field="threshold",
                )
        return join_tables(parts)

    def _count(self, marker: Floats) -> int:
        first = 8 * self.extraction.hidden_size + 1
        return int(marker[first : first + self.extraction.max_count].argmax())

    def _spans(
        self,
        task: int,
        step: int,
        scores: NDArray[np.float64],
        thresholds: NDArray[np.float64],
    ) -> list[Floats]:
        """The spans of the text's words, by field, first and last word."""
        own = scores[self.num_before :]  # (num_words, max_width, num_fields)
        name, start, more = np.nonzero((own >= thresholds.astype(np.float32)).transpose(2, 0, 1))
        within = start + more < len(own)
        name, start, more = name[within], start[within], more[within]
        best = own[start, more, name]
        return [findings_table(task, step, name, start, start + more, best)]

    def _choices(
        self,
        task: int,
        step: int,
        scores: NDArray[np.float64],
        prompt: PromptTask,
        thresholds: Sequence[float],
    ) -> list[Floats]:
        """The choices of fields that have some."""
        found = []
        for name, places in enumerate(prompt.choices):
            own = scores[list(places), 0, name]
            kept = np.flatnonzero(own >= np.float32(thresholds[name]))
            found.append(findings_table(task, step, name, kept, kept, own[kept]))
        return found


def label_logits(task: int, logits: Floats) -> Floats:
    """The table of a task's labels."""
    return findings_table(task, 0, np.arange(len(logits)), 0, 0, logits)


def findings_table(
    task: int,
    step: int,
    name: NDArray[np.int64] | int,
    start: NDArray[np.int64] | int,
    end: NDArray[np.int64] | int,
    score: NDArray[np.floating],
) -> Floats:
    """The columns of `Findings` as a table (num_findings, `NUM_COLUMNS`)."""
    table = np.empty((len(score), NUM_COLUMNS), np.float32)
    for place, column in enumerate((task, step, name, start, end, score)):
        table[:, place] = column
    return table


def join_tables(tables: Sequence[Floats]) -> Floats:
    """All of them, or none, below each other."""
    return np.concatenate([np.zeros((0, NUM_COLUMNS), np.float32), *tables])
