"""Guess: what one proposer, or a draft model, expects of a text."""

from maskdial.causal.drafts.draft import Reader
from maskdial.causal.drafts.record import Record
from maskdial.causal.sequence import Sequence
from maskdial.metrics import DraftKind


class Guess:
    """The tokens that are expected to follow, from pass to pass.

    Whether a pass verifies them or not, they are compared with what comes.

    Args:
        kind: of the draft tokens.
        reader: who proposes them; None if a draft model writes them.
        record: how often they were right in this text.
    """

    __slots__ = ("_position", "_reader", "kind", "record", "token_ids")

    def __init__(self, kind: DraftKind, reader: Reader | None, record: Record) -> None:
        self.kind = kind
        self._reader = reader
        self.record = record
        self.token_ids: tuple[int, ...] = ()
        """The tokens that it expects."""
        self._position = 0

    @property
    def first_rate(self) -> float:
        """How probable it is that the first of its tokens is right."""
        return self.record.first_rate

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See `Reader`."""
        return () if self._reader is None else self._reader.propose(sequence, max_tokens)

    def expect(self, position: int, token_ids: tuple[int, ...]) -> None:
        """Takes the tokens that are expected from a position of the text on."""
        self.token_ids, self._position = token_ids, position

    def check(self, sequence: Sequence) -> None:
        """Compares what was expected with the tokens that have come."""
        come = sequence.token_ids[self._position :].tolist()
        num_right = count_right(come, self.token_ids)
        self.record.note(num_right, int(num_right < min(len(come), len(self.token_ids))))
        self.token_ids = ()


def count_right(token_ids: list[int], expected: tuple[int, ...]) -> int:
    """How many tokens are the expected ones, up to the first that is not."""
    for index, (one, other) in enumerate(zip(token_ids, expected, strict=False)):
        if one != other:
            return index
    return min(len(token_ids), len(expected))
