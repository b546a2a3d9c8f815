"""Draft: tokens that a sequence may go on with, for the next pass to verify; and who proposes them.

The token at a position is a function of its logits, the seed and the position. So a draft token is
right exactly if it is the token that a step of its own would have given, drawn or not.
"""

from dataclasses import dataclass
from typing import Protocol

from maskdial.causal.sequence import Sequence
from maskdial.metrics import DraftKind


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens to follow a sequence's newest one, perhaps none, and where they come from."""

    token_ids: tuple[int, ...] = ()
    kind: DraftKind = "prompt"

    def __len__(self) -> int:
        return len(self.token_ids)


NO_DRAFT = Draft()


class Proposer(Protocol):
    """A source of draft tokens."""

    @property
    def kind(self) -> DraftKind: ...
    def serves(self, sequence: Sequence) -> bool:
        """Whether it may ever have some for a sequence; a cheap question."""

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """What probably follows the sequence's newest token.

        Args:
            sequence: one that decodes; it is not changed.
            max_tokens: at least 1.

        Returns:
            At most ``max_tokens`` token ids, the first of them as likely as possible.
        """
