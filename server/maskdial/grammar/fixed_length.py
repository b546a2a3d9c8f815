"""FixedLength: texts of a given number of tokens that a grammar accepts in full.

llguidance's parser reads from left to right, and does not say when two of its states are the same.
So whether a text can end after exactly so many more tokens is found by a search for one that does.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import partial
from typing import TypeVar

import numpy as np

from maskdial.errors import ValidationError
from maskdial.grammar.masks import CPU_SECONDS, MaskThreads
from maskdial.grammar.memory import Hold
from maskdial.grammar.place import Place
from maskdial.grammar.source import grammar_error
from maskdial.grammar.vocabulary import Vocabulary

T = TypeVar("T")
Tokens = tuple[int, ...]

_MAX_TRIED = 64  # of the tokens that may follow at a place
_MAX_RECENT = 8


class FixedLength:
    """A grammar, for blanks of one request whose numbers of tokens are given. For one thread at a
    time.

    That a text can be completed is never said without a completion at hand. Completions are
    overlooked only behind a place where more than 64 tokens may follow, of which 64 of different
    lengths are tried, or if two texts of as many bytes, after which the same tokens may follow,
    differ in what comes later.

    Args:
        start: of the grammar and of a text; of this object's own.
        vocabulary: the model's.
        threads: where it searches.
        excluded: tokens that are not written.
        hold: keeps the grammar's memory counted.
    """

    def __init__(
        self,
        start: Place,
        vocabulary: Vocabulary,
        threads: MaskThreads,
        *,
        excluded: Collection[int],
        hold: Hold,
    ) -> None:
        self._start = start
        self._vocabulary = vocabulary
        self._threads = threads
        self._excluded = np.fromiter(excluded, np.intp, len(excluded))
        self._hold = hold
        self._seconds = 0.0
        self._completes: dict[tuple[Tokens, int], bool] = {}
        self._next: dict[Tokens, Tokens] = {}
        self._tokens: dict[tuple[bytes, bool], Tokens] = {}
        self._turns: dict[tuple[bytes, bool], Tokens] = {}
        self._failed: set[tuple[int, bool, bytes, int]] = set()
        # By number of tokens; latest use last.
        self._recent: dict[int, OrderedDict[Tokens, None]] = {}

    def lengths(self, max_length: int) -> list[int]:
        """The numbers of tokens, up to ``max_length``, of which a text is found; ascending.

        Raises:
            ValidationError: the search takes too long.
        """
        return [length for length in range(1, max_length + 1) if self.completes((), length)]

    def next_tokens(self, before: Tokens) -> Tokens:
        """The tokens that the grammar allows after others, ascending.

        Raises:
            ValidationError: it takes too long to find them.
        """
        found = self._next.get(before)
        if found is None:
            found = self._next[before] = self._run(lambda: self._following(self._after(before)))
        return found

    def completes(self, before: Tokens, num_left: int) -> bool:
        """Whether a text of ``num_left`` more tokens is found that the grammar accepts in full.

        ``before`` are tokens that it allows.

        Raises:
            ValidationError: the search takes too long.
        """
        known = self._completes.get((before, num_left))
        if known is not None:
            return known
        rest = self._run(partial(self._search, before, num_left))
        self._completes[before, num_left] = rest is not None
        # So each text that is completed token by token has a next one.
        for at in range(1, len(rest or ()) + 1):
            assert rest is not None
            self._completes[(*before, *rest[:at]), num_left - at] = True
        return rest is not None

    def _run(self, work: Callable[[], T]) -> T:
        """Does work on a thread for masks, which is given up if it does not end."""

        def timed() -> tuple[T, float]:
            began = time.thread_time()
            result = work()
            return result, time.thread_time() - began

        result, seconds = self._threads.submit(timed).result()
        self._seconds += seconds
        if self._seconds > CPU_SECONDS:
            raise ValidationError(
                "finding the tokens that the grammar allows in blanks takes more than "
                f"{CPU_SECONDS:g} s; send a simpler one, or allow fewer tokens"
            )
        return result

    def _after(self, before: Tokens) -> Place:
        place = self._start.copy()
        if not place.read_all(before):
            raise grammar_error(place.error() or "a text that it allows is too long")
        return place

    def _mask(self, place: Place) -> bytes:
        """Of the tokens that may follow; empty if none may."""
        return b"" if place.must_end else place.mask()

    def _following(self, place: Place) -> Tokens:
        return self._allowed(place, self._mask(place))

    def _allowed(self, place: Place, mask: bytes) -> Tokens:
        """The tokens of a place's mask, ascending."""
        key = mask, place.first
        if mask and key not in self._tokens:
            allowed = place.unpack(mask, with_special=False).copy()
            allowed[self._vocabulary.eos_token_ids] = False
            allowed[self._excluded] = False
            self._tokens[key] = tuple(np.flatnonzero(allowed).tolist())
        return self._tokens.get(key, ())

    def _search(self, before: Tokens, num_left: int) -> Tokens | None:
        return self._complete(self._after(before), self._vocabulary.num_bytes(before), num_left)

    def _complete(self, place: Place, num_bytes: int, num_left: int) -> Tokens | None:
        """So many tokens with which a text of ``num_bytes`` ends; None if none are found."""
        if num_left == 0:
            return () if place.may_end else None
        recent = self._recent.setdefault(num_left, OrderedDict())
        for tokens in reversed(recent):
            copy = place.copy()
            if copy.read_all(tokens) and copy.may_end:
                recent.move_to_end(tokens)
                return tokens
        mask = self._mask(place)
        key = num_bytes, place.first, mask, num_left
        if key in self._failed:
            return None
        lengths = self._vocabulary.lengths
        for token in self._tried(place, mask):
            copy = place.copy()
            copy.read(token)
            length = self._vocabulary.num_bytes((token,)) if place.first else lengths[token]
            rest = self._complete(copy, num_bytes + int(length), num_left - 1)
            if rest is not None:
                recent[token, *rest] = None
                if len(recent) > _MAX_RECENT:
                    recent.popitem(last=False)
                return (token, *rest)
        self._failed.add(key)
        return None

    def _tried(self, place: Place, mask: bytes) -> Tokens:
        """Those of a mask's tokens that a search tries: one of each number of bytes, the fewest
        first, then another; those without letters and digits, which may end a part, before others.
        """
        key = mask, place.first
        if key not in self._turns:
            tokens = np.array(self._allowed(place, mask), np.intp)
            lengths = self._vocabulary.lengths[tokens]
            order = np.lexsort((self._vocabulary.has_letters[tokens], lengths))
            _, firsts, counts = np.unique(lengths[order], return_index=True, return_counts=True)
            turns = np.arange(len(tokens)) - np.repeat(firsts, counts)
            in_turn = tokens[order[np.argsort(turns, kind="stable")]]
            self._turns[key] = tuple(in_turn[:_MAX_TRIED].tolist())
        return self._turns[key]
