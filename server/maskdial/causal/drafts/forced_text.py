"""ForcedText: draft tokens of the text that a grammar has to go on with, such as JSON's keys."""

from maskdial.causal.sequence import Sequence
from maskdial.metrics import DraftKind


class ForcedText:
    """Proposes the tokens into which the tokenizer divides a grammar's only possible text.

    The model may divide it in another way, which the grammar allows as well.
    """

    kind: DraftKind = "grammar"

    def reader(self, sequence: Sequence) -> "ForcedText | None":
        """See `maskdial.causal.drafts.draft.Proposer`: only of a sequence with a grammar."""
        return None if sequence.grammar is None else self

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See `maskdial.causal.drafts.draft.Reader`."""
        return () if sequence.grammar is None else sequence.grammar.forced[:max_tokens]
