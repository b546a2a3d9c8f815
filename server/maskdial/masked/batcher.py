"""Batcher: which waiting texts run together.

A pass computes ``longest * count`` tokens, so this product limits a batch, not its count, and a
batch is made of texts of similar length. Clients that wait get equal shares of the tokens (see
`maskdial.fairness`): the oldest text of the client whose turn it is leads the batch, and the others
are chosen around its length, that client's first. So no text waits for more passes than its client
has older texts, times the number of clients that wait.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from maskdial.fairness import Shares


class Entry(Protocol):
    """What the batcher needs of a text. Entries are compared by identity."""

    @property
    def length(self) -> int: ...
    @property
    def client(self) -> str: ...

    def __hash__(self) -> int: ...


EntryT = TypeVar("EntryT", bound=Entry)

# A pass has a fixed cost, for BERT-base in int8 on two cores that of about 17 tokens (7 ms, beside
# 0.4 ms per token). That much padding costs no more than another pass. In a large batch, padding is
# limited to a thirty-second of the valid tokens.
_FREE_PADDING = 16
_PADDING_SHARE = 32


class Batcher(Generic[EntryT]):
    """The waiting entries of all clients."""

    def __init__(self, max_batch_tokens: int) -> None:
        if max_batch_tokens < 1:
            raise ValueError("max_batch_tokens must be at least 1")
        self.max_batch_tokens = max_batch_tokens
        self._queues: dict[str, _Queue[EntryT]] = {}  # by client; none is empty
        self._shares = Shares()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def add(self, entry: EntryT) -> None:
        """Adds an entry to the end of its client's queue."""
        if entry.client not in self._queues:
            self._shares.join(entry.client, self._queues)
            self._queues[entry.client] = _Queue()
        self._queues[entry.client].add(entry)

    def discard(self, entry: EntryT) -> bool:
        """Removes an entry from its queue; False if it does not wait any more."""
        queue = self._queues.get(entry.client)
        if queue is None or not queue.discard(entry):
            return False
        self._forget_if_empty(entry.client)
        return True

    def clear(self) -> list[EntryT]:
        """Removes and returns all entries, the oldest of each client first."""
        entries = [entry for queue in self._queues.values() for entry in queue]
        self._queues.clear()
        return entries

    def next_batch(self) -> list[EntryT]:
        """Removes and returns the next batch; empty if no entry waits.

        ``longest * count`` is at most ``max_batch_tokens``; a single longer text runs alone.
        """
        if not self._queues:
            return []
        due = self._shares.first(self._queues)
        leader = next(iter(self._queues[due]))
        batch = _Batch(leader, self.max_batch_tokens)
        self._queues[due].discard(leader)
        for client in (due, *(other for other in self._queues if other != due)):
            batch.fill_from(self._queues[client])
        for entry in batch.entries:
            self._shares.charge(entry.client, entry.length)
        for client in {entry.client for entry in batch.entries}:
            self._forget_if_empty(client)
        return batch.entries

    def _forget_if_empty(self, client: str) -> None:
        if not self._queues[client]:
            del self._queues[client]
            self._shares.prune(self._queues)


class _Queue(Generic[EntryT]):
    """The waiting entries of one client, by arrival and by length.

    Adding or removing an entry takes O(log n) for n distinct lengths; the first or last entry of a
    length also shifts the sorted lengths.
    """

    def __init__(self) -> None:
        self._by_arrival: OrderedDict[EntryT, None] = OrderedDict()
        self._by_length: dict[int, OrderedDict[EntryT, None]] = {}
        self.lengths: list[int] = []  # the keys of _by_length, ascending

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[EntryT]:
        """The entries, oldest first."""
        return iter(self._by_arrival)

    def oldest(self, length: int) -> EntryT:
        """The oldest entry of a length that is in ``lengths``."""
        return next(iter(self._by_length[length]))

    def add(self, entry: EntryT) -> None:
        self._by_arrival[entry] = None
        if entry.length not in self._by_length:
            self._by_length[entry.length] = OrderedDict()
            insort(self.lengths, entry.length)
        self._by_length[entry.length][entry] = None

    def discard(self, entry: EntryT) -> bool:
        if entry not in self._by_arrival:
            return False
        del self._by_arrival[entry]
        alike = self._by_length[entry.length]
        del alike[entry]
        if not alike:
            del self._by_length[entry.length]
            del self.lengths[bisect_left(self.lengths, entry.length)]
        return True


class _Batch(Generic[EntryT]):
    """Entries that run together, around the length of the first."""

    def __init__(self, leader: EntryT, max_tokens: int) -> None:
        self.entries = [leader]
        self._center = self._longest = self._num_tokens = leader.length
        self._max_tokens = max_tokens

    def fill_from(self, queue: _Queue[EntryT]) -> None:
        """Moves as many entries of a queue as fit, the nearest lengths first."""
        while (length := self._nearest(queue.lengths)) is not None:
            entry = queue.oldest(length)
            queue.discard(entry)
            self.entries.append(entry)
            self._longest = max(self._longest, length)
            self._num_tokens += length

    def _nearest(self, lengths: Sequence[int]) -> int | None:
        """The length nearest to the leader's that may join."""
        above = bisect_left(lengths, self._center)
        near = [each for each in lengths[max(above - 1, 0) : above + 1] if self._allows(each)]
        # Of two at the same distance, the shorter pads only itself, the longer all others.
        return min(near, key=lambda each: (abs(each - self._center), each), default=None)

    def _allows(self, length: int) -> bool:
        padded_tokens = max(self._longest, length) * (len(self.entries) + 1)
        num_tokens = self._num_tokens + length
        return padded_tokens <= self._max_tokens and padded_tokens - num_tokens <= max(
            _FREE_PADDING, num_tokens // _PADDING_SHARE
        )
