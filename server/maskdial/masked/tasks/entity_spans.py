"""The spans of a text's words that are entities: their scores, and which of them are kept.

As in gliner: spans above a threshold, best first, each unless it overlaps with one before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskdial.errors import InferenceError, ValidationError
from maskdial.masked.tasks.text_words import WordWindow

MAX_CANDIDATES = 200_000


@dataclass(frozen=True, slots=True)
class Candidates:
    """Spans with a label and a score each; arrays are (num_candidates,).

    ``starts`` and ``ends`` are words of the text, the end inclusive.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    labels: NDArray[np.int64]
    scores: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.starts)

    def where(self, chosen: NDArray[np.bool_]) -> "Candidates":
        """Those for which ``chosen``, bool (num_candidates,), is true."""
        starts, ends, labels = (each[chosen] for each in (self.starts, self.ends, self.labels))
        return Candidates(starts, ends, labels, self.scores[chosen])

    @classmethod
    def join(cls, parts: Sequence["Candidates"], *, label_first: bool = False) -> "Candidates":
        """Those of several parts, by start, end and label, or by start, label and end.

        Of equal scores, `choose` prefers the first one, as gliner does: it has the latter order
        where tokens are scored.
        """
        starts, ends, labels, scores = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("starts", "ends", "labels", "scores")
        )
        order = np.lexsort((ends, labels, starts) if label_first else (labels, ends, starts))
        return cls(starts[order], ends[order], labels[order], scores[order])


def prompt_span_scores(
    columns: NDArray[np.float32], num_labels: int, max_width: int
) -> NDArray[np.float32]:
    """`span_scores` of a model that has read labels and words.

    Args:
        columns: (num_labels + num_words, 3 * n + 1): of each label and word its start, end and
            query of n columns each, and its bias.
        num_labels: rows of labels.
        max_width: of a span, in words.

    Raises:
        InferenceError: a column is not a finite number.
    """
    width = (columns.shape[1] - 1) // 3
    words, labels = columns[num_labels:, : 2 * width], columns[:num_labels, 2 * width :]
    return span_scores(words, labels, max_width)


def span_scores(
    words: NDArray[np.float32], labels: NDArray[np.float32], max_width: int
) -> NDArray[np.float32]:
    """The logits (num_words, max_width, num_labels) of the spans that begin at each word, by their
    length; minus infinity where a span would end after the last word.

    Args:
        words: (num_words, 2 * n): start and end of each word, of n columns each.
        labels: (num_labels, n + 1): query and bias of each label. A logit is
            relu(start + end) . query + bias.
        max_width: of a span, in words.

    Raises:
        InferenceError: a column is not a finite number.
    """
    check_finite(words)
    check_finite(labels)
    width = words.shape[1] // 2
    starts, ends = words[:, :width], words[:, width:]
    queries, bias = labels[:, :-1].T.astype(np.float64), labels[:, -1]
    count = len(starts)
    scores = np.full((count, max_width, len(labels)), -np.inf, np.float32)
    for more in range(min(max_width, count)):  # words after the first one
        spans = starts[: count - more] + ends[more:]
        np.maximum(spans, 0, out=spans)
        # Products of 32 bits differ between processors; of 64 bits, once rounded, they do not.
        scores[: count - more, more] = (spans.astype(np.float64) @ queries).astype(
            np.float32
        ) + bias
    return scores


def span_candidates(
    scores: NDArray[np.float32], window: WordWindow, threshold: float
) -> Candidates:
    """The spans of a window's words whose score is above a threshold, and whose middle word the
    window answers for.

    Args:
        scores: (num_words, max_width, num_labels) logits, of `span_scores`.
        window: the words.
        threshold: between 0 and 1.

    Raises:
        ValidationError: there are too many.
    """
    first = window.words.start
    words, widths = np.arange(scores.shape[0])[:, None], np.arange(scores.shape[1])
    middles = first + words + widths // 2
    owned = (middles >= window.own.start) & (middles < window.own.stop)
    owned &= words + widths < scores.shape[0]
    probabilities = span_probabilities(scores)
    at, more, labels = np.nonzero((probabilities > threshold) & owned[:, :, None])
    _check_number(len(at))
    return Candidates(first + at, first + at + more, labels, probabilities[at, more, labels])


def token_candidates(scores: NDArray[np.float64], threshold: float) -> Candidates:
    """The spans of a text whose first word may start an entity, whose last one may end it, and
    whose words may all be inside.

    Args:
        scores: (num_words, num_labels, 3) probabilities: start, end and inside.
        threshold: of each of them.

    Raises:
        ValidationError: there are too many.
    """
    count, num_labels, _ = scores.shape
    parts: list[Candidates] = []
    total = 0
    for label in range(num_labels):
        start, end, inside = scores[:, label].T
        opens, closes = np.flatnonzero(start > threshold), np.flatnonzero(end > threshold)
        outside = np.append(np.flatnonzero(inside < threshold), count)
        # The first word that is outside bounds the ends of each start
        limits = outside[np.searchsorted(outside, opens)]
        lows, highs = np.searchsorted(closes, opens), np.searchsorted(closes, limits)
        numbers = np.maximum(highs - lows, 0)
        total += int(numbers.sum())
        _check_number(total)
        starts = np.repeat(opens, numbers)
        offsets = np.arange(len(starts)) - np.repeat(numbers.cumsum() - numbers, numbers)
        ends = closes[np.repeat(lows, numbers) + offsets]
        least = np.minimum(
            _least_within(inside, starts, ends), np.minimum(start[starts], end[ends])
        )
        parts.append(Candidates(starts, ends, np.full(len(starts), label), least))
    return Candidates.join(parts, label_first=True)


def token_probabilities(logits: NDArray[np.float32], num_labels: int) -> NDArray[np.float64]:
    """The scores (num_words, num_labels, 3) of a window's words.

    Raises:
        InferenceError: one is not a finite number.
    """
    check_finite(logits)
    return span_probabilities(logits.reshape(-1, num_labels, 3))


def choose(candidates: Candidates, *, flat: bool, multi_label: bool) -> list[int]:
    """Which candidates are entities, in the order of their starts; of one start, best first.

    Args:
        candidates: spans.
        flat: whether no two spans may overlap; otherwise one may lie within another.
        multi_label: whether a span may have several labels.
    """
    occupied: dict[int, tuple[int, int]] = {}  # words -> the span that has them
    first_start: dict[int, int] = {}  # last word -> the first word of the longest such span
    last_end: dict[int, int] = {}
    spans: set[tuple[int, int]] = set()
    kept: list[int] = []
    starts, ends = candidates.starts.tolist(), candidates.ends.tolist()
    for index in np.argsort(-candidates.scores, kind="stable").tolist():
        start, end = starts[index], ends[index]
        if (start, end) in spans:
            if multi_label:  # none that overlaps it was kept
                kept.append(index)
            continue
        within = range(start, end + 1)
        if flat:
            if any(word in occupied for word in within):
                continue
            occupied |= dict.fromkeys(within, (start, end))
        elif any(first_start.get(word, start) < start for word in within[:-1]) or any(
            last_end.get(word, end) > end for word in within[1:]
        ):
            continue  # it crosses another one's border
        spans.add((start, end))
        first_start[end] = min(first_start.get(end, start), start)
        last_end[start] = max(last_end.get(start, end), end)
        kept.append(index)
    return sorted(kept, key=starts.__getitem__)


def _least_within(
    values: NDArray[np.float64], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The minimum of values[start : end + 1] for each span, by minima over powers of two."""
    lengths = ends - starts + 1
    powers = np.frexp(lengths)[1].astype(np.int64) - 1
    found = np.empty(len(starts))
    minima = values
    for power in range(int(powers.max(initial=-1)) + 1):
        chosen = powers == power
        last = ends[chosen] + 1 - (1 << power)
        found[chosen] = np.minimum(minima[starts[chosen]], minima[last])
        minima = np.minimum(minima, np.append(minima[1 << power :], np.full(1 << power, np.inf)))
    return found


def check_finite(logits: NDArray[np.float32]) -> None:
    """Refuses a model's output, float of any shape, with a number that is not finite.

    Raises:
        InferenceError: there is one.
    """
    if not np.isfinite(logits).all():
        raise InferenceError("the model returned scores that are not finite numbers")


def span_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The sigmoid of logits of any shape."""
    # As torch computes it: what rounds to 1 there is a tie, which the order of the text decides
    with np.errstate(over="ignore"):
        probabilities = 1 / (1 + np.exp(-logits))
    return probabilities.astype(np.float64)


def _check_number(total: int) -> None:
    if total > MAX_CANDIDATES:
        raise ValidationError(
            f"leaves more than {MAX_CANDIDATES:,} spans of a text to choose from; raise it",
            field="threshold",
        )
