"""Answers from logits, against every span tried in float64, and windows against known ones."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from maskdial.errors import InferenceError, ValidationError
from maskdial.masked.tasks import question_answering
from maskdial.masked.tasks.logits import count_windows
from maskdial.masked.tasks.question_answering import (
    Answer,
    ContextWindow,
    QuestionAnsweringRequest,
)

LETTERS = "abcdefghij"


def find_answers(
    context: str,
    windows: Sequence[ContextWindow],
    logits: Sequence[NDArray[np.float32]],
    **settings: Any,
) -> list[Answer]:
    """The answers that a request with these settings gets."""
    request = QuestionAnsweringRequest((), **settings)
    return question_answering.find_answers(
        context,
        windows,
        logits,
        top_k=request.top_k,
        max_answer_len=request.max_answer_len,
        handle_impossible_answer=request.handle_impossible_answer,
        align_to_words=request.align_to_words,
    )


def letter_window(num_tokens: int, *, has_null: bool = True) -> ContextWindow:
    """Each token is one character of ``LETTERS``; words are pairs of them."""
    positions = np.arange(num_tokens)
    offsets = np.stack([positions, positions + 1], axis=1)
    first = positions - positions % 2
    return ContextWindow(
        rows=tuple(range(num_tokens + has_null)),
        has_null=has_null,
        offsets=offsets,
        word_offsets=np.stack([first, np.minimum(first + 2, num_tokens)], axis=1),
        has_word=np.ones(num_tokens, np.bool_),
    )


def certain(start: int, end: int, num_rows: int) -> NDArray[np.float32]:
    """Logits that are nearly sure of a first and a last row."""
    logits = np.zeros((num_rows, 2), np.float32)
    logits[start, 0] = logits[end, 1] = 20
    return logits


def softmax64(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    exponents = np.exp(logits.astype(np.float64))
    return np.asarray(exponents / exponents.sum())


@st.composite
def distinct_logits(draw: st.DrawFn) -> NDArray[np.float32]:
    num_rows = draw(st.integers(2, 11))
    seed = draw(st.integers(0, 10_000))
    return np.random.default_rng(seed).normal(0, 3, (num_rows, 2)).astype(np.float32)


@given(
    logits=distinct_logits(),
    top_k=st.integers(1, 70),
    max_answer_len=st.integers(1, 12),
    block=st.sampled_from([1, 7, 2**18]),
)
def test_the_best_spans_are_those_of_the_whole_product(
    logits: NDArray[np.float32], top_k: int, max_answer_len: int, block: int
) -> None:
    num_tokens = len(logits) - 1
    start, end = softmax64(logits[:, 0]), softmax64(logits[:, 1])
    spans = [
        (start[s + 1] * end[e + 1], s, e + 1)
        for s, e in product(range(num_tokens), repeat=2)
        if s <= e < s + max_answer_len
    ]
    expected = sorted(spans, reverse=True)[:top_k]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(question_answering, "_BLOCK_SPANS", block)
        answers = find_answers(
            LETTERS,
            [letter_window(num_tokens)],
            [logits],
            top_k=top_k,
            max_answer_len=max_answer_len,
            align_to_words=False,
        )
    assert [(answer.start, answer.end) for answer in answers] == [span[1:] for span in expected]
    np.testing.assert_allclose(
        [answer.score for answer in answers], [span[0] for span in expected], rtol=1e-12
    )


def test_answers_are_widened_to_whole_words() -> None:
    window, logits = letter_window(10), certain(4, 5, 11)
    (whole,) = find_answers(LETTERS, [window], [logits])
    (exact,) = find_answers(LETTERS, [window], [logits], align_to_words=False)
    assert (whole.answer, whole.start, whole.end) == ("cdef", 2, 6)
    assert (exact.answer, exact.start, exact.end) == ("de", 3, 5)


def test_a_token_outside_words_keeps_its_span_as_it_is() -> None:
    window = letter_window(10)
    window.has_word[4] = False
    (answer,) = find_answers(LETTERS, [window], [certain(4, 5, 11)])
    assert answer.answer == "de"


@pytest.mark.parametrize(("align_to_words", "rows"), [(False, [3]), (True, [3, 1])])
def test_a_text_counts_as_often_as_it_is_among_the_best_spans(
    align_to_words: bool, rows: list[int]
) -> None:
    """More spans are offered where several may extend to the same words."""
    offsets = np.array([[0, 2], [3, 4], [5, 7]])
    window = ContextWindow((0, 1, 2, 3), True, offsets, offsets, np.ones(3, np.bool_))
    logits = np.full((4, 2), -30, np.float32)
    logits[1], logits[3] = 1, 2
    (answer,) = find_answers(
        "ab x ab", [window], [logits], max_answer_len=1, align_to_words=align_to_words
    )
    share = softmax64(logits[:, 0])
    assert (answer.answer, answer.start) == ("ab", 5)
    assert answer.score == pytest.approx(sum(share[row] ** 2 for row in rows), rel=1e-9)


def test_the_same_text_is_one_answer_where_it_was_found_first() -> None:
    context = "Ab x aB"
    offsets = np.array([[0, 2], [3, 4], [5, 7]])
    window = ContextWindow((0, 1, 2, 3), True, offsets, offsets, np.ones(3, np.bool_))
    logits = np.full((4, 2), -30, np.float32)
    logits[1], logits[3] = 1, 2
    answers = find_answers(context, [window, window], [logits, logits], max_answer_len=1, top_k=5)
    share = softmax64(logits[:, 0])
    best = answers[0]
    assert (best.answer, best.start, best.end) == ("aB", 5, 7)
    assert best.score == pytest.approx(2 * (share[3] ** 2 + share[1] ** 2))
    assert best.score > 1
    assert [answer.answer for answer in answers] == ["aB", "x"]


def test_windows_compete_with_their_own_probabilities() -> None:
    unsure, sure = np.zeros((11, 2), np.float32), certain(2, 2, 11)
    # Large logits are no advantage: each window is a softmax of its own.
    answers = find_answers(
        LETTERS,
        [letter_window(10)] * 2,
        [unsure + 50, sure],
        align_to_words=False,
    )
    assert [(answer.answer, answer.start) for answer in answers] == [("b", 1)]


def test_no_answer_has_the_lowest_score_of_any_window() -> None:
    window = letter_window(10)
    nothing, something = certain(0, 0, 11), certain(3, 4, 11)
    (answer,) = find_answers(LETTERS, [window], [nothing], handle_impossible_answer=True)
    assert answer == Answer("", answer.score, 0, 0)
    assert answer.score == pytest.approx(1, abs=1e-6)
    (answer,) = find_answers(
        LETTERS, [window] * 2, [nothing, something], handle_impossible_answer=True
    )
    assert answer.answer == "cd"
    (answer,) = find_answers(LETTERS, [window], [nothing])
    assert answer.answer
    assert answer.score < 1e-6


def test_no_answer_is_impossible_without_its_token() -> None:
    window = letter_window(4, has_null=False)
    logits = np.zeros((4, 2), np.float32)
    answers = find_answers(LETTERS, [window], [logits], top_k=99, handle_impossible_answer=True)
    assert answers[-1] == Answer("", 0.0, 0, 0)


def test_a_span_without_text_is_no_answer() -> None:
    offsets = np.array([[0, 1], [1, 1], [2, 3]])
    window = ContextWindow((0, 1, 2, 3), True, offsets, offsets, np.ones(3, np.bool_))
    (answer,) = find_answers("a b", [window], [certain(2, 2, 4)], align_to_words=False)
    assert answer.answer in {"a", "b"}
    empty = ContextWindow((0, 1), True, offsets[1:2], offsets[1:2], np.ones(1, np.bool_))
    with pytest.raises(ValidationError, match="no text that could be an answer"):
        find_answers("a b", [empty], [np.zeros((2, 2), np.float32)])


def test_a_context_without_tokens() -> None:
    window, logits = letter_window(0), np.zeros((1, 2), np.float32)
    with pytest.raises(ValidationError, match="no text that could be an answer"):
        find_answers("\u200b", [window], [logits])
    (answer,) = find_answers("\u200b", [window], [logits], handle_impossible_answer=True)
    assert answer == Answer("", 1.0, 0, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers(value: float) -> None:
    logits = np.zeros((11, 2), np.float32)
    logits[3, 1] = value
    with pytest.raises(InferenceError, match="not finite"):
        find_answers(LETTERS, [letter_window(10)], [logits])


@given(num_tokens=st.integers(1, 9), room=st.integers(1, 6), data=st.data())
def test_windows_are_counted_as_they_are_made(
    num_tokens: int, room: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(0, room - 1))
    backend = make_backend()
    encoding = backend.encode(" ".join(LETTERS[:num_tokens]), add_special_tokens=False)
    encoding.truncate(room, stride)
    assert count_windows(num_tokens, room, stride) == 1 + len(encoding.overflowing)


def make_backend() -> Tokenizer:
    pieces = ["[CLS]", "[SEP]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    backend = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.BertProcessing(("[SEP]", 1), ("[CLS]", 0))
    return backend


def test_a_window_knows_its_tokens_and_words() -> None:
    backend = make_backend()
    question = backend.encode("a b", add_special_tokens=False)
    context = backend.encode("cde  fg\nh", add_special_tokens=False)
    window = ContextWindow.from_encodings(backend.post_process(question, context), context)
    assert window.rows == (0, 4, 5, 6, 7, 8, 9)
    assert window.has_null
    assert window.offsets.tolist() == [[0, 1], [1, 2], [2, 3], [5, 6], [6, 7], [8, 9]]
    assert window.word_offsets.tolist() == [[0, 3]] * 3 + [[5, 7]] * 2 + [[8, 9]]
    assert window.has_word.all()


def test_a_window_may_be_empty() -> None:
    backend = make_backend()
    question, context = (backend.encode(text, add_special_tokens=False) for text in ("a", ""))
    window = ContextWindow.from_encodings(backend.post_process(question, context), context)
    assert window.rows == (0,)
    assert window.offsets.shape == window.word_offsets.shape == (0, 2)
