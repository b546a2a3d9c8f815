"""Piece: tokens of a text that a pass reads."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Piece(NamedTuple):
    """Tokens of a text that a pass reads.

    Attributes:
        slot: whose first ``start`` tokens are in the cache.
        token_ids: int64 (num_tokens,), at least one.
        start: position of the first of them.
        rows: int64 (num_logits,), the places among them of those to compute logits for.
        ahead: int64 (num_tokens,), how many of the tokens behind it each one sees, none less far
            than the one before it. None: none sees any, as under the causal mask.
        previous_hidden: float32 (num_tokens, hidden_size), the hidden states of the tokens before
            them; of a graph for multi-token prediction, with every piece.
    """

    slot: int
    token_ids: NDArray[np.int64]
    start: int
    rows: NDArray[np.int64]
    ahead: NDArray[np.int64] | None = None
    previous_hidden: NDArray[np.float32] | None = None

    @classmethod
    def of(
        cls,
        slot: int,
        token_ids: NDArray[np.int64],
        start: int,
        num_logits: int = 1,
        ahead: NDArray[np.int64] | None = None,
    ) -> "Piece":
        """With logits for the last tokens."""
        size = len(token_ids)
        return cls(slot, token_ids, start, np.arange(size - num_logits, size), ahead)
