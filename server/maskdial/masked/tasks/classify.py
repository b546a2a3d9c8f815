"""Classification: a text's labels and their scores, as in transformers' TextClassificationPipeline.

Ties are in the order of the labels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import Calibration, Manifest, ProblemType, TaskName
from maskdial.bundle.texts import check_characters, check_media, tokenizing_seconds
from maskdial.errors import ValidationError, about
from maskdial.masked.request import MaskedInput, MaskedResult
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
class WindowScore(LabelScore):
    """A label's largest score in the windows of a text, and which part of the text that window is:
    its first character and the one behind it.
    """

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ClassifyRequest(TaskRequest[list[list[LabelScore]]]):
    """Texts, or pairs of texts, to score for each label of a classifier.

    ``in_windows``: whether texts are read in as many windows as they need, which share a quarter of
    their tokens; each label then has its largest score, a `WindowScore`.
    """

    task: ClassVar[str] = "classify"
    head: ClassVar[TaskName] = "classify"

    texts: Sequence[TextOrPair]
    truncation: Truncation = REFUSE
    function_to_apply: ScoreFunction | None = None
    top_k: int | None = None
    in_windows: bool = False

    @property
    def num_texts(self) -> int:
        return len(self.texts)

    @property
    def read_seconds(self) -> float:
        return tokenizing_seconds([text for pair in self.texts for text in pair if text])

    def check(self, model: TaskModel) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ValidationError(f"must be at least 1, not {self.top_k}", field="top_k")
        if self.in_windows and any(pair is not None for _, pair in self.texts):
            raise ValidationError("pairs of texts are not read in windows", field="windows")

    def read(self, model: TaskModel) -> Reading[list[list[LabelScore]]]:
        if self.in_windows:
            return self._read_windows(model)
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
                    calibration=manifest.calibration,
                )
                for result in results
            ]

        return Reading([masked_input(each) for each in encodings], answer, num_truncated)

    def _read_windows(self, model: TaskModel) -> Reading[list[list[LabelScore]]]:
        plans = [_windows(text, index, model) for index, (text, _) in enumerate(self.texts)]
        num_windows = sum(map(len, plans))
        if num_windows > model.max_queue:
            raise ValidationError(
                f"{len(plans)} texts are {num_windows:,} windows; one request may make at most "
                f"{model.max_queue:,} (--max-queue)",
                field="texts",
            )

        def answer(results: Sequence[MaskedResult]) -> list[list[LabelScore]]:
            left = iter(results)
            return [self._strongest(model.manifest, plan, left) for plan in plans]

        return Reading([each for plan in plans for _, each in plan], answer)

    def _strongest(
        self,
        manifest: Manifest,
        plan: Sequence[tuple[tuple[int, int], MaskedInput]],
        results: Iterator[MaskedResult],
    ) -> list[LabelScore]:
        """Each label's largest score in a text's windows; of equal ones, that of the first."""
        best: dict[str, WindowScore] = {}
        for (start, end), _ in plan:
            for each in classify(
                next(results).logits,
                manifest.labels,
                manifest.problem_type,
                function_to_apply=self.function_to_apply,
                calibration=manifest.calibration,
            ):
                if each.label not in best or each.score > best[each.label].score:
                    best[each.label] = WindowScore(each.label, each.score, start, end)
        in_order: list[LabelScore] = [best[label] for label in manifest.labels]
        return sorted(in_order, key=lambda each: -each.score)[: self.top_k]


def _windows(text: str, index: int, model: TaskModel) -> list[tuple[tuple[int, int], MaskedInput]]:
    """The windows of a text: where each is, and its input."""
    tokenizer, max_length = model.tokenizer, model.manifest.max_length
    room = max_length - tokenizer.num_special_tokens(pair=False)
    with about("texts", index):
        check_characters(text, room * model.max_queue, model)
        stride = room // 4
        windows = tokenizer.windows(text, max_length=max_length, stride=stride)
        for each in windows:
            check_media(each.ids, model)
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    plan = []
    for number, window in enumerate(windows):
        first = number * (room - stride)
        last = min(first + room, len(offsets))
        start = 0 if number == 0 else offsets[first][0]
        end = len(text) if last == len(offsets) else offsets[last - 1][1]
        plan.append(((start, end), masked_input(window)))
    return plan


def classify(
    logits: NDArray[np.float32],
    labels: Sequence[str],
    problem_type: ProblemType | None = None,
    *,
    function_to_apply: ScoreFunction | None = None,
    top_k: int | None = None,
    calibration: Calibration | None = None,
) -> list[LabelScore]:
    """A text's labels with their scores, best first.

    Args:
        logits: (num_labels,) float32.
        labels: the name of each logit.
        problem_type: chooses the default function: none for regression, sigmoid for several
            independent labels or a single one, softmax otherwise.
        function_to_apply: overrides that default.
        top_k: number of labels to return; None, or more than there are: all.
        calibration: has the temperature of the scores, and what they mean.

    Raises:
        InferenceError: a logit is not a finite number.
    """
    values = finite(logits)
    function = function_to_apply or default_function(problem_type, len(labels))
    if calibration is not None and function != "none":
        values = values / calibration.temperature
    if function == "softmax":
        values = softmax(values)
    elif function == "sigmoid":
        values = sigmoid(values)
    if calibration is not None and calibration.isotonic and function != "none":
        values = calibrated(values, labels, calibration, exclusive=function == "softmax")
    pairs = zip(labels, values.tolist(), strict=True)
    ranked = sorted((LabelScore(*pair) for pair in pairs), key=lambda each: -each.score)
    return ranked[:top_k]


def calibrated(
    scores: NDArray[Any], labels: Sequence[str], calibration: Calibration, *, exclusive: bool
) -> NDArray[np.float64]:
    """What scores mean by the isotonic tables of their labels.

    Args:
        scores: (..., num_labels), from 0 to 1.
        labels: the name of each.
        calibration: has a table for each.
        exclusive: whether one label excludes the others; the results then sum to one, and are equal
            where every table says zero.
    """
    read = np.empty(scores.shape)
    for i, label in enumerate(labels):
        at, meaning = zip(*calibration.isotonic[label], strict=True)
        read[..., i] = np.interp(scores[..., i], at, meaning)
    if not exclusive:
        return read
    total = read.sum(axis=-1, keepdims=True)
    return np.where(total > 0, read / np.where(total > 0, total, 1.0), 1.0 / len(labels))


def default_function(problem_type: ProblemType | None, num_labels: int) -> ScoreFunction:
    """What makes scores of a classifier's logits unless a request says otherwise."""
    if problem_type == "regression":
        return "none"
    if problem_type == "multi_label_classification" or num_labels == 1:
        return "sigmoid"
    return "softmax"
