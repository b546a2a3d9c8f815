"""Scores: which tokens count, in which waves they are asked for, and what they add up to."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskdial.ask.score import TokenScore, summarize
from maskdial.errors import InferenceError
from maskdial.masked.request import MaskedInput
from maskdial.masked.tasks.pseudo_likelihood import (
    Masking,
    log_probability,
    maskings,
    scored_positions,
    waves,
)

CLS, SEP, MASK = 1, 2, 3


def test_only_the_texts_own_ordinary_tokens_are_scored() -> None:
    ids = [CLS, 10, MASK, 11, SEP, 12, SEP]
    added = [1, 0, 0, 0, 0, 0, 1]
    assert scored_positions(ids, added, {CLS, SEP, MASK}) == (1, 3, 5)
    assert scored_positions([CLS, SEP], [1, 1], {CLS, SEP}) == ()
    # An added token that is not special is none of the text's either
    assert scored_positions([7, 8], [1, 0], set()) == (1,)


def test_each_masking_hides_one_token_and_asks_for_it() -> None:
    whole = MaskedInput((CLS, 10, 11, SEP), token_type_ids=(0, 0, 1, 1))
    first, second = maskings(5, whole, (1, 2), MASK)
    assert first == Masking(5, 1, 10, MaskedInput((CLS, MASK, 11, SEP), (1,), (0, 0, 1, 1)))
    assert second.input.input_ids == (CLS, 10, MASK, SEP)
    assert second.input.rows == (2,)
    assert (second.position, second.target) == (2, 11)


def entry(text: int, length: int) -> Masking:
    return Masking(text, 0, 9, MaskedInput((9,) * length, (0,)))


def test_waves_are_as_large_as_a_pass() -> None:
    entries = [entry(i, length) for i, length in enumerate((4, 4, 4, 8, 8, 40, 1))]
    grouped = waves(entries, max_tokens=16, max_entries=3)
    assert [[each.text for each in wave] for wave in grouped] == [[0, 1, 2], [3, 4], [5], [6]]


@given(st.lists(st.integers(1, 20), max_size=30), st.integers(1, 50), st.integers(1, 6))
def test_waves_keep_every_entry_in_order_and_within_bounds(
    lengths: list[int], max_tokens: int, max_entries: int
) -> None:
    entries = [entry(index, length) for index, length in enumerate(lengths)]
    found = list(waves(iter(entries), max_tokens=max_tokens, max_entries=max_entries))
    assert [each for wave in found for each in wave] == entries
    for wave in found:
        longest = max(len(each.input.input_ids) for each in wave)
        assert 1 <= len(wave) <= max_entries
        assert longest * len(wave) <= max_tokens or len(wave) == 1
    # No wave could have taken the next one's first entry as well
    for wave, following in pairwise(found):
        grown = [*wave, following[0]]
        longest = max(len(each.input.input_ids) for each in grown)
        assert len(grown) > max_entries or longest * len(grown) > max_tokens


def test_log_probability_is_the_log_of_the_softmax() -> None:
    logits = np.array([0.5, -2.0, 3.0], np.float32)
    total = sum(math.exp(value) for value in (0.5, -2.0, 3.0))
    for token_id, value in enumerate((0.5, -2.0, 3.0)):
        assert log_probability(logits, token_id) == pytest.approx(value - math.log(total))
    large = np.array([1e4, 0.0], np.float32)
    assert log_probability(large, 0) == 0
    assert log_probability(large, 1) == -1e4


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(bad: float) -> None:
    with pytest.raises(InferenceError, match="not finite"):
        log_probability(np.array([0.0, bad], np.float32), 0)


def test_a_score_adds_up_what_is_scored() -> None:
    tokens = [TokenScore(1, "a", None), TokenScore(2, "b", -1.0), TokenScore(3, "c", -3.0)]
    score = summarize(tokens, "causal")
    assert score.tokens == tuple(tokens)
    assert score.log_likelihood == -4
    assert score.perplexity == pytest.approx(math.exp(2))
    assert score.method == "causal"


def test_a_text_without_scored_tokens_has_no_perplexity() -> None:
    score = summarize([TokenScore(1, "a", None)], "pseudo")
    assert score.log_likelihood == 0
    assert score.perplexity is None


def test_a_perplexity_beyond_all_numbers_is_infinite() -> None:
    score = summarize([TokenScore(1, "a", -1000.0)], "pseudo")
    assert score.perplexity == math.inf
