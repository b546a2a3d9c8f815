"""ForcedText: draft tokens of the text that a grammar has to go on with, such as JSON's keys."""

from maskdial.causal.sequence import Sequence
from maskdial.metrics import DraftKind


class ForcedText:
    """Proposes the tokens into which the tokenizer divides a grammar's only possible text.

    The model may divide it in another way, which the grammar allows as well.
    """

    kind: DraftKind = "grammar"

    def serves(self, sequence: Sequence) -> bool:
        """Whether the sequence has a grammar, whose text is known to go on in one way."""
        return sequence.grammar is not None and bool(sequence.grammar.forced)

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See `maskdial.causal.drafts.draft.Proposer`."""
        return () if sequence.grammar is None else sequence.grammar.forced[:max_tokens]
