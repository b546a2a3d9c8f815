"""Zero-shot classification: labels chosen by whoever asks, scored by a model of inference (NLI).

The text is a premise, and each label, put into a sentence, a hypothesis that may follow from it
(Yin et al. 2019, "Benchmarking Zero-shot Text Classification"). Scores are those of transformers'
ZeroShotClassificationPipeline, with two differences on purpose: the label of contradiction is found
by its name where it has one, and equal scores come in the order of the labels.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from maskdial.errors import InferenceError
from maskdial.masked.tasks.classify import LabelScore

HYPOTHESIS_TEMPLATE = "This example is {}."


def hypotheses(candidate_labels: Sequence[str], template: str | None = None) -> list[str]:
    """A sentence for each label: the template with the label for every ``{}``."""
    return [(template or HYPOTHESIS_TEMPLATE).replace("{}", label) for label in candidate_labels]


def contradiction(labels: Sequence[str], entailment: int) -> int:
    """The index of a model's label that says that one text contradicts another.

    Without a label of that name it is the first, or the last if the first is ``entailment``.
    """
    named = (i for i, label in enumerate(labels) if label.lower().startswith("contrad"))
    return next(named, len(labels) - 1 if entailment == 0 else 0)


def zero_shot(
    logits: NDArray[np.float32],
    candidate_labels: Sequence[str],
    *,
    entailment: int,
    contradiction: int,
    multi_label: bool = False,
) -> list[LabelScore]:
    """The labels of a text with their scores, best first; equal ones in their order.

    The score is a softmax of entailment over the candidates; for ``multi_label``, or a candidate
    alone, one of entailment against contradiction for each.

    Args:
        logits: (num_candidates, num_labels) float32, a row for each candidate's hypothesis.
        candidate_labels: what each row is about.
        entailment: the column of entailment.
        contradiction: the column of contradiction.
        multi_label: whether several candidates may be true.

    Raises:
        InferenceError: the logits are not numbers.
    """
    values = logits.astype(np.float64)
    if not np.isfinite(values).all():
        raise InferenceError("the model's logits are not finite numbers for this text")
    entailed = values[:, entailment]
    if multi_label or len(candidate_labels) == 1:
        scores = np.exp(-np.logaddexp(0.0, values[:, contradiction] - entailed))
    else:
        exponents = np.exp(entailed - entailed.max())
        scores = exponents / exponents.sum()
    pairs = zip(candidate_labels, scores.tolist(), strict=True)
    return sorted((LabelScore(*pair) for pair in pairs), key=lambda each: -each.score)
