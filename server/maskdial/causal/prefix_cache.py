"""PrefixCache: keys and values of prompt prefixes, for the next prompt that starts with one.

A prompt is split into blocks of tokens. The keys and values of a block depend on all tokens before
it, so its digest covers its own tokens and the digest of the block before it. That of the first
block covers the model, its adapter, the name of the request's key and its salt: how fast a prompt
is read, and how much of it was cached, would tell others whether they guessed one that was read
before.
"""

import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_DIGEST_BYTES = 32


@dataclass(slots=True)
class Block:
    """The keys and values of some adjacent tokens.

    Attributes:
        data: read-only.
        previous: the digest of the block before it; empty for the first block.
        states: those of recurrent layers after its last token, where they were kept; read-only.
        is_restored: whether it came from disk, and was not used since.
    """

    data: NDArray[np.generic]
    previous: bytes
    states: NDArray[np.float32] | None = None
    is_restored: bool = False

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
    Not thread-safe.

    Args:
        model: whose keys and values these are; it is part of every key.
        block_tokens: tokens per block.
        max_bytes: maximum size of all blocks, in bytes. With 0 the cache stays empty.
        shared: whether prompts of different keys share blocks.
        needs_states: whether a text can go on after a block only from the states that it has there;
            `match` ends with such a block.
    """

    def __init__(
        self,
        *,
        model: str,
        block_tokens: int,
        max_bytes: int,
        shared: bool = False,
        needs_states: bool = False,
    ) -> None:
        self.block_tokens = block_tokens
        self.needs_states = needs_states
        self.num_bytes = 0
        """Bytes of the blocks in the cache."""
        self._model = model
        self.max_bytes = max_bytes
        self.shared = shared
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()  # by digest, oldest use first

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

    def match(self, keys: Sequence[bytes]) -> tuple[Block, ...]:
        """The blocks of the longest usable prefix of ``keys`` in the cache; counts as a use.

        Args:
            keys: from `keys`, from the first on.
        """
        num_usable = self.num_usable(keys)
        if num_usable:
            self._use(digest_of(keys[num_usable - 1]))
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
        evicts: bool = True,
        is_restored: bool = False,
    ) -> None:
        """Adds a block, evicting others as needed; counts as a use of it and all blocks before it.

        Put the blocks of a prompt in order: a block is not added if the one before it is missing,
        since `match` could not reach it. Of a prompt larger than the cache, the prefix is kept.

        Args:
            key: the block's, from `keys`.
            block: made read-only and kept without a copy, so it must own its memory.
            states: likewise; added to a block that has none yet.
            evicts: whether others may be evicted; otherwise only what fits is added.
            is_restored: whether a new block comes from disk.
        """
        digest, previous = digest_of(key), previous_of(key)
        new_bytes = 0 if digest in self._blocks else block.nbytes
        new_bytes += 0 if states is None else states.nbytes
        if not evicts and self.num_bytes + new_bytes > self.max_bytes:
            return
        if digest not in self._blocks:
            is_unreachable = previous and previous not in self._blocks
            if is_unreachable or block.nbytes > self.max_bytes:
                return
            block.flags.writeable = False
            self._blocks[digest] = Block(block, previous, is_restored=is_restored)
            self.num_bytes += block.nbytes
        kept = self._blocks[digest]
        if kept.states is None and states is not None and self._fits(kept, states):
            states.flags.writeable = False
            kept.states = states
            self.num_bytes += states.nbytes
        self._use(digest)
        while self.num_bytes > self.max_bytes:
            _, evicted = self._blocks.popitem(last=False)
            self.num_bytes -= evicted.num_bytes

    def _fits(self, block: Block, states: NDArray[np.float32]) -> bool:
        return block.num_bytes + states.nbytes <= self.max_bytes

    def _use(self, digest: bytes) -> None:
        for earlier in self._chain(digest):
            self._blocks.move_to_end(earlier)

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
