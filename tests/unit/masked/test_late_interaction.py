"""MaxSim: queries and documents compared token by token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskdial.errors import InferenceError
from maskdial.masked.tasks.late_interaction import max_sim


def random(seed: int, *lengths: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal((length, 24)).astype(np.float32) for length in lengths]


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 40), min_size=2, max_size=6))
def test_scores_are_sums_of_the_best_products(seed: int, lengths: list[int]) -> None:
    query, *documents = random(seed, *lengths)
    expected = [
        sum(max(float(token @ other) for other in document) for token in query)
        for document in documents
    ]
    scores = max_sim(query, documents)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)
    alone = [max_sim(query, [document])[0] for document in documents]
    np.testing.assert_array_equal(scores, alone)


def test_a_document_of_punctuation_has_no_vectors() -> None:
    query, document = random(0, 3, 4)
    nothing = np.zeros((0, 24), np.float32)
    scores = max_sim(query, [nothing, document])
    assert scores[0] == 0
    assert scores[1] != 0
    np.testing.assert_array_equal(max_sim(nothing, [document]), [0])


@pytest.mark.parametrize("bad", [0, 1])
def test_vectors_that_are_no_numbers_are_an_error(bad: int) -> None:
    both = random(0, 3, 4)
    both[bad][2, 5] = np.nan
    with pytest.raises(InferenceError):
        max_sim(both[0], both[1:])
