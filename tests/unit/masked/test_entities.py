"""Which spans of words are entities, and what is put in their place."""

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, processors

from maskdial.bundle.manifest import SpecialTokens
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.errors import InferenceError, ValidationError
from maskdial.masked.tasks.entity_spans import (
    Candidates,
    choose,
    prompt_span_scores,
    span_candidates,
    token_candidates,
)
from maskdial.masked.tasks.redact import Cover, redact
from maskdial.masked.tasks.text_words import TextWords, WordWindow
from maskdial.masked.tasks.token_classify import Entity

SPANS = st.tuples(st.integers(0, 7), st.integers(0, 3), st.integers(0, 2), st.integers(1, 5))


def candidates(rows: list[tuple[int, int, int, int]]) -> Candidates:
    starts, more, labels, scores = np.array(rows, np.int64).reshape(-1, 4).T
    return Candidates(starts, starts + more, labels, scores / 8)


def overlaps(one: tuple[int, int], other: tuple[int, int], *, flat: bool, multi: bool) -> bool:
    """As gliner says it."""
    if one == other:
        return not multi
    apart = one[0] > other[1] or other[0] > one[1]
    nested = (one[0] <= other[0] and one[1] >= other[1]) or (
        other[0] <= one[0] and other[1] >= one[1]
    )
    return not apart and (flat or not nested)


@given(st.lists(SPANS, max_size=30), st.booleans(), st.booleans())
def test_the_best_spans_are_kept_that_do_not_overlap(
    rows: list[tuple[int, int, int, int]], flat: bool, multi: bool
) -> None:
    found = candidates(rows)
    spans = list(zip(found.starts.tolist(), found.ends.tolist(), strict=True))
    expected: list[int] = []
    for index in sorted(range(len(rows)), key=lambda one: -found.scores[one]):
        if not any(overlaps(spans[index], spans[one], flat=flat, multi=multi) for one in expected):
            expected.append(index)
    expected.sort(key=lambda one: spans[one][0])
    assert choose(found, flat=flat, multi_label=multi) == expected


def test_spans_are_scored_by_their_first_and_last_word() -> None:
    generator = np.random.default_rng(0)
    columns = generator.normal(size=(2 + 5, 3 * 4 + 1)).astype(np.float32)
    window = WordWindow(range(10, 15), range(11, 14))
    found = span_candidates(prompt_span_scores(columns, 2, 3), window, 0.0)
    expected = {}
    for start in range(5):
        for end in range(start, min(start + 3, 5)):
            if 11 <= 10 + (start + end) // 2 < 14:
                hidden = np.maximum(columns[2 + start, :4] + columns[2 + end, 4:8], 0)
                for label in range(2):
                    logit = hidden @ columns[label, 8:12] + columns[label, 12]
                    expected[10 + start, 10 + end, label] = 1 / (1 + np.exp(-logit))
    keys = list(zip(found.starts, found.ends, found.labels, strict=True))
    assert keys == sorted(expected)
    assert found.scores == pytest.approx([expected[key] for key in keys], abs=1e-6)
    columns[3, 0] = np.nan
    with pytest.raises(InferenceError, match="not finite"):
        prompt_span_scores(columns, 2, 3)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.2, 0.5]))
def test_tokens_make_spans_of_a_start_an_inside_and_an_end(seed: int, threshold: float) -> None:
    scores = np.random.default_rng(seed).random((9, 2, 3)).round(1)
    found = token_candidates(scores, threshold)
    expected = []
    for start in range(9):
        for label in range(2):
            for end in range(start, 9):
                inside = scores[start : end + 1, label, 2]
                ends = scores[start, label, 0], scores[end, label, 1]
                if min(ends) > threshold and inside.min() >= threshold:
                    expected.append((start, end, label, min(*ends, inside.min())))
    columns = (found.starts, found.ends, found.labels, found.scores)
    assert list(zip(*columns, strict=True)) == expected


def test_too_many_spans_are_refused() -> None:
    with pytest.raises(ValidationError, match="more than 200,000 spans"):
        token_candidates(np.ones((700, 1, 3)), 0.5)


def words_of(lengths: list[int]) -> TextWords:
    firsts = np.array([0, *np.cumsum(lengths)])
    places = np.arange(len(lengths))
    return TextWords(places, places + 1, np.arange(firsts[-1]), firsts)


@given(
    st.lists(st.integers(1, 12), max_size=60),
    st.integers(6, 20),
    st.integers(1, 9),
    st.none() | st.integers(0, 5),
)
def test_windows_cover_all_words_and_answer_for_each_once(
    lengths: list[int], room: int, max_words: int, stride: int | None
) -> None:
    words = words_of(lengths).cut(room)
    assert np.diff(words.firsts).tolist() == [min(length, room) for length in lengths]
    windows = words.windows(room, max_words, stride)
    for window in windows:
        assert 1 <= len(window.words) <= max_words
        assert words.firsts[window.words.stop] - words.firsts[window.words.start] <= room
        assert window.words.start <= window.own.start <= window.own.stop <= window.words.stop
    assert [word for window in windows for word in window.own] == list(range(len(lengths)))
    for one, next_ in pairwise(windows):
        assert next_.words.stop > one.words.stop
        if stride is not None:
            assert words.firsts[one.words.stop] - words.firsts[next_.words.start] <= stride


def test_words_without_tokens_are_none() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "</s>": 2}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("\u200b", "removed")
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    tokenizer = Tokenizer(backend, SpecialTokens())
    assert tokenizer.ends() == ([], [2])
    words = TextWords.read("a \u200b b-c, " + "a " * 2500, tokenizer, 3000)
    assert list(zip(words.starts, words.ends, strict=True))[:4] == [(0, 1), (4, 7), (7, 8), (9, 10)]
    assert words.ids.tolist() == [1, 0, 0, *[1] * 2500]
    with pytest.raises(
        ValidationError, match="has 3,001 words; one request may have at most 3,000"
    ):
        TextWords.read("a " * 3001, tokenizer, 3000)


def entity(start: int, end: int, label: str = "X", score: float = 0.5) -> Entity:
    return Entity(label, score, "", start, end)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.sampled_from("AB")), max_size=6))
def test_no_character_of_an_entity_is_left(rows: list[tuple[int, int, str]]) -> None:
    text = "0123456789abcdef"
    entities = [entity(start, start + more, label) for start, more, label in rows]
    answer = redact(text, entities, Cover("<{label}>"), keep_original=True)
    inside = {place for each in entities for place in range(each.start, each.end)}
    kept, at = "", 0
    for each in answer.replacements:
        kept += answer.text[at : each.redacted_start]
        at = each.redacted_end
        assert answer.text[each.redacted_start : at] == f"<{each.label}>"
        assert each.original == text[each.start : each.end]
    assert kept + answer.text[at:] == "".join(
        letter for place, letter in enumerate(text) if place not in inside
    )
    places = [(each.start, each.end) for each in answer.replacements]
    assert all(one[1] <= other[0] for one, other in combinations(places, 2))
    assert redact(text, entities[::-1], Cover("<{label}>"), keep_original=True) == answer


@pytest.mark.parametrize(
    ("cover", "text"),
    [
        (Cover(), "[PER] met [LOC]"),
        (Cover("", {"LOC": "<{label}:{label}>"}), " met <LOC:LOC>"),
        (Cover(character="*"), "*** met ****"),
    ],
)
def test_what_is_put_in_an_entity_s_place(cover: Cover, text: str) -> None:
    entities = [entity(8, 12, "LOC"), entity(0, 3, "PER")]
    answer: Any = redact("Ann met Bonn", entities, cover)
    assert answer.text == text
    assert [each.original for each in answer.replacements] == [None, None]


def test_entities_that_overlap_have_the_label_of_the_best() -> None:
    entities = [entity(0, 4, "A", 0.5), entity(2, 6, "B", 0.9), entity(6, 7, "C", 0.1)]
    answer = redact("abcdefgh", entities, Cover())
    found = [(each.label, each.score, each.start, each.end) for each in answer.replacements]
    assert found == [("B", 0.9, 0, 6), ("C", 0.1, 6, 7)]
    assert answer.text == "[B][C]h"
