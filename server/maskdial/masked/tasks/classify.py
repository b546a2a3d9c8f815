"""Classification: a text's labels and their scores, as in transformers' TextClassificationPipeline.

Ties are in the order of the labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import ProblemType, TaskName
from maskdial.bundle.texts import tokenizing_seconds
from maskdial.errors import ValidationError
from maskdial.masked.request import MaskedResult
from maskdial.masked.tasks.logits import finite, sigmoid, softmax
from maskdial.masked.tasks.task import (
    REFUSE,
    Reading,
    TaskModel,
    TaskRequest,
    TextOrPair,
    Truncation,
    masked_input,
    read_texts,
)

ScoreFunction = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True, slots=True)
class LabelScore:
    """A label and its score: a probability, or the raw logit where no function is applied."""

    label: str
    score: float


@dataclass(frozen=True, slots=True)
class ClassifyRequest(TaskRequest[list[list[LabelScore]]]):
    """Texts, or pairs of texts, to score for each label of a classifier."""

    task: ClassVar[str] = "classify"
    head: ClassVar[TaskName] = "classify"

    texts: Sequence[TextOrPair]
    truncation: Truncation = REFUSE
    function_to_apply: ScoreFunction | None = None
    top_k: int | None = None

    @property
    def num_texts(self) -> int:
        return len(self.texts)

    @property
    def read_seconds(self) -> float:
        return tokenizing_seconds([text for pair in self.texts for text in pair if text])

    def check(self, model: TaskModel) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ValidationError(f"must be at least 1, not {self.top_k}", field="top_k")

    def read(self, model: TaskModel) -> Reading[list[list[LabelScore]]]:
        encodings, num_truncated = read_texts(model, self.texts, self.truncation)
        manifest = model.manifest

        def answer(results: Sequence[MaskedResult]) -> list[list[LabelScore]]:
            return [
                classify(
                    result.logits,
                    manifest.labels,
                    manifest.problem_type,
                    function_to_apply=self.function_to_apply,
                    top_k=self.top_k,
                )
                for result in results
            ]

        return Reading([masked_input(each) for each in encodings], answer, num_truncated)


def classify(
    logits: NDArray[np.float32],
    labels: Sequence[str],
    problem_type: ProblemType | None = None,
    *,
    function_to_apply: ScoreFunction | None = None,
    top_k: int | None = None,
) -> list[LabelScore]:
    """A text's labels with their scores, best first.

    Args:
        logits: (num_labels,) float32.
        labels: the name of each logit.
        problem_type: chooses the default function: none for regression, sigmoid for several
            independent labels or a single one, softmax otherwise.
        function_to_apply: overrides that default.
        top_k: number of labels to return; None, or more than there are: all.

    Raises:
        InferenceError: a logit is not a finite number.
    """
    values = finite(logits)
    function = function_to_apply or _default_function(problem_type, len(labels))
    if function == "softmax":
        values = softmax(values)
    elif function == "sigmoid":
        values = sigmoid(values)
    pairs = zip(labels, values.tolist(), strict=True)
    ranked = sorted((LabelScore(*pair) for pair in pairs), key=lambda each: -each.score)
    return ranked[:top_k]


def _default_function(problem_type: ProblemType | None, num_labels: int) -> ScoreFunction:
    if problem_type == "regression":
        return "none"
    if problem_type == "multi_label_classification" or num_labels == 1:
        return "sigmoid"
    return "softmax"
