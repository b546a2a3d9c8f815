"""Classification: a text's labels and their scores, as transformers' TextClassificationPipeline.

Equal scores come in the order of the labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from maskdial.errors import InferenceError, ValidationError

ScoreFunction = Literal["softmax", "sigmoid", "none"]
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


@dataclass(frozen=True, slots=True)
class LabelScore:
    """A label and its score: a probability, or the logit itself when no function is applied."""

    label: str
    score: float


def classify(
    logits: NDArray[np.float32],
    labels: Sequence[str],
    problem_type: ProblemType | None = None,
    *,
    function_to_apply: ScoreFunction | None = None,
    top_k: int | None = None,
) -> list[LabelScore]:
    """A text's labels with their scores, best first; equal ones in the order of the labels.

    Args:
        logits: (num_labels,) float32.
        labels: the name of each logit.
        problem_type: chooses the default function: none for regression, sigmoid for several
            independent labels or a single one, softmax otherwise.
        function_to_apply: instead of that default.
        top_k: how many labels to return; all when None or more than there are.

    Raises:
        ValidationError: top_k is below 1.
        InferenceError: the logits are not numbers.
    """
    if top_k is not None and top_k < 1:
        raise ValidationError(f"`top_k` must be at least 1, not {top_k}")
    values = logits.astype(np.float64)
    if not np.isfinite(values).all():
        raise InferenceError("the model's logits are not finite numbers for this text")
    function = function_to_apply or _default_function(problem_type, len(labels))
    if function == "softmax":
        exponents = np.exp(values - values.max())
        values = exponents / exponents.sum()
    elif function == "sigmoid":
        values = np.exp(-np.logaddexp(0.0, -values))
    pairs = zip(labels, values.tolist(), strict=True)
    ranked = sorted((LabelScore(*pair) for pair in pairs), key=lambda each: -each.score)
    return ranked[:top_k]


def _default_function(problem_type: ProblemType | None, num_labels: int) -> ScoreFunction:
    if problem_type == "regression":
        return "none"
    if problem_type == "multi_label_classification" or num_labels == 1:
        return "sigmoid"
    return "softmax"
