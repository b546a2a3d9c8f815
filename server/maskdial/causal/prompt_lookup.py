"""PromptLookup: draft tokens from the text itself."""

import numpy as np
from numpy.typing import NDArray

_LONGEST_NGRAM = 3
_SHORTEST_NGRAM = 2
_FIRST_DRAFTS = 4
_PAUSE = 16


class PromptLookup:
    """Prompt-lookup decoding for one sequence (Saxena 2023, "Prompt Lookup Decoding").

    If the last few tokens occur earlier in the text, the tokens that followed them there become
    draft tokens, which works well for copies, quotes and summaries. The number of draft tokens
    doubles while all of them are accepted and halves when fewer than half are. If a single draft
    token is rejected, drafting pauses for a few tokens. Only counts decide, never the clock, so
    the same text always gets the same draft tokens.
    """

    def __init__(self) -> None:
        self._num_drafts = _FIRST_DRAFTS
        self._resume_at = 0  # tokens in the text
        self._num_tokens = 0

    def draft(self, token_ids: NDArray[np.int64], max_drafts: int) -> tuple[int, ...]:
        """Draft tokens, at most ``max_drafts``, to follow a text.

        Args:
            token_ids: int64 (num_tokens,), the text so far.
            max_drafts: at least 1.
        """
        self._num_tokens = len(token_ids)
        if self._num_tokens < self._resume_at:
            return ()
        num_drafts = min(self._num_drafts, max_drafts)
        for length in range(_LONGEST_NGRAM, _SHORTEST_NGRAM - 1, -1):
            ends = _earlier_ends(token_ids, length)
            if len(ends):
                # The last match with enough tokens after it, or else the one with the most.
                enough = ends[ends + num_drafts <= len(token_ids)]
                end = int(enough[-1] if len(enough) else ends[0])
                return tuple(token_ids[end : end + num_drafts].tolist())
        return ()

    def note(self, num_drafts: int, num_accepted: int) -> None:
        """Adapts to how many of the last draft tokens were accepted."""
        if num_accepted == num_drafts:
            if num_drafts == self._num_drafts:
                self._num_drafts *= 2
        elif num_accepted < num_drafts / 2:
            if num_accepted == 0 and self._num_drafts == 1:
                self._resume_at = self._num_tokens + _PAUSE
            self._num_drafts = max(self._num_drafts // 2, 1)


def _earlier_ends(token_ids: NDArray[np.int64], length: int) -> NDArray[np.intp]:
    """Where earlier occurrences of the last ``length`` tokens end, in ascending order."""
    num_starts = len(token_ids) - length
    if num_starts < 1:
        return np.empty(0, np.intp)
    matches = np.ones(num_starts, np.bool_)
    for i in range(length):
        matches &= token_ids[i : i + num_starts] == token_ids[i - length]
    return np.flatnonzero(matches) + length
