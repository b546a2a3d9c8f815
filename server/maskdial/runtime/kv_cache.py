"""KVCache: the keys and values of every running sequence."""

import mmap
import sys
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from maskdial.errors import ConfigError
from maskdial.models.bundle import KVLayout


@dataclass(frozen=True, slots=True)
class KVCache:
    """Per layer, keys and values of shape (slots, num_heads, max_length, head_dim).

    A slot holds one sequence. The operating system commits memory only when a page is first
    written: a slot costs what its longest sequence used since `release_pages`.
    """

    keys: tuple[NDArray[np.generic], ...]
    values: tuple[NDArray[np.generic], ...]
    bytes_per_token: int
    _mappings: tuple[mmap.mmap, ...]
    """The memory of ``keys``, then of ``values``."""

    @classmethod
    def allocate(cls, layout: KVLayout, slots: int, max_length: int) -> "KVCache":
        """Reserves the memory.

        Raises:
            ConfigError: the operating system will not reserve this much.
        """
        dtype = np.dtype(layout.dtype)
        shape = (slots, layout.num_heads, max_length, layout.head_dim)
        num_bytes = prod(shape) * dtype.itemsize
        num_arrays = 2 * layout.num_layers
        try:
            mappings = tuple(_reserve(num_bytes) for _ in range(num_arrays))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"no memory for {slots} slots of {max_length} tokens "
                f"({num_arrays * num_bytes / 1e9:.1f} GB); use fewer slots or a shorter context"
            ) from error
        arrays = tuple(np.frombuffer(mapping, dtype).reshape(shape) for mapping in mappings)
        keys, values = arrays[: layout.num_layers], arrays[layout.num_layers :]
        return cls(keys, values, layout.bytes_per_token, mappings)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the first tokens of one slot to another."""
        for array in (*self.keys, *self.values):
            array[target, :, :num_tokens] = array[source, :, :num_tokens]

    def read(self, slot: int, start: int, num_tokens: int) -> NDArray[np.generic]:
        """A copy of ``num_tokens`` tokens of a slot, from position ``start`` on.

        Returns:
            Keys and values, (num_layers, 2, num_heads, num_tokens, head_dim), in the cache's dtype.
        """
        _, num_heads, _, head_dim = self.keys[0].shape
        shape = (len(self.keys), 2, num_heads, num_tokens, head_dim)
        block: NDArray[np.generic] = np.empty(shape, self.keys[0].dtype)
        for copies, *arrays in zip(block, self.keys, self.values, strict=True):
            for copy, array in zip(copies, arrays, strict=True):
                copy[...] = array[slot, :, start : start + num_tokens]
        return block

    def write(self, slot: int, start: int, block: NDArray[np.generic]) -> None:
        """Writes what `read` returned to a slot, from position ``start`` on."""
        stop = start + block.shape[3]
        for copies, *arrays in zip(block, self.keys, self.values, strict=True):
            for copy, array in zip(copies, arrays, strict=True):
                array[slot, :, start:stop] = copy

    def release_pages(self, slot: int) -> None:
        """Gives the memory of a slot whose content is done with back to the operating system.

        A page that is shared with the next slot stays. Where the system takes no such advice
        (Windows), nothing happens.
        """
        num_bytes = self.keys[0][slot].nbytes
        start = -(-slot * num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (slot + 1) * num_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop:
            for mapping in self._mappings:
                _advise(mapping, "MADV_DONTNEED", start, stop - start)


def _reserve(num_bytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    # Private, because MADV_DONTNEED frees nothing of a shared mapping, which is the default.
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A slot's tokens lie apart, head by head. In huge pages, which NumPy asks for, 8 slots of 2,048
    # with 20 tokens each of a 135M Llama took 640 MB, not 22, and attention was no faster.
    _advise(mapping, "MADV_NOHUGEPAGE", 0, num_bytes)
    return mapping


def _advise(mapping: mmap.mmap, advice: str, start: int, length: int) -> None:
    """Passes advice on to the operating system. One that does not know it is free to refuse."""
    option = getattr(mmap, advice, None)
    if option is not None:
        with suppress(OSError):
            mapping.madvise(option, start, length)
