"""PrefixCache: keys and values of prompt prefixes, for the next prompt that starts with one.

A prompt is split into blocks of tokens. The keys and values of a block depend on all tokens before
it, so its digest covers its own tokens and the digest of the block before it. That of the first
block covers the model, its adapter, the name of the request's key and its salt: how fast a prompt
is read, and how much of it was cached, would tell others whether they guessed one that was read
before.
"""

import math
import struct
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_DIGEST_BYTES = 32
_LEAST_DEFAULT = 512 * 2**20  # bytes
_MOST_BETWEEN = 4096  # tokens between two snapshots, however large these are


@dataclass(slots=True)
class Block:
    """The keys and values of some adjacent tokens.

    Attributes:
        data: read-only.
        previous: the digest of the block before it; empty for the first block.
        states: those of recurrent layers after its last token, where they were kept; read-only.
        is_restored: whether it came from disk, and was not used since.
        used_at: when it was last used, counted in uses.
        states_used_at: likewise of its states.
    """

    data: NDArray[np.generic]
    previous: bytes
    states: NDArray[np.float32] | None = None
    is_restored: bool = False
    used_at: int = 0
    states_used_at: int = 0

    def take_restored(self) -> int:
        """Its tokens, if it came from disk and this is its first use, else 0."""
        num_tokens = len(self.data) if self.is_restored else 0
        self.is_restored = False
        return num_tokens

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + (0 if self.states is None else self.states.nbytes)


class PrefixCache:
    """Blocks of keys and values, up to a number of bytes; evicts the least recently used first.

    Using a block also uses every block before it, and those count as used later. So a block is
    always evicted before the one that it follows, and `match` can reach every block in the cache.
    States are large, and only those are used that a text goes on from or that stand where the next
    one may part from it; those of earlier turns age, and go before any block that was used since.
    Not thread-safe.

    Args:
        model: whose keys and values these are; it is part of every key.
        block_tokens: tokens per block.
        max_bytes: maximum size of all blocks, in bytes. With 0 the cache stays empty.
        shared: whether prompts of different keys share blocks.
        snapshot_blocks: of a model with recurrent layers: blocks between two snapshots of their
            states where nothing tells where the next prompt will part. A text can go on only from
            such a snapshot, and `match` ends with one. 0 for models without states.
    """

    def __init__(
        self,
        *,
        model: str,
        block_tokens: int,
        max_bytes: int,
        shared: bool = False,
        snapshot_blocks: int = 0,
    ) -> None:
        self.block_tokens = block_tokens
        self.needs_states = bool(snapshot_blocks)
        self.num_bytes = 0
        """Bytes of the blocks in the cache."""
        self._model = model
        self.max_bytes = max_bytes
        self.shared = shared
        self._snapshot_blocks = snapshot_blocks
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()  # by digest, oldest use first
        self._snapshots: OrderedDict[bytes, None] = OrderedDict()  # blocks with states, likewise
        self._num_uses = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache."""
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return digest_of(key) in self._blocks

    def keys(
        self, token_ids: NDArray[np.int64], salt: str, owner: str = "", adapter: str = ""
    ) -> tuple[bytes, ...]:
        """The keys of a prompt's whole blocks, in order; a partial last block has none.

        A key is the digest of the block before it, if there is one, followed by its own.

        Args:
            token_ids: int64 (num_tokens,).
            salt: only prompts of the same salt share blocks.
            owner: so do only those of the same owner, unless the cache is shared.
            adapter: and those of the same adapter, by its digest.
        """
        roots = (self._model, "" if self.shared else owner, salt, adapter)
        # JSON strings may contain a lone surrogate; no client's salt may fail here.
        names = [name.encode("utf-8", "surrogatepass") for name in roots]
        root = b"".join(struct.pack("<Q", len(name)) + name for name in names)
        # With `person`, no salt can be chosen that has the digest of a block.
        digest = blake2b(root, digest_size=_DIGEST_BYTES, person=b"prefix root").digest()
        keys = []
        previous = b""
        num_blocks = len(token_ids) // self.block_tokens
        whole = token_ids[: num_blocks * self.block_tokens].astype("<i8")
        for block in whole.reshape(num_blocks, self.block_tokens):
            digest = blake2b(digest + block.tobytes(), digest_size=_DIGEST_BYTES).digest()
            keys.append(previous + digest)
            previous = digest
        return tuple(keys)

    def has_states(self, key: bytes) -> bool:
        """Whether a text can go on after a block from its states."""
        block = self._blocks.get(digest_of(key))
        return block is not None and block.states is not None

    def snapshots(self, num_blocks: int, borders: Iterable[int]) -> frozenset[int]:
        """After which blocks of a prompt the states are kept, as numbers of blocks.

        These are the last one, as the next prompt may begin with all of this one; where it may
        part from it; and, as nobody knows of all prompts where they do, some in between.

        Args:
            num_blocks: of the prompt, without those that are read in any case.
            borders: where the next prompt may part from this one, in tokens.
        """
        if not self.needs_states or num_blocks < 1:
            return frozenset()
        between = range(self._snapshot_blocks, num_blocks, self._snapshot_blocks)
        parting = (border // self.block_tokens for border in borders)
        return frozenset({num_blocks, *between, *(n for n in parting if 0 < n < num_blocks)})

    def match(self, keys: Sequence[bytes], snapshots: Sequence[bytes] = ()) -> tuple[Block, ...]:
        """The blocks of the longest usable prefix of ``keys`` in the cache; counts as a use.

        Args:
            keys: from `keys`, from the first on.
            snapshots: those of them after which the prompt's states are kept; such states are used,
                too.
        """
        num_usable = self.num_usable(keys)
        if num_usable:
            last = keys[num_usable - 1]
            self._use(last, (*snapshots, last))
        return tuple(self._blocks[digest_of(key)] for key in keys[:num_usable])

    def num_held(self, keys: Sequence[bytes]) -> int:
        """How many blocks of a prompt are in the cache, from its first on."""
        return next((i for i, key in enumerate(keys) if key not in self), len(keys))

    def num_usable(self, keys: Sequence[bytes]) -> int:
        """How many of them `match` would return."""
        num_usable = self.num_held(keys)
        while self.needs_states and num_usable and not self.has_states(keys[num_usable - 1]):
            num_usable -= 1
        return num_usable

    def block(self, key: bytes) -> Block | None:
        """A block, if it is in the cache; that does not count as a use."""
        return self._blocks.get(digest_of(key))

    def put(
        self,
        key: bytes,
        block: NDArray[np.generic],
        states: NDArray[np.float32] | None = None,
        *,
        snapshots: Sequence[bytes] = (),
        evicts: bool = True,
    ) -> None:
        """Adds a block, evicting others as needed; counts as a use of it and all blocks before it.

        Put the blocks of a prompt in order: a block is not added if the one before it is missing,
        since `match` could not reach it. Of a prompt larger than the cache, the prefix is kept.

        Args:
            key: the block's, from `keys`.
            block: made read-only and kept without a copy, so it must own its memory.
            states: likewise; added to a block that has none yet.
            snapshots: keys of the prompt whose blocks' states are used, too.
            evicts: whether others may be evicted; otherwise only what fits is added.
        """
        new_bytes = 0 if key in self else block.nbytes
        new_bytes += 0 if states is None else states.nbytes
        if not evicts and self.num_bytes + new_bytes > self.max_bytes:
            return
        if self._add(key, block, states):
            self._use(key, (*snapshots, key))
            self._evict()

    def restore(
        self,
        blocks: Sequence[tuple[bytes, NDArray[np.generic]]],
        states: tuple[bytes, NDArray[np.float32]] | None = None,
    ) -> None:
        """Adds what came from disk of one prompt, as `put` does, with a single use of all of it.

        Args:
            blocks: keys and blocks, in order.
            states: a key, of these or of a block in the cache, and the states after it.
        """
        added = [key for key, block in blocks if self._add(key, block, is_restored=True)]
        if states is not None and (before := self.block(states[0])) is not None:
            self._add(states[0], before.data, states[1])
            added.append(states[0])
        if added:
            self._use(added[-1], added[-1:])
            self._evict()

    def _add(
        self,
        key: bytes,
        data: NDArray[np.generic],
        states: NDArray[np.float32] | None = None,
        *,
        is_restored: bool = False,
    ) -> bool:
        """Adds a block, or states to one; whether it is in the cache then."""
        digest, previous = digest_of(key), previous_of(key)
        if digest not in self._blocks:
            is_unreachable = previous and previous not in self._blocks
            if is_unreachable or data.nbytes > self.max_bytes:
                return False
            data.flags.writeable = False
            self._blocks[digest] = Block(data, previous, is_restored=is_restored)
            self.num_bytes += data.nbytes
        block = self._blocks[digest]
        if states is None:
            return True
        if block.states is None and block.num_bytes + states.nbytes <= self.max_bytes:
            states.flags.writeable = False
            block.states = states
            self.num_bytes += states.nbytes
        return True

    def _evict(self) -> None:
        """Makes room. The oldest states go first if they are older than the oldest block; of a
        prompt that has no room, its last block goes, with its states.
        """
        while self.num_bytes > self.max_bytes:
            digest, block = next(iter(self._blocks.items()))
            aged = next(iter(self._snapshots), None)
            if aged is not None and self._blocks[aged].states_used_at < block.used_at:
                self._drop_states(aged)
                continue
            self._drop_states(digest)
            del self._blocks[digest]
            self.num_bytes -= block.num_bytes

    def _drop_states(self, digest: bytes) -> None:
        self._snapshots.pop(digest, None)
        block = self._blocks[digest]
        if block.states is not None:
            self.num_bytes -= block.states.nbytes
            block.states = None

    def _use(self, key: bytes, snapshots: Iterable[bytes]) -> None:
        """Counts as one use of a block, those before it, and the states after some."""
        self._num_uses += 1
        for digest in self._chain(digest_of(key)):
            self._blocks.move_to_end(digest)
            self._blocks[digest].used_at = self._num_uses
        for digest in map(digest_of, snapshots):
            block = self._blocks.get(digest)
            if block is not None and block.states is not None:
                block.states_used_at = self._num_uses
                self._snapshots[digest] = None
                self._snapshots.move_to_end(digest)

    def _chain(self, digest: bytes) -> Iterator[bytes]:
        """The digests of a cached block and of all blocks before it, last to first."""
        while digest:
            yield digest
            digest = self._blocks[digest].previous


def digest_of(key: bytes) -> bytes:
    """The digest of the block that a key is of."""
    return key[-_DIGEST_BYTES:]


def previous_of(key: bytes) -> bytes:
    """The digest of the block before it; empty for a prompt's first block."""
    return key[:-_DIGEST_BYTES]


def default_bytes(context_bytes: int, free_bytes: int | None) -> int:
    """The size of a cache where none is given: at least 512 MiB, and a whole context.

    Of a prompt that is larger than the cache, the rest is computed with every turn. Memory is taken
    as prompts come, and a quarter of what is free leaves room for other models.

    Args:
        context_bytes: of the keys, values and states of a prompt that fills the context.
        free_bytes: of memory; None if that is not known.
    """
    return max(min(context_bytes, (free_bytes or 0) // 4), _LEAST_DEFAULT)


def snapshot_blocks(state_bytes: int, block_bytes: int, block_tokens: int) -> int:
    """How many blocks lie between two snapshots of states where nothing tells a better place.

    As many as weigh what a snapshot does, so that these at most double the bytes of a prompt; and
    at most 4,096 tokens, which is what a prompt may have to read again for it.

    Args:
        state_bytes: of a snapshot; with 0, the model has no states, and the answer is 0.
        block_bytes: of a block of keys and values, which may be none.
        block_tokens: tokens of a block.
    """
    if not state_bytes:
        return 0
    most = max(_MOST_BETWEEN // block_tokens, 1)
    return min(math.ceil(state_bytes / block_bytes), most) if block_bytes else most
