"""PromptLookup: guesses the next tokens of a text from the text itself."""

import numpy as np
from numpy.typing import NDArray

_LONGEST_NGRAM = 3
_SHORTEST_NGRAM = 2
_FIRST_DRAFTS = 4
_PAUSE = 16


class PromptLookup:
    """Prompt-lookup decoding for one sequence (Saxena 2023; transformers has it, too).

    Where the last few tokens stand earlier in the text, what followed them there is guessed to
    follow again: copies, quotes and summaries are full of it. The number of guesses doubles while
    all of them are right and halves when they are not; when none was right at the smallest number,
    guessing pauses for a few tokens. It goes by counts alone, never by the clock, so the same text
    is always guessed in the same way.
    """

    def __init__(self) -> None:
        self._num_drafts = _FIRST_DRAFTS
        self._resume_at = 0  # tokens in the text
        self._num_tokens = 0

    def guess(self, token_ids: NDArray[np.int64], most: int) -> tuple[int, ...]:
        """What may follow a text.

        Args:
            token_ids: int64 (num_tokens,), the text so far.
            most: no more tokens than this.
        """
        self._num_tokens = len(token_ids)
        if self._num_tokens < self._resume_at:
            return ()
        num_drafts = min(self._num_drafts, most)
        for length in range(_LONGEST_NGRAM, _SHORTEST_NGRAM - 1, -1):
            ends = _earlier_ends(token_ids, length)
            if len(ends):
                # The last place with enough after it, or else the one with most after it.
                enough = ends[ends + num_drafts <= len(token_ids)]
                end = int(enough[-1] if len(enough) else ends[0])
                return tuple(token_ids[end : end + num_drafts].tolist())
        return ()

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Learns how many of the last guesses were right."""
        if num_accepted == num_drafts:
            if num_drafts == self._num_drafts:
                self._num_drafts *= 2
        elif num_accepted < num_drafts / 2:
            if num_accepted == 0 and self._num_drafts == 1:
                self._resume_at = self._num_tokens + _PAUSE
            self._num_drafts = max(self._num_drafts // 2, 1)


def _earlier_ends(token_ids: NDArray[np.int64], length: int) -> NDArray[np.intp]:
    """Where the text's last ``length`` tokens stand earlier in it: the ends, in rising order."""
    num_places = len(token_ids) - length
    if num_places < 1:
        return np.empty(0, np.intp)
    matches = np.ones(num_places, np.bool_)
    for i in range(length):
        matches &= token_ids[i : i + num_places] == token_ids[i - length]
    return np.flatnonzero(matches) + length
