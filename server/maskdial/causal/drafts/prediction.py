"""Prediction: draft tokens from a text that the client expects, as OpenAI's Predicted Outputs."""

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.drafts.follower import LONGEST_NGRAM, Follower, Grams, find_place
from maskdial.causal.sequence import Sequence
from maskdial.metrics import DraftKind


class PredictionFollower:
    """Follows a text through a predicted one. After a token that was not predicted, it goes on
    where the text's last tokens are found.

    Args:
        prediction: int64 (num_predicted,).
    """

    def __init__(self, prediction: NDArray[np.int64]) -> None:
        self._prediction = prediction
        self._follower, self._grams = Follower(prediction), Grams(prediction)
        self._last: list[int] = []
        self.num_right = 0
        """Tokens of the text that were predicted."""

    @property
    def num_wrong(self) -> int:
        """Tokens of the prediction that are not in the text so far."""
        return max(len(self._prediction) - self.num_right, 0)

    def push(self, token_id: int) -> None:
        """Takes the text's next token."""
        self._last = [*self._last[1 - LONGEST_NGRAM :], token_id]
        goes_on, occurs = self._follower.push(token_id), self._grams.has(token_id)
        self.num_right += goes_on
        if occurs and not goes_on:
            place = find_place(self._prediction, np.array(self._last, np.int64))
            if place:
                self._follower.go_to(place)

    def following(self, max_tokens: int) -> tuple[int, ...]:
        """At most ``max_tokens`` tokens that are predicted to follow."""
        return self._follower.following(max_tokens)


class Prediction:
    """Proposes what the prediction of a sequence has after the text so far."""

    kind: DraftKind = "prediction"

    def reader(self, sequence: Sequence) -> "_Reader | None":
        """See `maskdial.causal.drafts.draft.Proposer`: only if its client has sent one."""
        return _Reader(sequence) if len(sequence.prediction) else None


class _Reader:
    """Follows a text through its prediction."""

    def __init__(self, sequence: Sequence) -> None:
        self._follower = PredictionFollower(sequence.prediction)
        self._num_pushed = 0

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See `maskdial.causal.drafts.draft.Reader`."""
        for token_id in sequence.generated_ids[self._num_pushed :].tolist():
            self._follower.push(token_id)
        self._num_pushed = sequence.num_generated
        return self._follower.following(max_tokens)
