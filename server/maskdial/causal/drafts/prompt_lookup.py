"""PromptLookup: draft tokens from the text itself."""

from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.sequence import Sequence
from maskdial.metrics import DraftKind

LONGEST_NGRAM = 8
_SHORTEST_NGRAM = 3


class _Text:
    """Where a text that grows goes on; most of those that do not repeat anything take no search."""

    def __init__(self) -> None:
        self._num_tokens = self._place = 0
        self._grams: set[int] = set()
        """The shortest pieces that count as a match, but for the text's end."""

    def find_place(self, text: NDArray[np.int64]) -> int:
        """As `find_place` of the text's own beginning, or where what was right goes on."""
        num_tokens = len(text)
        before, place = self._num_tokens, self._place
        self._num_tokens, self._place = num_tokens, 0
        new = max(before - _SHORTEST_NGRAM, 0)
        grams = _grams(text[new:])
        if not grams:
            return 0
        last = grams.pop()
        repeats = last in self._grams or last in grams
        self._grams.update(grams)
        self._grams.add(last)
        if not repeats:
            return 0
        end = place + num_tokens - before
        if place and text[before:].tolist() == text[place:end].tolist():
            self._place = end
        else:
            self._place = find_place(text, text)
        return self._place


class PromptLookup:
    """Prompt-lookup decoding (Saxena 2023, "Prompt Lookup Decoding").

    If the last few tokens occur earlier in the text, the tokens that followed them there become
    draft tokens, which works well for copies, quotes and summaries.
    """

    kind: DraftKind = "prompt"

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Sequence, _Text] = WeakKeyDictionary()

    def serves(self, sequence: Sequence) -> bool:
        """Any text may repeat itself."""
        return True

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See `maskdial.causal.drafts.draft.Proposer`."""
        known = self._texts.get(sequence)
        if known is None:
            known = self._texts[sequence] = _Text()
        text = sequence.token_ids
        start = known.find_place(text)
        if not start:
            return ()
        following: list[int] = text[start : start + max_tokens].tolist()
        while len(following) < max_tokens:
            # What has begun to repeat itself goes on to do so.
            following += following[: max_tokens - len(following)]
        return tuple(following)


def find_place(text: NDArray[np.int64], beginning: NDArray[np.int64]) -> int:
    """Where ``text`` goes on after the last tokens of a beginning.

    A longer match counts more than a later one.

    Args:
        text: int64 (num_tokens,).
        beginning: int64 (num_tokens,), which may be the text itself.

    Returns:
        The place after the last match of the last eight tokens, or of three at least; 0 if there
        is none that another token follows.
    """
    if len(beginning) < _SHORTEST_NGRAM:
        return 0
    # Few places have the last token, so the other tokens are compared there only.
    places = (text[1:-1] == beginning[-1]).nonzero()[0] + 1
    found = 0
    for length in range(2, min(LONGEST_NGRAM, len(beginning)) + 1):
        if not len(places) or places[0] < length - 1:
            places = places[places >= length - 1]
        places = places[text[places - length + 1] == beginning[-length]]
        if not len(places):
            break
        if length >= _SHORTEST_NGRAM:
            found = int(places[-1]) + 1
            if len(places) == 1:
                break
    return found


def _grams(text: NDArray[np.int64]) -> list[int]:
    """Each three adjacent tokens of a text, as one number."""
    if len(text) <= 2 * _SHORTEST_NGRAM:  # as most often; NumPy would take longer
        ids = text.tolist()
        return [
            (first << 42) ^ (second << 21) ^ third
            for first, second, third in zip(ids, ids[1:], ids[2:], strict=False)
        ]
    numbers = (text[:-2] << 42) ^ (text[1:-1] << 21) ^ text[2:]
    found: list[int] = numbers.tolist()
    return found
