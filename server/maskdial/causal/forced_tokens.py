"""ForcedTokens: a constraint that allows one token per step, to score a given text."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class ForcedTokens:
    """Has a sequence generate exactly the given tokens; see `maskdial.causal.sequence.Constraint`.

    The log-probabilities that the reader receives are those of the unconstrained model.

    Args:
        token_ids: at least one; ``max_new_tokens`` must be their number.
        vocab_size: of the model.
    """

    finished = False
    ready = True

    def __init__(self, token_ids: Sequence[int], vocab_size: int) -> None:
        self._left = list(reversed(token_ids))
        self._vocab_size = vocab_size

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that are left."""
        return tuple(reversed(self._left))

    def prepare(self, drafts: tuple[int, ...] = ()) -> None:
        """No mask needs preparation."""

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of some tokens, from the first, are the next ones."""
        pairs = zip(token_ids, reversed(self._left), strict=False)
        return next((i for i, (one, other) in enumerate(pairs) if one != other), len(token_ids))

    def wait(self, seconds: float) -> None:
        """Returns at once."""

    def allowed(self) -> NDArray[np.bool_]:
        """True for the next token only, bool (vocab_size,)."""
        mask = np.zeros(self._vocab_size, np.bool_)
        mask[self._left[-1]] = True
        return mask

    def accept(self, token_id: int) -> None:
        """Goes on to the following token."""
        self._left.pop()
