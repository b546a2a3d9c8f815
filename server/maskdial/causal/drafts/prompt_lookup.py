"""PromptLookup: draft tokens from the text itself."""

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.sequence import Sequence
from maskdial.metrics import DraftKind

_LONGEST_NGRAM = 3
_SHORTEST_NGRAM = 2


class PromptLookup:
    """Prompt-lookup decoding (Saxena 2023, "Prompt Lookup Decoding").

    If the last few tokens occur earlier in the text, the tokens that followed them there become
    draft tokens, which works well for copies, quotes and summaries.
    """

    kind: DraftKind = "prompt"

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See `maskdial.causal.drafts.draft.Proposer`."""
        text = sequence.token_ids
        start = find_place(text, text)
        if not start:
            return ()
        # What has begun to repeat itself goes on to do so.
        return tuple(np.resize(text[start:], max_tokens).tolist())


def find_place(text: NDArray[np.int64], beginning: NDArray[np.int64]) -> int:
    """Where ``text`` goes on after the last tokens of a beginning.

    A longer match counts more than a later one.

    Args:
        text: int64 (num_tokens,).
        beginning: int64 (num_tokens,), which may be the text itself.

    Returns:
        The place after the last match of the last three tokens, or of two; 0 if there is none that
        another token follows.
    """
    if len(beginning) < _SHORTEST_NGRAM:
        return 0
    # Few places have the last token, so the other tokens are compared there only.
    ends = np.flatnonzero(text[:-1] == beginning[-1]) + 1
    place = 0
    for length in range(2, min(_LONGEST_NGRAM, len(beginning)) + 1):
        ends = ends[ends >= length]
        ends = ends[text[ends - length] == beginning[-length]]
        if not len(ends):
            break
        place = int(ends[-1])
    return place
