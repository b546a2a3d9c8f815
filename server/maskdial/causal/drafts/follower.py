"""Follower: a place in some tokens, its source, that a text follows."""

import numpy as np
from numpy.typing import NDArray

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
