"""PromptLookup: draft tokens from the text itself."""

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.sequence import Sequence
from maskdial.metrics import DraftKind

LONGEST_NGRAM = 8
_SHORTEST_NGRAM = 3


class PromptLookup:
    """Prompt-lookup decoding (Saxena 2023, "Prompt Lookup Decoding").

    If the last few tokens occur earlier in the text, the tokens that followed them there become
    draft tokens, which works well for copies, quotes and summaries.
    """

    kind: DraftKind = "prompt"

    def serves(self, sequence: Sequence) -> bool:
        """Any text may repeat itself."""
        return True

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
