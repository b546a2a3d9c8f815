"""Question answering: the spans of a context that answer a question, as transformers'
QuestionAnsweringPipeline finds them (transformers 5.2, the last that has it).

A long context comes in windows. Each window's logits become probabilities by themselves, softmaxes
over its context tokens and its no-answer token (CLS), and a span scores what its first token has as
a start times what its last has as an end. Spans of all windows compete with these scores. Spans
with the same text, whatever their case, are one answer: where it was found first, with the sum of
their scores, which may therefore exceed 1.

Differences on purpose: a span without any text is no answer, and a window always offers one that
has some; no answers of score 0 make up the number; equal scores come in the order of the windows
and their tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from maskdial.errors import InferenceError, ValidationError

# Spans looked at together, which bounds the memory of long windows with long answers.
_BLOCK_SPANS = 2**18


@dataclass(frozen=True, slots=True)
class Answer:
    """A part of the context, ``context[start:end]``; an empty one says that there is no answer."""

    answer: str
    score: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Window:
    """Where the context's tokens of one window lie in the context, in characters.

    ``offsets`` and ``word_offsets`` are (num_tokens, 2): each token's start and end, and those of
    its word as far as the window holds it. ``has_word`` is (num_tokens,): false for tokens that are
    in none. ``rows`` are the positions whose logits are wanted: the no-answer token's if the window
    ``has_null``, then the context's tokens'.
    """

    rows: tuple[int, ...]
    has_null: bool
    offsets: NDArray[np.int64]
    word_offsets: NDArray[np.int64]
    has_word: NDArray[np.bool_]

    @classmethod
    def from_encodings(cls, pair: Encoding, context: Encoding) -> "Window":
        """Of the question and a window of the context as the model reads them, and the window.

        The offsets are the window's own: joining a pair trims spaces off a byte-level tokenizer's
        once more.
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
        """Where spans of tokens begin and end in the context; by words where both ends have one."""
        begins, ends = self.offsets[firsts, 0], self.offsets[lasts, 1]
        if not align_to_words:
            return begins, ends
        aligned = self.has_word[firsts] & self.has_word[lasts]
        return (
            np.where(aligned, self.word_offsets[firsts, 0], begins),
            np.where(aligned, self.word_offsets[lasts, 1], ends),
        )


def count_windows(num_tokens: int, room: int, stride: int) -> int:
    """How many windows of ``room`` tokens a context fills; neighbours share ``stride`` of them."""
    return 1 + max(0, -(-(num_tokens - room) // (room - stride)))


def find_answers(
    context: str,
    windows: Sequence[Window],
    logits: Sequence[NDArray[np.float32]],
    *,
    top_k: int = 1,
    max_answer_len: int = 15,
    handle_impossible_answer: bool = False,
    align_to_words: bool = True,
) -> list[Answer]:
    """The best answers, best first; fewer than ``top_k`` where there are no more.

    As in transformers, a window offers its ``top_k`` best spans, or, because several of them may be
    widened to the same words, ``2 * top_k + 10`` where answers are aligned to words.

    Args:
        context: the text that the windows were made of.
        windows: all windows of the context, in order.
        logits: of each window (num_rows, 2) float32, a start's and an end's for each of its rows.
        top_k: answers wanted.
        max_answer_len: in tokens.
        handle_impossible_answer: whether "no answer" competes. Its score is the lowest that any
            window gives it, since an answer in one window is enough.
        align_to_words: whether answers are widened to whole words.

    Raises:
        ValidationError: the context has nothing that could be an answer.
        InferenceError: the logits are not numbers.
    """
    num_spans = 2 * top_k + 10 if align_to_words else top_k
    found: dict[str, Answer] = {}
    null_score = 1.0
    for window, values in zip(windows, logits, strict=True):
        starts, ends = _softmax(values[:, 0]), _softmax(values[:, 1])
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
    """(num_tokens, 2): from where the first token of a token's word starts to where its last ends.

    The tokens of a word are neighbours.
    """
    begins_word = np.diff(word_ids, prepend=-2) != 0
    firsts = np.flatnonzero(begins_word)
    lasts = np.flatnonzero(np.diff(word_ids, append=-2) != 0)
    word = np.cumsum(begins_word) - 1
    return np.stack([offsets[firsts, 0][word], offsets[lasts, 1][word]], axis=1)


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    if not np.isfinite(logits).all():
        raise InferenceError("the model's logits are not finite numbers for this context")
    values = logits.astype(np.float64)
    exponents = np.exp(values - values.max(initial=-np.inf))
    return np.asarray(exponents / exponents.sum())


def _best_spans(
    window: Window,
    starts: NDArray[np.float64],
    ends: NDArray[np.float64],
    num_spans: int,
    max_answer_len: int,
    align_to_words: bool,
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """The best spans of a window: their scores, best first, and where they begin and end.

    Those without text are left out of the best, but one with text is there if the window has any.

    ``starts`` and ``ends`` are the probabilities (num_tokens,) of the context's tokens. A band of
    their outer product is searched, first token by ``max_answer_len``, some rows of it at a time.
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
        best = _largest(scores, num_spans)
        has_text = begins < stops
        if has_text.any() and not has_text[best].any():
            best = np.append(best, np.where(has_text, scores, -1).argmax())
        scores, begins, stops = scores[best], begins[best], stops[best]
    has_text = begins < stops
    return scores[has_text], begins[has_text], stops[has_text]


def _largest(values: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """The indices of the k largest values, largest first, equal ones by index."""
    chosen = np.arange(len(values))
    if k < len(values):
        kth = np.partition(values, len(values) - k)[len(values) - k]
        above = np.flatnonzero(values > kth)
        chosen = np.concatenate([above, np.flatnonzero(values == kth)[: k - len(above)]])
    return chosen[np.argsort(-values[chosen], kind="stable")]
