"""Batcher: which waiting texts run together.

A pass computes ``longest * count`` tokens, so this product limits a batch, not its count, and a
batch is made of texts of similar length. The oldest waiting text leads each batch and the others
are chosen around its length, so no text waits for more passes than there are older texts.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class Entry(Protocol):
    """What the batcher needs of a text. Entries are compared by identity."""

    @property
    def length(self) -> int: ...

    def __hash__(self) -> int: ...


EntryT = TypeVar("EntryT", bound=Entry)

# A pass has a fixed cost, for BERT-base in int8 on two cores that of about 17 tokens (7 ms, beside
# 0.4 ms per token). That much padding costs no more than another pass. In a large batch, padding is
# limited to a thirty-second of the valid tokens.
_FREE_PADDING = 16
_PADDING_SHARE = 32


class Batcher(Generic[EntryT]):
    """The waiting entries, by arrival and by length.

    Adding or removing an entry takes O(log n) for n distinct lengths; the first or last entry of a
    length also shifts the sorted lengths.
    """

    def __init__(self, max_batch_tokens: int) -> None:
        if max_batch_tokens < 1:
            raise ValueError("max_batch_tokens must be at least 1")
        self.max_batch_tokens = max_batch_tokens
        self._by_arrival: OrderedDict[EntryT, None] = OrderedDict()
        self._by_length: dict[int, OrderedDict[EntryT, None]] = {}
        self._lengths: list[int] = []  # the keys of _by_length, ascending

    def __len__(self) -> int:
        return len(self._by_arrival)

    def add(self, entry: EntryT) -> None:
        """Adds an entry to the end of the queue."""
        self._by_arrival[entry] = None
        if entry.length not in self._by_length:
            self._by_length[entry.length] = OrderedDict()
            insort(self._lengths, entry.length)
        self._by_length[entry.length][entry] = None

    def discard(self, entry: EntryT) -> bool:
        """Removes an entry from the queue; False if it does not wait any more."""
        if entry not in self._by_arrival:
            return False
        del self._by_arrival[entry]
        alike = self._by_length[entry.length]
        del alike[entry]
        if not alike:
            del self._by_length[entry.length]
            del self._lengths[bisect_left(self._lengths, entry.length)]
        return True

    def clear(self) -> list[EntryT]:
        """Removes and returns all entries, oldest first."""
        entries = list(self._by_arrival)
        self._by_arrival.clear()
        self._by_length.clear()
        self._lengths.clear()
        return entries

    def next_batch(self) -> list[EntryT]:
        """Removes and returns the next batch, led by the oldest entry; empty if none waits.

        ``longest * count`` is at most ``max_batch_tokens``; a single longer text runs alone.
        """
        if not self._by_arrival:
            return []
        leader = next(iter(self._by_arrival))
        self.discard(leader)
        batch = [leader]
        longest = num_tokens = leader.length
        while True:
            length = self._nearest(leader.length, longest, num_tokens, len(batch) + 1)
            if length is None:
                return batch
            oldest = next(iter(self._by_length[length]))
            self.discard(oldest)
            batch.append(oldest)
            longest = max(longest, length)
            num_tokens += length

    def _nearest(self, center: int, longest: int, num_tokens: int, count: int) -> int | None:
        """The waiting length nearest to ``center`` that may join a batch as its count-th text."""
        above = bisect_left(self._lengths, center)
        near = [
            length
            for length in self._lengths[max(above - 1, 0) : above + 1]
            if self._allows(max(longest, length) * count, num_tokens + length)
        ]
        # Of two at the same distance, the shorter pads only itself, the longer all others.
        return min(near, key=lambda length: (abs(length - center), length), default=None)

    def _allows(self, padded_tokens: int, num_tokens: int) -> bool:
        return padded_tokens <= self.max_batch_tokens and padded_tokens - num_tokens <= max(
            _FREE_PADDING, num_tokens // _PADDING_SHARE
        )
