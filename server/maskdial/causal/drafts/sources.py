"""Where draft tokens come from, other than from a model: grammar, prediction, text, answers.

A draft token may be what a sequence goes on with, for the next pass to verify. The token at a
position is a function of its logits, the seed and the position. So a draft token is right exactly
if it is the token that a step of its own would have given, drawn or not.
"""

from collections import OrderedDict
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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


LONGEST_NGRAM = 8
"""Tokens of which `find_place` compares the last ones."""

_SHORTEST_NGRAM = 3
_THREE_TOKENS = (1 << 63) - 1
_NEAR = 4  # tokens


class Follower:
    """Follows a text through its source, token by token.

    After a token that is not the source's, the next ones are looked for a few tokens around, since
    edits replace, leave out or add some. While none is there, the follower has no place, until it
    is given another.

    Args:
        source: int64 (num_tokens,); it may be replaced by a longer one with the same beginning.
        place: what the text's next token is in it; at its end, there is none.
    """

    __slots__ = ("_num_missed", "_place", "source")

    def __init__(self, source: NDArray[np.int64], place: int = 0) -> None:
        self.source = source
        self._place = place
        self._num_missed = 0 if place < len(source) else _NEAR

    def push(self, token_id: int) -> bool:
        """Takes the text's next token; whether it is the source's."""
        source, place, num_missed = self.source, self._place, self._num_missed
        if num_missed == _NEAR:
            return False
        if not num_missed and place < len(source) and source[place] == token_id:
            self._place = place + 1
            return True
        near = source[place : place + 2 * _NEAR].tolist()
        if num_missed < len(near) and near[num_missed] == token_id:
            self.go_to(place + num_missed + 1)  # as many were replaced
        elif token_id in near:
            self.go_to(place + near.index(token_id) + 1)  # some were left out or added
        else:
            self._num_missed += 1
        return False

    def go_to(self, place: int) -> None:
        """Follows from another place on."""
        self._place = place
        self._num_missed = 0

    def following(self, max_tokens: int) -> tuple[int, ...]:
        """At most ``max_tokens`` tokens that are expected to follow."""
        if self._num_missed:
            return ()
        return tuple(self.source[self._place : self._place + max_tokens].tolist())


class Grams:
    """Which three adjacent tokens a text has; where none comes again, nothing is to be found.

    Args:
        token_ids: int64 (num_tokens,), the text.
    """

    __slots__ = ("_found", "_last")

    def __init__(self, token_ids: NDArray[np.int64]) -> None:
        numbers = (token_ids[:-2] << 42) ^ (token_ids[1:-1] << 21) ^ token_ids[2:]
        self._found: set[int] = set(numbers.tolist())
        self._last = 0
        for token_id in token_ids[-_SHORTEST_NGRAM:].tolist():
            self.has(token_id)

    def has(self, token_id: int) -> bool:
        """Reads on; whether the token and the two before it are here."""
        self._last = ((self._last << 21) ^ token_id) & _THREE_TOKENS
        return self._last in self._found

    def add(self, token_id: int) -> bool:
        """Adds the text's next token; whether it and the two before it were here."""
        repeats = self.has(token_id)
        if not repeats:
            self._found.add(self._last)
        return repeats


def find_place(text: NDArray[np.int64], beginning: NDArray[np.int64]) -> int:
    """Where ``text`` goes on after the last tokens of a beginning.

    A longer match counts more than a later one.

    Args:
        text: int64 (num_tokens,).
        beginning: int64 (num_tokens,), which may be the text itself.

    Returns:
        The place after the last match of the last eight tokens, or of three at least; 0 if there
        is none that another token follows.
    """
    if len(beginning) < _SHORTEST_NGRAM:
        return 0
    # Few places have the last token, so the other tokens are compared there only.
    places = (text[1:-1] == beginning[-1]).nonzero()[0] + 1
    found = 0
    for length in range(2, min(LONGEST_NGRAM, len(beginning)) + 1):
        if not len(places) or places[0] < length - 1:
            places = places[places >= length - 1]
        places = places[text[places - length + 1] == beginning[-length]]
        if not len(places):
            break
        if length >= _SHORTEST_NGRAM:
            found = int(places[-1]) + 1
            if len(places) == 1:
                break
    return found


class ForcedText:
    """Proposes the tokens into which the tokenizer divides a grammar's only possible text.

    The model may divide it in another way, which the grammar allows as well.
    """

    kind: DraftKind = "grammar"

    def reader(self, sequence: Sequence) -> "ForcedText | None":
        """See `Proposer`: only of a sequence with a grammar."""
        return None if sequence.grammar is None else self

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See `Reader`."""
        return () if sequence.grammar is None else sequence.grammar.forced[:max_tokens]


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

    def reader(self, sequence: Sequence) -> "_PredictionReader | None":
        """See `Proposer`: only if its client has sent one."""
        return _PredictionReader(sequence) if len(sequence.prediction) else None


class _PredictionReader:
    """Follows a text through its prediction."""

    def __init__(self, sequence: Sequence) -> None:
        self._follower = PredictionFollower(sequence.prediction)
        self._num_pushed = 0

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See `Reader`."""
        for token_id in sequence.generated_ids[self._num_pushed :].tolist():
            self._follower.push(token_id)
        self._num_pushed = sequence.num_generated
        return self._follower.following(max_tokens)


class PromptLookup:
    """Prompt-lookup decoding (Saxena 2023, "Prompt Lookup Decoding").

    If the last few tokens occur earlier in the text, the tokens that followed them there become
    draft tokens, which works well for copies, edits, quotes and summaries.
    """

    kind: DraftKind = "prompt"

    def reader(self, sequence: Sequence) -> "_LookupReader":
        """See `Proposer`: any text may repeat itself."""
        return _LookupReader(sequence)


class _LookupReader:
    """Follows a text through its own earlier tokens."""

    __slots__ = ("_follower", "_grams", "_num_tokens")

    def __init__(self, sequence: Sequence) -> None:
        self._num_tokens = sequence.num_tokens - 1
        before = sequence.token_ids[: self._num_tokens]
        self._grams = Grams(before)
        self._follower = Follower(before, self._num_tokens)

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See `Reader`."""
        follower, start, text = self._follower, self._num_tokens, sequence.token_ids
        self._num_tokens = len(text)
        for end, token_id in enumerate(text[start:].tolist(), start + 1):
            follower.source = text[: end - 1]  # not the token itself
            goes_on = follower.push(token_id)
            if self._grams.add(token_id) and not goes_on:
                place = find_place(text[:end], text[:end])
                if place:
                    follower.go_to(place)
        follower.source = text
        following = follower.following(max_tokens)
        while following and len(following) < max_tokens:
            # What has begun to repeat itself goes on to do so.
            following += following[: max_tokens - len(following)]
        return following


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

    def reader(self, sequence: Sequence) -> "_AnswersReader":
        """See `Proposer`: what is learned later helps as well."""
        return _AnswersReader(self, sequence)

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


class _AnswersReader:
    """Follows a text through an earlier answer."""

    def __init__(self, answers: Answers, sequence: Sequence) -> None:
        self._answers = answers
        self._owner = answers.owner(sequence)
        self._num_tokens = sequence.num_tokens
        self._follower: Follower | None = None

    def propose(self, sequence: Sequence, max_tokens: int) -> tuple[int, ...]:
        """See `Reader`."""
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
