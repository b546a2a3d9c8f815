"""DiskTier: a model's prefix cache on disk, below the one in memory."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.prefix_cache import PrefixCache, digest_of, previous_of
from maskdial.causal.prefix_disk.record import Header, Owner, Part
from maskdial.causal.prefix_disk.store import DiskStore
from maskdial.causal.prefix_disk.throughput import Throughput

_BLOCK: Part = "block"
_STATES: Part = "states"
_STATE_TYPE = np.dtype(np.float32)

_MAX_FETCHES = 4  # at a time, so that what is fetched is not evicted by what comes next
_LEAST_PATIENCE = 0.5  # seconds
_UNKNOWN_PATIENCE = 30.0  # seconds, of a model that has not read a prompt yet


@dataclass(eq=False, slots=True)
class Fetch:
    """Blocks on their way from the disk to memory.

    Attributes:
        wanted: the keys of the blocks, in order; for the last one perhaps a second time, for the
            states after it.
        gives_up_at: when nobody waits for it any more, in `time.monotonic` seconds. Computing the
            prompt would have taken as long.
        arrays: what was read, in the order of ``wanted``; fewer where something was damaged.
        is_read: whether that is all that there will be.
        is_over: whether it is in memory, or nobody waits for it any more.
    """

    wanted: tuple[tuple[bytes, Part], ...]
    gives_up_at: float
    arrays: list[NDArray[Any]] = field(default_factory=list)
    is_read: bool = False
    is_over: bool = False

    @property
    def is_due(self) -> bool:
        """Whether it is read, or takes too long."""
        return self.is_read or time.monotonic() > self.gives_up_at


@dataclass(frozen=True, slots=True)
class TierReport:
    """What a model's tier has measured, and what follows.

    Attributes:
        bytes_per_token: of keys and values, without states.
        read_bytes_per_second: from the disk, with its checksums; None if nothing was read lately.
        prefill_tokens_per_second: likewise of the model.
        pays: whether blocks are read and written: reading a token's keys and values takes less
            time than computing them, or one of the two was not measured lately.
    """

    bytes_per_token: int
    read_bytes_per_second: float | None
    prefill_tokens_per_second: float | None
    pays: bool


class DiskTier:
    """Keeps the blocks of a model's prefix cache on disk, and brings them back.

    For the engine's thread, but for `report`. Reading and writing are done by the store's threads.

    Args:
        store: where the blocks are, those of other models, too.
        memory: the cache above it.
        model: its name, for those who look at the folder.
        dtype: of a block's elements.
        block_shape: of a block, with its tokens first.
        num_states: elements of the states of recurrent layers, float32.

    Attributes:
        wake: is called in another thread when a fetch is over.
    """

    def __init__(
        self,
        store: DiskStore,
        memory: PrefixCache,
        *,
        model: str,
        dtype: "np.dtype[Any]",
        block_shape: tuple[int, ...],
        num_states: int = 0,
    ) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._store = store
        self._memory = memory
        self._model = model
        self._dtype = dtype
        self._block_shape = block_shape
        self._state_shape = (num_states,)
        self._read = Throughput()
        self._prefilled = Throughput()
        self._fetches: list[Fetch] = []

    @property
    def is_fetching(self) -> bool:
        """Whether there is something to wait for."""
        return any(not fetch.is_due for fetch in self._fetches)

    @property
    def report(self) -> TierReport:
        """What it has measured."""
        return TierReport(
            self._block_bytes // self._memory.block_tokens,
            self._read.per_second,
            self._prefilled.per_second,
            self._pays(self._block_bytes, self._memory.block_tokens),
        )

    @property
    def _state_bytes(self) -> int:
        return math.prod(self._state_shape) * _STATE_TYPE.itemsize

    @property
    def _block_bytes(self) -> int:
        return math.prod(self._block_shape) * self._dtype.itemsize

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Notes how long the model took to read so many tokens of prompts."""
        if num_tokens >= self._memory.block_tokens:  # a pass over few takes as long as over more
            self._prefilled.add(num_tokens, seconds)

    def fetch(self, keys: Sequence[bytes]) -> Fetch | None:
        """Begins to read what the disk has of a prompt beyond what memory has.

        Returns:
            What to wait for before asking again, which may be another prompt's; None if there is
            nothing that is worth waiting for.
        """
        usable = self._memory.num_usable(keys)
        held = self._memory.num_held(keys)
        end = self._reach(keys, held)
        if end <= usable:
            return None
        wanted = [(key, _BLOCK) for key in keys[held:end]]
        if self._memory.needs_states and not self._memory.has_states(keys[end - 1]):
            wanted.append((keys[end - 1], _STATES))
        num_bytes = sum(self._store.size(digest_of(key), part) for key, part in wanted)
        num_tokens = (end - usable) * self._memory.block_tokens
        if not self._pays(num_bytes, num_tokens):
            return None
        for other in self._fetches:
            if wanted[0] in other.wanted:
                return other
        if len(self._fetches) >= _MAX_FETCHES:
            return self._fetches[0]
        rate = self._prefilled.per_second
        patience = _UNKNOWN_PATIENCE if rate is None else max(num_tokens / rate, _LEAST_PATIENCE)
        fetch = Fetch(tuple(wanted), time.monotonic() + patience)
        self._fetches.append(fetch)
        self._store.read_later(lambda: self._run(fetch))
        return fetch

    def restore(self) -> None:
        """Brings to memory what has been read since the last call, and ends what takes too long.

        What it evicts may take milliseconds: call it without a lock.
        """
        for fetch in [each for each in self._fetches if each.is_due]:
            self._fetches.remove(fetch)
            if fetch.is_read:
                self._put(fetch)
            fetch.is_over = True

    def keep(self, keys: Sequence[bytes], snapshots: Sequence[bytes], owner: str) -> None:
        """Has blocks of a prompt written that are in memory and not on disk.

        Args:
            keys: from the prompt's first on.
            snapshots: keys of the prompt whose blocks' states count as used, too.
            owner: the name of the request's key, for those who look at the folder.
        """
        if not keys or not self._pays(self._block_bytes, self._memory.block_tokens):
            return
        kept = [*map(digest_of, snapshots)]
        whose = Owner(self._model, "" if self._memory.shared else owner)
        for key in keys:
            block = self._memory.block(key)
            if block is None:
                break
            digest, previous = digest_of(key), previous_of(key)
            for part, array in ((_BLOCK, block.data), (_STATES, block.states)):
                if array is not None and not self._store.size(digest, part):
                    header = Header.of(digest, previous, part, whose, array)
                    self._store.write(header, array, kept)
        self._store.use(digest_of(keys[-1]), kept)

    def num_held(self, keys: Sequence[bytes], in_memory: int) -> int:
        """How many blocks of a prompt the disk has, beyond those in memory and with them."""
        end = in_memory
        while end < len(keys) and self._store.size(digest_of(keys[end]), _BLOCK):
            end += 1
        return end

    def _reach(self, keys: Sequence[bytes], held: int) -> int:
        """How many blocks of a prompt memory could have with the disk's, to go on from the last."""
        end = self.num_held(keys, held)
        if self._block_bytes:
            end = min(end, (self._memory.max_bytes - self._state_bytes) // self._block_bytes)
        while end > 0 and self._memory.needs_states:
            last = keys[end - 1]
            if self._memory.has_states(last) or self._store.size(digest_of(last), _STATES):
                break
            end -= 1
        return end

    def _pays(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether reading so many bytes takes less time than computing the tokens, as far as both
        were measured.
        """
        read, prefilled = self._read.per_second, self._prefilled.per_second
        return not read or not prefilled or num_bytes / read < num_tokens / prefilled

    def _run(self, fetch: Fetch) -> None:
        """Reads; in the store's thread."""
        try:
            self._read_into(fetch)
        finally:
            fetch.is_read = True
            self.wake()

    def _read_into(self, fetch: Fetch) -> None:
        started = time.monotonic()
        for key, part in fetch.wanted:
            if fetch.is_over:
                break
            digest, previous = digest_of(key), previous_of(key)
            array = (
                self._store.read(digest, previous, part, self._dtype, self._block_shape)
                if part == _BLOCK
                else self._store.read(digest, previous, part, _STATE_TYPE, self._state_shape)
            )
            if array is None:
                break
            fetch.arrays.append(array)
        num_bytes = sum(array.nbytes for array in fetch.arrays)
        if num_bytes:
            self._read.add(num_bytes, time.monotonic() - started)
            last = digest_of(fetch.wanted[-1][0])
            self._store.use(last, (last,))

    def _put(self, fetch: Fetch) -> None:
        blocks, states = [], None
        for (key, part), array in zip(fetch.wanted, fetch.arrays, strict=False):
            if part == _BLOCK:
                blocks.append((key, array))
            else:
                states = key, array
        self._memory.restore(blocks, states)
