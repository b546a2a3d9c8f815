"""Zero-shot classification and reranking, against the formulas in float64."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from maskdial.errors import InferenceError
from maskdial.masked.tasks.rerank import rerank
from maskdial.masked.tasks.zero_shot import (
    HYPOTHESIS_TEMPLATE,
    contradiction,
    hypotheses,
    zero_shot,
)

LOGITS = np.array([[0.5, 9.0, 1.0], [-1.0, 0.0, 3.0], [2.0, -4.0, 1.0]], np.float32)
LABELS = ["news", "sport", "art"]


def test_a_label_stands_for_every_gap_of_the_template() -> None:
    assert hypotheses(["art", "{0} {x}"], HYPOTHESIS_TEMPLATE) == [
        "This example is art.",
        "This example is {0} {x}.",
    ]
    assert hypotheses(["art"], "{}: {} {0}") == ["art: art {0}"]


@pytest.mark.parametrize(
    ("labels", "entailment", "expected"),
    [
        (["contradiction", "neutral", "entailment"], 2, 0),
        (["entailment", "neutral", "CONTRADICTION"], 0, 2),
        (["neutral", "contradictory", "entails"], 2, 1),
        (["entailment", "contradiction", "neutral"], 0, 1),
        (["entailment", "not_entailment"], 0, 1),
        (["no", "maybe", "entailment"], 2, 0),
    ],
)
def test_contradiction_is_found_by_name_or_place(
    labels: list[str], entailment: int, expected: int
) -> None:
    assert contradiction(labels, entailment) == expected


def test_one_label_is_true() -> None:
    result = zero_shot(LOGITS, LABELS, entailment=2, contradiction=0, multi_label=False)
    total = 2 * math.exp(1) + math.exp(3)
    assert [each.label for each in result] == ["sport", "news", "art"]
    expected = [math.exp(3) / total, math.exp(1) / total, math.exp(1) / total]
    assert [each.score for each in result] == pytest.approx(expected, abs=1e-12)


def test_several_labels_may_be_true() -> None:
    result = zero_shot(LOGITS, LABELS, entailment=2, contradiction=0, multi_label=True)
    assert [each.label for each in result] == ["sport", "news", "art"]
    expected = [1 / (1 + math.exp(difference)) for difference in (-4, -0.5, 1)]
    assert [each.score for each in result] == pytest.approx(expected, abs=1e-12)


def test_a_label_alone_is_held_against_contradiction() -> None:
    (alone,) = zero_shot(LOGITS[:1], LABELS[:1], entailment=2, contradiction=0, multi_label=False)
    assert alone.score == pytest.approx(1 / (1 + math.exp(-0.5)), abs=1e-12)


@given(arrays.arrays(np.float32, (4, 3), elements=st.floats(-1e4, 1e4, width=32)), st.booleans())
def test_scores_are_probabilities_in_order(logits: np.ndarray, multi_label: bool) -> None:
    labels = ["a", "b", "c", "d"]
    result = zero_shot(logits, labels, entailment=0, contradiction=2, multi_label=multi_label)
    scores = [each.score for each in result]
    assert sorted(each.label for each in result) == labels
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)
    assert multi_label or sum(scores) == pytest.approx(1)


@pytest.mark.parametrize("hole", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_an_error(hole: float) -> None:
    bad = np.array([[0, 1], [2, hole]], np.float32)
    with pytest.raises(InferenceError, match="finite"):
        zero_shot(bad, ["a", "b"], entailment=0, contradiction=1, multi_label=False)
    with pytest.raises(InferenceError, match="finite"):
        rerank([bad[0, :1], bad[1, 1:]], raw_scores=False)


def scalars(*values: float) -> list[np.ndarray]:
    return [np.array([value], np.float32) for value in values]


def test_texts_are_ranked_best_first() -> None:
    ranks = rerank(scalars(-1, 2, 0), raw_scores=False)
    assert [rank.index for rank in ranks] == [1, 2, 0]
    expected = [1 / (1 + math.exp(-x)) for x in (2, 0, -1)]
    assert [rank.score for rank in ranks] == pytest.approx(expected, abs=1e-12)
    assert [rank.score for rank in rerank(scalars(-1, 2, 0), raw_scores=True)] == [2, 0, -1]


def test_equal_texts_keep_their_order_and_saturated_ones_that_of_their_logits() -> None:
    assert [rank.index for rank in rerank(scalars(1, 3, 1, 3), raw_scores=False)] == [1, 3, 0, 2]
    ranks = rerank(scalars(-1e4, 100, 900, -2e4), raw_scores=False)
    assert [rank.index for rank in ranks] == [2, 1, 0, 3]
    assert [rank.score for rank in ranks] == [1, 1, 0, 0]
