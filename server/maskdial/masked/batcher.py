"""Batcher: which waiting texts run together.

A pass computes ``longest * count`` tokens, so this product limits a batch, not its count, and a
batch is made of texts of similar length. Waiting clients get equal shares of the tokens (see
`maskdial.engine.fairness`): the oldest text of the client whose turn it is leads the batch, and the
others are chosen around its length, that client's first. Texts with the key of one that is chosen
come along: one computation serves all of them, and they count as one. A text waits for at most
(older texts of its client) x (waiting clients) passes.

A pass cannot be interrupted. So a client with more texts than fill a batch may only fill small ones
as long as other clients come: theirs run in short passes, and wait for the rest of a short one.
"""

import math
import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from maskdial.engine.fairness import Shares


class BatchItem(Protocol):
    """What the batcher needs of a text. Entries are compared by identity; those with one ``key``
    have one length, too.
    """

    @property
    def key(self) -> bytes: ...
    @property
    def length(self) -> int: ...
    @property
    def client(self) -> str: ...

    def __hash__(self) -> int: ...


ItemT = TypeVar("ItemT", bound=BatchItem)

# In a large batch, padding is limited to a thirty-second of the valid tokens.
_PADDING_SHARE = 32
# Of the starter classifier on one core, passes of 512 tokens made the 99th percentile of others'
# single texts 4 times what it was alone, passes of 128 tokens twice.
_BULK_DIVISOR = 4
_RECENT_SECONDS = 2.0


class Batcher(Generic[ItemT]):
    """The waiting entries of all clients.

    Args:
        max_batch_tokens: maximum number of tokens of a batch, padding included.
        free_padding: the padding of a batch, in tokens, that costs no more than another pass.
        clock: gives the time in seconds.
    """

    def __init__(
        self,
        max_batch_tokens: int,
        free_padding: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_batch_tokens < 1:
            raise ValueError("max_batch_tokens must be at least 1")
        self.max_batch_tokens = max_batch_tokens
        self._free_padding = free_padding
        self._queues: dict[str, _Queue[ItemT]] = {}  # by client; none is empty
        self._equal: dict[bytes, dict[ItemT, None]] = {}  # those that wait, by their key
        self._shares = Shares()
        self._clock = clock
        self._came_at: OrderedDict[str, float] = OrderedDict()  # by client, the oldest first

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, entry: ItemT) -> None:
        """Adds an entry to the end of its client's queue."""
        if entry.client not in self._queues:
            self._shares.join(entry.client, self._queues)
            self._queues[entry.client] = _Queue()
        self._queues[entry.client].add(entry)
        self._equal.setdefault(entry.key, {})[entry] = None
        now = self._came_at[entry.client] = self._clock()
        self._came_at.move_to_end(entry.client)
        while next(iter(self._came_at.values())) < now - _RECENT_SECONDS:
            self._came_at.popitem(last=False)

    def discard(self, entry: ItemT) -> bool:
        """Removes an entry from its queue; False if it does not wait any more."""
        if entry not in self._equal.get(entry.key, ()):
            return False
        self._remove(entry)
        self._forget_if_empty(entry.client)
        return True

    def clear(self) -> list[ItemT]:
        """Removes and returns all entries, the oldest of each client first."""
        entries = [entry for queue in self._queues.values() for entry in queue]
        self._queues.clear()
        self._equal.clear()
        return entries

    def next_batch(self) -> list[ItemT]:
        """Removes and returns the next batch; empty if no entry waits.

        ``longest * count`` is at most ``max_batch_tokens``, where ``count`` is that of different
        keys; a single longer text runs alone.
        """
        if not self._queues:
            return []
        due = self._shares.first(self._queues)
        leader = next(iter(self._queues[due]))
        limits = {client: self._limit(client) for client in self._queues}
        batch = _Batch(leader, self._free_padding)
        batch.followers += self._take(leader)
        others = (client for client in limits if client != due)
        for client in (due, *sorted(others, key=limits.__getitem__, reverse=True)):
            batch.fill_from(self._queues[client], limits[client], self._take)
        for entry in batch.entries:
            self._shares.charge(entry.client, entry.length)
        entries = batch.entries + batch.followers
        for client in {entry.client for entry in entries}:
            self._forget_if_empty(client)
        return entries

    def _take(self, entry: ItemT) -> list[ItemT]:
        """Removes an entry and those with its key; returns these, oldest first."""
        equal = list(self._equal[entry.key])
        for each in equal:
            self._remove(each)
        equal.remove(entry)
        return equal

    def _remove(self, entry: ItemT) -> None:
        self._queues[entry.client].discard(entry)
        equal = self._equal[entry.key]
        del equal[entry]
        if not equal:
            del self._equal[entry.key]

    def _limit(self, client: str) -> int:
        """The size up to which a client's texts may fill a batch."""
        whole = self.max_batch_tokens
        if self._queues[client].num_tokens <= whole:
            return whole
        others = (at for other, at in reversed(self._came_at.items()) if other != client)
        others_come = next(others, -math.inf) >= self._clock() - _RECENT_SECONDS
        return max(whole // _BULK_DIVISOR, 1) if others_come else whole

    def _forget_if_empty(self, client: str) -> None:
        if not self._queues[client]:
            del self._queues[client]
            self._shares.prune(self._queues)


class _Queue(Generic[ItemT]):
    """The waiting entries of one client, by arrival and by length.

    Adding or removing an entry takes O(log n) for n distinct lengths; the first or last entry of a
    length also shifts the sorted lengths.
    """

    def __init__(self) -> None:
        self._by_arrival: OrderedDict[ItemT, None] = OrderedDict()
        self._by_length: dict[int, OrderedDict[ItemT, None]] = {}
        self.lengths: list[int] = []  # the keys of _by_length, ascending
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[ItemT]:
        """The entries of the queue, oldest first."""
        return iter(self._by_arrival)

    def oldest(self, length: int) -> ItemT:
        """The oldest entry of a length that is in ``lengths``."""
        return next(iter(self._by_length[length]))

    def add(self, entry: ItemT) -> None:
        self._by_arrival[entry] = None
        self.num_tokens += entry.length
        if entry.length not in self._by_length:
            self._by_length[entry.length] = OrderedDict()
            insort(self.lengths, entry.length)
        self._by_length[entry.length][entry] = None

    def discard(self, entry: ItemT) -> None:
        del self._by_arrival[entry]
        self.num_tokens -= entry.length
        alike = self._by_length[entry.length]
        del alike[entry]
        if not alike:
            del self._by_length[entry.length]
            del self.lengths[bisect_left(self.lengths, entry.length)]


class _Batch(Generic[ItemT]):
    """Entries that run together, around the length of the first; ``followers`` have their keys."""

    def __init__(self, leader: ItemT, free_padding: int) -> None:
        self._free_padding = free_padding
        self.entries = [leader]
        self.followers: list[ItemT] = []
        self._center = self._longest = self._num_tokens = leader.length

    def fill_from(
        self, queue: _Queue[ItemT], max_tokens: int, take: Callable[[ItemT], list[ItemT]]
    ) -> None:
        """Takes as many entries of a queue as fit, the nearest lengths first."""
        while (length := self._nearest(queue.lengths, max_tokens)) is not None:
            entry = queue.oldest(length)
            self.followers += take(entry)
            self.entries.append(entry)
            self._longest = max(self._longest, length)
            self._num_tokens += length

    def _nearest(self, lengths: Sequence[int], max_tokens: int) -> int | None:
        """The length nearest to the leader's that may join."""
        above = bisect_left(lengths, self._center)
        nearest = lengths[max(above - 1, 0) : above + 1]
        near = [each for each in nearest if self._allows(each, max_tokens)]
        # Of two at the same distance, the shorter pads only itself, the longer all others.
        return min(near, key=lambda each: (abs(each - self._center), each), default=None)

    def _allows(self, length: int, max_tokens: int) -> bool:
        padded_tokens = max(self._longest, length) * (len(self.entries) + 1)
        num_tokens = self._num_tokens + length
        return padded_tokens <= max_tokens and padded_tokens - num_tokens <= max(
            self._free_padding, num_tokens // _PADDING_SHARE
        )
