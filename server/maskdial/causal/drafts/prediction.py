"""Prediction: draft tokens from a text that the client expects, as OpenAI's Predicted Outputs."""

from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.drafts.prompt_lookup import LONGEST_NGRAM, find_place
from maskdial.causal.sequence import Sequence
from maskdial.metrics import DraftKind


class Follower:
    """Follows a text through a predicted one. After a token that was not predicted, it goes on
    where the text's last tokens are found.

    Args:
        prediction: int64 (num_predicted,).
        place: what the text's next token is in it.
    """

    def __init__(self, prediction: NDArray[np.int64], place: int = 0) -> None:
        self._prediction = prediction
        self._last: list[int] = []
        self._place = place
        self.num_right = 0
        """Tokens of the text that were predicted."""

    @property
    def num_wrong(self) -> int:
        """Tokens of the prediction that are not in the text so far."""
        return max(len(self._prediction) - self.num_right, 0)

    def push(self, token_id: int) -> None:
        """Takes the text's next token."""
        self._last = [*self._last[1 - LONGEST_NGRAM :], token_id]
        if self._place < len(self._prediction) and self._prediction[self._place] == token_id:
            self.num_right += 1
            self._place += 1
        else:
            found = find_place(self._prediction, np.array(self._last, np.int64))
            self._place = found or len(self._prediction)

    def following(self, max_tokens: int) -> tuple[int, ...]:
        """At most ``max_tokens`` tokens that are predicted to follow."""
        return tuple(self._prediction[self._place : self._place + max_tokens].tolist())


class Prediction:
    """Proposes what the prediction of a sequence has after the text so far."""

    kind: DraftKind = "prediction"

    def __init__(self) -> None:
        self._followers: WeakKeyDictionary[Sequence, Follower] = WeakKeyDictionary()
        self._num_pushed: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()

    def serves(self, sequence: Sequence) -> bool:
        """Whether its client has sent a prediction."""
        return len(sequence.prediction) > 0

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See `maskdial.causal.drafts.draft.Proposer`."""
        follower = self._followers.get(sequence)
        if follower is None:
            follower = self._followers[sequence] = Follower(sequence.prediction)
        new = sequence.generated_ids[self._num_pushed.get(sequence, 0) :]
        for token_id in new.tolist():
            follower.push(token_id)
        self._num_pushed[sequence] = sequence.num_generated
        return follower.following(max_tokens)
