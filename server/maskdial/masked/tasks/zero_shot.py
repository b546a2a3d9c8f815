"""Zero-shot classification: labels chosen by the request, scored by an NLI or a choice model.

The text is the premise; each label, put into a sentence, is a hypothesis that it may entail (Yin et
al. 2019, "Benchmarking Zero-shot Text Classification"). Scores are those of transformers'
ZeroShotClassificationPipeline, with two deliberate differences: the contradiction label is found by
name where it has one, and ties are in the order of the labels.

A multiple-choice model (SWAG, RACE) reads the text with each label as its continuation or answer,
and has one logit for each such pair; the scores are a softmax of these.

A GLiNER2 model reads all labels before the text, as a task named `SCHEMA_TASK`; the scores are a
softmax of their logits, or the sigmoid of each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import Manifest, TaskName
from maskdial.bundle.texts import tokenizing_seconds
from maskdial.errors import ValidationError
from maskdial.masked.request import MaskedResult
from maskdial.masked.tasks.classify import LabelScore
from maskdial.masked.tasks.extract import Extracted, ExtractRequest
from maskdial.masked.tasks.extraction_schema import Choice, Schema
from maskdial.masked.tasks.logits import finite, sigmoid, softmax
from maskdial.masked.tasks.pairs import SECONDS_PER_PAIR, read_pairs
from maskdial.masked.tasks.task import (
    REFUSE,
    Reading,
    TaskModel,
    TaskRequest,
    Truncation,
    check_distinct,
)

HYPOTHESIS_TEMPLATE = "This example is {}."
SCHEMA_TASK = "classification"
_LABEL_ALONE = "{}"
_MAX_QUOTED = 64


@dataclass(frozen=True, slots=True)
class ZeroShotRequest(TaskRequest[list[list[LabelScore]]]):
    """Texts to score for each of the labels that the request brings.

    ``hypothesis_template``: None for `HYPOTHESIS_TEMPLATE`, or the label alone if the model is one
    for multiple choice.
    """

    task: ClassVar[str] = "zero-shot-classify"
    head: ClassVar[TaskName] = "classify"

    texts: Sequence[str]
    candidate_labels: Sequence[str]
    truncation: Truncation = REFUSE
    hypothesis_template: str | None = None
    multi_label: bool = False

    @classmethod
    def serves(cls, manifest: Manifest) -> bool:
        has_entailment = manifest.task == cls.head and manifest.entailment is not None
        return has_entailment or _chooses(manifest) or manifest.extraction is not None

    @property
    def num_texts(self) -> int:
        return len(self.texts)

    @property
    def num_inputs(self) -> int:
        return len(self.texts) * len(self.candidate_labels)

    def least_inputs(self, model: TaskModel) -> int:
        return self.num_texts if model.manifest.extraction is not None else self.num_inputs

    @property
    def read_seconds(self) -> float:
        return tokenizing_seconds(self.texts) + self.num_inputs * SECONDS_PER_PAIR

    def check(self, model: TaskModel) -> None:
        check_distinct(self.candidate_labels)
        if model.manifest.extraction is not None:
            self._check_schema(model)
        elif self.num_inputs > model.max_queue:
            raise ValidationError(
                f"{len(self.texts)} texts with {len(self.candidate_labels)} labels each are "
                f"{self.num_inputs:,} pairs; one request may make at most {model.max_queue:,} "
                "(--max-queue)",
                field="texts",
            )
        if self.multi_label and _chooses(model.manifest):
            raise ValidationError(
                f"model {model.name!r} chooses one of the labels and cannot score them "
                "independently; leave it out",
                field="multi_label",
            )

    def _check_schema(self, model: TaskModel) -> None:
        if self.hypothesis_template is not None:
            raise ValidationError(
                f"model {model.name!r} reads the labels as they are; leave it out",
                field="hypothesis_template",
            )

    def read(self, model: TaskModel) -> Reading[list[list[LabelScore]]]:
        if model.manifest.extraction is not None:
            return self._read_schema(model)
        labels = self.candidate_labels
        default = _LABEL_ALONE if _chooses(model.manifest) else HYPOTHESIS_TEMPLATE
        inputs, num_truncated = read_pairs(
            model,
            self.texts,
            hypotheses(labels, self.hypothesis_template or default),
            self.truncation,
            strategy="only_first",
            error=self._pair_error,
        )

        def answer(results: Sequence[MaskedResult]) -> list[list[LabelScore]]:
            logits = np.stack([result.logits for result in results])
            return [
                self._scores(rows, model.manifest)
                for rows in logits.reshape(len(self.texts), len(labels), -1)
            ]

        return Reading(inputs, answer, num_truncated)

    def _read_schema(self, model: TaskModel) -> Reading[list[list[LabelScore]]]:
        choice = Choice(SCHEMA_TASK, tuple(self.candidate_labels), multi_label=self.multi_label)
        request = ExtractRequest(self.texts, Schema(choices=(choice,)), truncation=self.truncation)
        try:
            reading = request.read(model)
        except ValidationError as error:
            field = "candidate_labels" if error.field == "schema" else error.field
            raise ValidationError(error.message, field=field, index=error.index) from error

        def labels(found: list[Extracted]) -> list[list[LabelScore]]:
            return [sorted(each.scores[SCHEMA_TASK], key=lambda one: -one.score) for each in found]

        return reading.map(labels)

    def _scores(self, rows: NDArray[np.float32], manifest: Manifest) -> list[LabelScore]:
        """A text's labels with their scores, from the logits of its pairs."""
        if _chooses(manifest):
            return choose(rows[:, 0], self.candidate_labels)
        entailment = manifest.entailment
        assert entailment is not None, "a model without it does not serve this task"
        return zero_shot(
            rows,
            self.candidate_labels,
            entailment=entailment,
            contradiction=contradiction(manifest.labels, entailment),
            multi_label=self.multi_label,
        )

    def _pair_error(self, text: int, label: int, reason: str) -> ValidationError:
        quoted = self.candidate_labels[label]
        quoted = quoted if len(quoted) <= _MAX_QUOTED else quoted[:_MAX_QUOTED] + "..."
        return ValidationError(
            f"the text and the hypothesis of {quoted!r} {reason}", field="texts", index=text
        )


def _chooses(manifest: Manifest) -> bool:
    """Whether a model has one logit for each pair of a text and a choice."""
    return manifest.task == "multiple-choice"


def hypotheses(candidate_labels: Sequence[str], template: str) -> list[str]:
    """A sentence for each label: the template with the label in place of every ``{}``."""
    return [template.replace("{}", label) for label in candidate_labels]


def contradiction(labels: Sequence[str], entailment: int) -> int:
    """The index of a model's contradiction label.

    Without a label of that name: the first one, or the last if the first is ``entailment``.
    """
    named = (i for i, label in enumerate(labels) if label.lower().startswith("contrad"))
    return next(named, len(labels) - 1 if entailment == 0 else 0)


def zero_shot(
    logits: NDArray[np.float32],
    candidate_labels: Sequence[str],
    *,
    entailment: int,
    contradiction: int,
    multi_label: bool,
) -> list[LabelScore]:
    """The labels of a text with their scores, best first; ties in the order of the labels.

    Scores are a softmax of the entailment logits over the candidates; with ``multi_label``, or a
    single candidate, a softmax of entailment against contradiction for each.

    Args:
        logits: (num_candidates, num_labels) float32, a row for each candidate's hypothesis.
        candidate_labels: the label of each row.
        entailment: the column of entailment.
        contradiction: the column of contradiction.
        multi_label: whether several candidates may be true.

    Raises:
        InferenceError: a logit is not a finite number.
    """
    values = finite(logits)
    entailed = values[:, entailment]
    if multi_label or len(candidate_labels) == 1:
        scores = sigmoid(entailed - values[:, contradiction])
    else:
        scores = softmax(entailed)
    return _ranked(candidate_labels, scores)


def choose(logits: NDArray[np.float32], choices: Sequence[str]) -> list[LabelScore]:
    """A text's choices with a softmax of their logits (num_choices,), best first.

    Raises:
        InferenceError: a logit is not a finite number.
    """
    return _ranked(choices, softmax(finite(logits)))


def _ranked(labels: Sequence[str], scores: NDArray[np.float64]) -> list[LabelScore]:
    """Best first; ties in the order of the labels."""
    pairs = zip(labels, scores.tolist(), strict=True)
    return sorted((LabelScore(*pair) for pair in pairs), key=lambda each: -each.score)
