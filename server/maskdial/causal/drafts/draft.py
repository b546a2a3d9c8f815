"""Draft: tokens that a sequence may go on with, for the next pass to verify; and who proposes them.

The token at a position is a function of its logits, the seed and the position. So a draft token is
right exactly if it is the token that a step of its own would have given, drawn or not.
"""

from typing import Protocol

from maskdial.causal.sequence import Sequence
from maskdial.metrics import DraftKind


class Reader(Protocol):
    """Proposes draft tokens for one text. It is asked after each pass, so it has to be quick."""

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """What probably follows the text's newest token.

        Args:
            sequence: the text's, which decodes; it is not changed.
            max_tokens: at least 1.

        Returns:
            At most ``max_tokens`` token ids, the first of them as likely as possible.
        """


class Proposer(Protocol):
    """A source of draft tokens."""

    @property
    def kind(self) -> DraftKind: ...
    def reader(self, sequence: Sequence) -> Reader | None:
        """Who proposes for a sequence that begins to decode; None if nobody ever will."""
