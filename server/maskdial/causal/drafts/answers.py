"""Answers: draft tokens from earlier answers of the model, which agents and retrieval repeat."""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.drafts.follower import Follower
from maskdial.causal.sequence import Sequence
from maskdial.metrics import DraftKind

MAX_TOKENS = 65_536
"""Of all answers that are kept; each one takes some 350 bytes."""

_NGRAM = 4
_SHORTEST = 8  # tokens of an answer that is worth keeping

_Owner = tuple[str, str]
"""Whose an answer is: the cache salt, and the key's name."""
_Places = dict[bytes, tuple[int, int]]
"""By four tokens, the number of the latest text that has them, and the place after them."""


class Answers:
    """Proposes what followed a text's last four tokens in an earlier answer, the latest one.

    As with the prefix cache, how fast a text comes tells what was written before. So an answer
    helps only requests of the same cache salt and the same key.

    Args:
        shared: whether it helps those of other keys as well.
        max_tokens: of all answers; the oldest are forgotten.
    """

    kind: DraftKind = "answers"

    def __init__(self, *, shared: bool = False, max_tokens: int = MAX_TOKENS) -> None:
        self._shared = shared
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._texts: OrderedDict[int, tuple[_Owner, NDArray[np.int64]]] = OrderedDict()
        self._places: dict[_Owner, _Places] = {}
        self._num_learned = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers that are kept."""
        return self._num_tokens

    def learn(self, sequence: Sequence) -> None:
        """Keeps the answer of a sequence that has finished."""
        if not _SHORTEST <= sequence.num_generated <= self._max_tokens - _NGRAM:
            return
        # The prompt's end belongs to the answer's beginning.
        text = sequence.token_ids[max(sequence.num_prompt + 1 - _NGRAM, 0) :].copy()
        owner, number = self.owner(sequence), self._num_learned
        self._num_learned += 1
        self._texts[number] = owner, text
        self._num_tokens += len(text)
        places = self._places.setdefault(owner, {})
        for place, gram in enumerate(_grams(text), _NGRAM):
            places[gram] = number, place
        while self._num_tokens > self._max_tokens:
            self._forget()

    def reader(self, sequence: Sequence) -> "_Reader":
        """See `maskdial.causal.drafts.draft.Proposer`: what is learned later helps as well."""
        return _Reader(self, sequence)

    def find(self, owner: _Owner, last: NDArray[np.int64]) -> Follower | None:
        """Follows the latest answer that has some four tokens, int64 (4,)."""
        places = self._places.get(owner)
        found = None if places is None else places.get(last.tobytes())
        if found is None:
            return None
        number, place = found
        return Follower(self._texts[number][1], place)

    def owner(self, sequence: Sequence) -> _Owner:
        """Whose answers help a sequence."""
        return sequence.cache_salt, "" if self._shared else sequence.usage.key

    def _forget(self) -> None:
        """Forgets the oldest answer, and the places in it that no later one has."""
        number, (owner, text) = self._texts.popitem(last=False)
        self._num_tokens -= len(text)
        places = self._places[owner]
        for gram in _grams(text):
            if places.get(gram, (-1, 0))[0] == number:
                del places[gram]
        if not places:
            del self._places[owner]


class _Reader:
    """Follows a text through an earlier answer."""

    def __init__(self, answers: Answers, sequence: Sequence) -> None:
        self._answers = answers
        self._owner = answers.owner(sequence)
        self._num_tokens = sequence.num_tokens
        self._follower: Follower | None = None

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See `maskdial.causal.drafts.draft.Reader`."""
        goes_on = False
        if self._follower is not None:
            for token_id in sequence.token_ids[self._num_tokens :].tolist():
                goes_on = self._follower.push(token_id)
            self._num_tokens = sequence.num_tokens
        if not goes_on:
            found = self._answers.find(self._owner, sequence.token_ids[-_NGRAM:])
            if found is not None:
                self._follower, self._num_tokens = found, sequence.num_tokens
        return () if self._follower is None else self._follower.following(max_tokens)


def _grams(text: NDArray[np.int64]) -> list[bytes]:
    """Each four tokens of a text that another one follows."""
    data, size = text.tobytes(), text.itemsize
    return [data[(end - _NGRAM) * size : end * size] for end in range(_NGRAM, len(text))]
