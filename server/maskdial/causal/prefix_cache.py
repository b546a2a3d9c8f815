"""PrefixCache: the keys and values of prompt beginnings, kept for the next prompt that shares one.

A prompt is cut into blocks of tokens. A block's keys and values depend on all tokens before it, so
it is known by a hash of its own tokens and of the block before it, and so on to the first, which is
hashed with the model and a salt.
"""

import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Block:
    data: NDArray[np.generic]
    previous: bytes
    """The digest of the block before it; empty where it is the first."""


class PrefixCache:
    """Blocks of keys and values within a bound of bytes; the least recently used ones go first.

    Whenever a block is used, so is every block before it, and those count as used later. So a block
    is always evicted before the one that it follows, and `match` reaches every block that is held.
    Not thread-safe.

    Args:
        model: whose keys and values these are. Other models have other keys.
        block_tokens: tokens per block.
        max_bytes: most bytes of blocks to hold. With 0 the cache stays empty.
    """

    def __init__(self, *, model: str, block_tokens: int, max_bytes: int) -> None:
        self.block_tokens = block_tokens
        self.num_bytes = 0
        """Bytes of the blocks that are held."""
        self._model = model
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()  # by digest, oldest use first

    def __contains__(self, key: bytes) -> bool:
        return _digest(key) in self._blocks

    def keys(self, token_ids: NDArray[np.int64], salt: str) -> tuple[bytes, ...]:
        """The keys of a prompt's whole blocks, first to last; tokens left over have none.

        A key is the digest of the block before, which the first does not have, and its own.

        Args:
            token_ids: int64 (num_tokens,).
            salt: prompts share blocks only under the same salt.
        """
        # JSON can spell a lone surrogate: no salt a client sends may fail here.
        names = [name.encode("utf-8", "surrogatepass") for name in (self._model, salt)]
        root = b"".join(struct.pack("<Q", len(name)) + name for name in names)
        # The person parameter keeps a salt from being written that hashes like a block.
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

    def match(self, keys: Sequence[bytes]) -> tuple[NDArray[np.generic], ...]:
        """The blocks of the longest beginning of ``keys`` that is held, which counts as a use.

        Args:
            keys: as from `keys`, from the first on.
        """
        num_held = 0
        while num_held < len(keys) and keys[num_held] in self:
            num_held += 1
        if num_held:
            self._use(_digest(keys[num_held - 1]))
        return tuple(self._blocks[_digest(key)].data for key in keys[:num_held])

    def put(self, key: bytes, block: NDArray[np.generic]) -> None:
        """Holds a block, evicting others as needed; counts as a use of it and all blocks before it.

        Put a prompt's blocks from the first to the last: one that could not be found, since the
        block before it is missing, is not held. Of a prompt larger than the cache, the beginning
        is held.

        Args:
            key: the block's, from `keys`.
            block: is made read-only and kept as it is, so it must own its memory.
        """
        digest, previous = _digest(key), key[:-_DIGEST_BYTES]
        if digest not in self._blocks:
            is_lost = previous and previous not in self._blocks
            if is_lost or block.nbytes > self._max_bytes:
                return
            block.flags.writeable = False
            self._blocks[digest] = _Block(block, previous)
            self.num_bytes += block.nbytes
        self._use(digest)
        while self.num_bytes > self._max_bytes:
            _, evicted = self._blocks.popitem(last=False)
            self.num_bytes -= evicted.data.nbytes

    def clear(self) -> None:
        """Drops every block."""
        self._blocks.clear()
        self.num_bytes = 0

    def _use(self, digest: bytes) -> None:
        for earlier in self._chain(digest):
            self._blocks.move_to_end(earlier)

    def _chain(self, digest: bytes) -> Iterator[bytes]:
        """The digests of a held block and of all blocks before it, last to first."""
        while digest:
            yield digest
            digest = self._blocks[digest].previous


def _digest(key: bytes) -> bytes:
    return key[-_DIGEST_BYTES:]
