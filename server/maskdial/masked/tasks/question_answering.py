"""Extractive question answering: the spans of a context that answer a question, as found by
transformers' QuestionAnsweringPipeline (removed after transformers 5.2).

A long context is read in windows. Each window has its own softmax over its context tokens and its
no-answer token (CLS), for starts and for ends; a span's score is the start probability of its first
token times the end probability of its last. Spans of all windows are ranked by that score. Spans of
the same text, ignoring case, are one answer: at the first place it was found, with the sum of their
scores, which may therefore exceed 1.

Deliberate differences: a span without text is no answer, and every window offers one with text if
it has any; answers of score 0 do not fill up the list; ties are in the order of windows and tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from maskdial.bundle.manifest import TaskName
from maskdial.bundle.tokenizer import shorten, split_up
from maskdial.engine.logits import largest_indices
from maskdial.errors import ValidationError, about
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.masked.tasks.logits import count_windows, finite, softmax
from maskdial.masked.tasks.task import Reading, TaskModel, TaskRequest, masked_input

# transformers' defaults
_MAX_SEQ_LEN = 384
_DOC_STRIDE = 128

_MAX_ANSWERS = 100_000
# Spans scored at a time, which bounds the memory that long windows with long answers take.
_BLOCK_SPANS = 2**18


@dataclass(frozen=True, slots=True)
class Answer:
    """A span of the context, ``context[start:end]``; an empty one means that there is no answer."""

    answer: str
    score: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class QAPair:
    """A question, and the text that holds its answer."""

    question: str
    context: str


@dataclass(frozen=True, slots=True)
class QuestionAnsweringRequest(TaskRequest[list[list[Answer]]]):
    """Questions about contexts; the other fields are named as in transformers."""

    task: ClassVar[str] = "question-answering"
    head: ClassVar[TaskName] = "question-answering"

    questions: Sequence[QAPair]
    top_k: int = 1
    doc_stride: int | None = None
    max_answer_len: int = 15
    max_question_len: int | None = None
    max_seq_len: int | None = None
    handle_impossible_answer: bool = False
    align_to_words: bool = True

    @property
    def num_texts(self) -> int:
        return len(self.questions)

    @property
    def read_seconds(self) -> float:
        return math.inf  # windows of a context take long to build

    def check(self, model: TaskModel) -> None:
        max_length = model.manifest.max_length
        if self.max_seq_len is not None and self.max_seq_len > max_length:
            raise ValidationError(
                f"model {model.name!r} takes at most {max_length} tokens, not {self.max_seq_len}",
                field="max_seq_len",
            )

    def read(self, model: TaskModel) -> Reading[list[list[Answer]]]:
        """The answer has a list for each question, best first."""
        read: list[_WindowedQuestion] = []
        room = model.max_queue
        for index, question in enumerate(self.questions):
            with about("questions", index):
                read.append(self._read_one(model, question, room))
            room -= len(read[-1].inputs)
        inputs = [given for question in read for given in question.inputs]
        if self.top_k > 1 and self.top_k * len(inputs) > _MAX_ANSWERS:
            raise ValidationError(
                f"{self.top_k} answers from each of {len(inputs)} windows; one request may ask for "
                f"at most {_MAX_ANSWERS:,} together",
                field="top_k",
            )
        num_truncated = sum(question.num_truncated for question in read)
        return Reading(inputs, lambda results: self._answer(read, results), num_truncated, math.inf)

    def _read_one(self, model: TaskModel, asked: QAPair, max_windows: int) -> "_WindowedQuestion":
        tokenizer = model.tokenizer
        max_seq_len = self.max_seq_len or min(model.manifest.max_length, _MAX_SEQ_LEN)
        if self.max_question_len is None and tokenizer.exceeds(asked.question, max_seq_len):
            raise ValidationError(
                f"the question's {len(asked.question):,} characters leave no room for the context "
                f'in windows of {max_seq_len}; shorten it, or truncate it with "max_question_len"'
            )
        question = tokenizer.encode(asked.question, add_special_tokens=False)
        context = tokenizer.encode(asked.context, add_special_tokens=False)
        num_tokens = len(question)
        if self.max_question_len is not None:
            question = shorten(question, self.max_question_len, "right")
        room = max_seq_len - tokenizer.num_special_tokens(pair=True) - len(question)
        if room < 1:
            raise ValidationError(
                f"the question's {len(question)} tokens leave no room for the context in windows "
                f'of {max_seq_len}; shorten it, or truncate it with "max_question_len"'
            )
        pieces = _split(context, room, self.doc_stride, max_seq_len, max_windows)
        pairs = [tokenizer.join(question, piece) for piece in pieces]
        windows = [ContextWindow.from_encodings(*both) for both in zip(pairs, pieces, strict=True)]
        rows = (window.rows for window in windows)
        inputs = [masked_input(*both) for both in zip(pairs, rows, strict=True)]
        return _WindowedQuestion(asked.context, inputs, windows, num_tokens - len(question))

    def _answer(
        self, read: "Sequence[_WindowedQuestion]", results: Sequence[MaskedResult]
    ) -> list[list[Answer]]:
        logits = iter(result.logits for result in results)
        answers = []
        for index, question in enumerate(read):
            with about("questions", index):
                answers.append(
                    find_answers(
                        question.context,
                        question.windows,
                        [next(logits) for _ in question.windows],
                        top_k=self.top_k,
                        max_answer_len=self.max_answer_len,
                        handle_impossible_answer=self.handle_impossible_answer,
                        align_to_words=self.align_to_words,
                    )
                )
        return answers


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """One window of a context: where its tokens are in the context, in characters.

    Attributes:
        rows: positions whose logits are wanted: the no-answer token if the window ``has_null``,
            then the context's tokens.
        has_null: whether the input begins with a no-answer token.
        offsets: int64 (num_tokens, 2), each token's start and end.
        word_offsets: int64 (num_tokens, 2), those of its word as far as it lies in the window.
        has_word: bool (num_tokens,), false for tokens that belong to no word.
    """

    rows: tuple[int, ...]
    has_null: bool
    offsets: NDArray[np.int64]
    word_offsets: NDArray[np.int64]
    has_word: NDArray[np.bool_]

    @classmethod
    def from_encodings(cls, pair: Encoding, context: Encoding) -> "ContextWindow":
        """From the pair that the model reads, and the context's part of it before it was joined.

        Offsets are taken from the latter: joining a pair trims spaces off a byte-level tokenizer's
        offsets a second time.
        """
        sequences = pair.sequence_ids
        positions = [i for i, sequence in enumerate(sequences) if sequence == 1]
        has_null = sequences[0] is None
        offsets = np.array(context.offsets, np.int64).reshape(-1, 2)
        word_ids = np.array([-1 if word is None else word for word in context.word_ids], np.int64)
        return cls(
            rows=(0, *positions) if has_null else tuple(positions),
            has_null=has_null,
            offsets=offsets,
            word_offsets=_word_offsets(offsets, word_ids),
            has_word=word_ids >= 0,
        )

    def span_offsets(
        self, firsts: NDArray[np.int64], lasts: NDArray[np.int64], align_to_words: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and end of spans in the context; extended to words where both ends have one."""
        begins, ends = self.offsets[firsts, 0], self.offsets[lasts, 1]
        if not align_to_words:
            return begins, ends
        aligned = self.has_word[firsts] & self.has_word[lasts]
        return (
            np.where(aligned, self.word_offsets[firsts, 0], begins),
            np.where(aligned, self.word_offsets[lasts, 1], ends),
        )


@dataclass(frozen=True, slots=True)
class _WindowedQuestion:
    """A question with each window of its context, and how many of its tokens were cut off."""

    context: str
    inputs: list[MaskedInput]
    windows: list[ContextWindow]
    num_truncated: int


def _split(
    context: Encoding, room: int, asked_stride: int | None, max_seq_len: int, max_windows: int
) -> list[Encoding]:
    """A context in windows of ``room`` tokens."""
    stride = min(max_seq_len // 2, _DOC_STRIDE) if asked_stride is None else asked_stride
    if asked_stride is None and stride >= room:
        stride = room // 2
    if len(context) <= room:
        num_windows = 1
    elif stride < room:
        num_windows = count_windows(len(context), room, stride)
    else:
        raise ValidationError(
            f"{stride} tokens are too many: the question leaves {room} to the context in windows "
            f"of {max_seq_len}, and two windows must share fewer",
            field="doc_stride",
        )
    if num_windows > max_windows:
        raise ValidationError(
            f"the context's {len(context):,} tokens fill {num_windows:,} windows; this request may "
            f'have {max_windows:,} more (--max-queue); shorten it, or set a smaller "doc_stride"'
        )
    return split_up(context, room, stride if num_windows > 1 else 0)


def find_answers(
    context: str,
    windows: Sequence[ContextWindow],
    logits: Sequence[NDArray[np.float32]],
    *,
    top_k: int,
    max_answer_len: int,
    handle_impossible_answer: bool,
    align_to_words: bool,
) -> list[Answer]:
    """The best answers, best first; fewer than ``top_k`` if there are no more.

    As in transformers, each window offers its ``top_k`` best spans, or ``2 * top_k + 10`` where
    answers are aligned to words, because several spans may extend to the same words.

    Args:
        context: the text that the windows were made of.
        windows: all windows of the context, in order.
        logits: for each window (num_rows, 2) float32, start and end logits of each row.
        top_k: number of answers.
        max_answer_len: maximum length of an answer in tokens.
        handle_impossible_answer: whether "no answer" competes. Its score is the lowest that any
            window gives it, since an answer in one window is enough.
        align_to_words: whether answers are extended to whole words.

    Raises:
        ValidationError: the context has nothing that could be an answer.
        InferenceError: a logit is not a finite number.
    """
    num_spans = 2 * top_k + 10 if align_to_words else top_k
    found: dict[str, Answer] = {}
    null_score = 1.0
    for window, values in zip(windows, logits, strict=True):
        starts, ends = softmax(finite(np.ascontiguousarray(values.T)))
        null_score = min(null_score, float(starts[0] * ends[0]) if window.has_null else 0.0)
        if window.has_null:
            starts, ends = starts[1:], ends[1:]
        spans = _best_spans(window, starts, ends, num_spans, max_answer_len, align_to_words)
        for score, begin, end in zip(*(array.tolist() for array in spans), strict=True):
            text = context[begin:end]
            folded = text.lower()
            known = found.get(folded, Answer(text, 0.0, begin, end))
            found[folded] = replace(known, score=known.score + score)
    answers = list(found.values())
    if handle_impossible_answer:
        answers.append(Answer("", null_score, 0, 0))
    if not answers:
        raise ValidationError("the context has no text that could be an answer")
    return sorted(answers, key=lambda answer: -answer.score)[:top_k]


def _word_offsets(offsets: NDArray[np.int64], word_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """(num_tokens, 2): start of the first and end of the last token of each token's word.

    The tokens of a word are adjacent.
    """
    begins_word = np.diff(word_ids, prepend=-2) != 0
    firsts = np.flatnonzero(begins_word)
    lasts = np.flatnonzero(np.diff(word_ids, append=-2) != 0)
    word = np.cumsum(begins_word) - 1
    return np.stack([offsets[firsts, 0][word], offsets[lasts, 1][word]], axis=1)


def _best_spans(
    window: ContextWindow,
    starts: NDArray[np.float64],
    ends: NDArray[np.float64],
    num_spans: int,
    max_answer_len: int,
    align_to_words: bool,
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """The best spans of a window: scores, best first, starts and ends in the context.

    Spans without text are dropped from the best; one with text remains if the window has any.

    ``starts`` and ``ends`` are probabilities (num_tokens,) of the context's tokens. The search runs
    over a band of their outer product, (num_tokens, max_answer_len), a block of rows at a time.
    """
    num_tokens = len(starts)
    width = min(max_answer_len, num_tokens)
    block = max(1, _BLOCK_SPANS // max(width, 1))
    scores, begins, stops = np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64)
    for row in range(0, num_tokens, block):
        rows = np.arange(row, min(row + block, num_tokens))
        firsts, lasts = np.broadcast_arrays(rows[:, None], rows[:, None] + np.arange(width))
        inside = lasts < num_tokens
        firsts, lasts = firsts[inside], lasts[inside]
        span_begins, span_stops = window.span_offsets(firsts, lasts, align_to_words)
        scores = np.append(scores, starts[firsts] * ends[lasts])
        begins, stops = np.append(begins, span_begins), np.append(stops, span_stops)
        best = largest_indices(scores, num_spans)
        has_text = begins < stops
        if has_text.any() and not has_text[best].any():
            best = np.append(best, np.where(has_text, scores, -1).argmax())
        scores, begins, stops = scores[best], begins[best], stops[best]
    has_text = begins < stops
    return scores[has_text], begins[has_text], stops[has_text]
