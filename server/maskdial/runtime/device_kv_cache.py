"""DeviceKVCache: the keys and values of every running sequence, in a device's memory."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskdial.models.bundle import KVLayout
from maskdial.runtime.memory import Device, DeviceArray, on_host


@dataclass(frozen=True, slots=True)
class DeviceKVCache:
    """Per layer, keys and values of shape (slots, num_heads, max_length, head_dim).

    A slot holds one sequence. All of the memory is taken when the cache is made.
    """

    keys: tuple[DeviceArray, ...]
    values: tuple[DeviceArray, ...]
    bytes_per_token: int
    lengths: NDArray[np.int64]
    """How many tokens each slot holds; what lies beyond them may be overwritten."""
    _device: Device

    @classmethod
    def allocate(
        cls, device: Device, layout: KVLayout, slots: int, max_length: int
    ) -> "DeviceKVCache":
        """Takes the memory.

        Raises:
            ConfigError: there is not that much.
        """
        shape = (slots, layout.num_heads, max_length, layout.head_dim)
        dtype = np.dtype(layout.dtype)
        arrays = tuple(device.allocate(shape, dtype) for _ in range(2 * layout.num_layers))
        keys, values = arrays[: layout.num_layers], arrays[layout.num_layers :]
        return cls(keys, values, layout.bytes_per_token, np.zeros(slots, np.int64), device)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the first tokens of one slot to another."""
        for array in (*self.keys, *self.values):
            self._copy_tokens(_tokens(array, target, 0), _tokens(array, source, 0), num_tokens)
        self.lengths[target] = num_tokens

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
                self._copy_tokens(_on_host(copy), _tokens(array, slot, start), num_tokens)
        self._device.synchronize()
        return block

    def write(self, slot: int, start: int, block: NDArray[np.generic]) -> None:
        """Writes what `read` returned to a slot, from position ``start`` on."""
        num_tokens = block.shape[3]
        for copies, *arrays in zip(block, self.keys, self.values, strict=True):
            for copy, array in zip(copies, arrays, strict=True):
                self._copy_tokens(_tokens(array, slot, start), _on_host(copy), num_tokens)
        self.lengths[slot] = start + num_tokens

    def release_pages(self, slot: int) -> None:
        """Forgets the content of a slot that is done with; its memory stays."""
        self.lengths[slot] = 0

    def _copy_tokens(self, target: "_Tokens", source: "_Tokens", num_tokens: int) -> None:
        self._device.copy(
            target.pointer,
            target.head_bytes,
            source.pointer,
            source.head_bytes,
            num_tokens * source.token_bytes,
            source.num_heads,
        )


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Where the tokens of one layer's keys or values lie: head by head."""

    pointer: int
    """The first token's of the first head."""
    num_heads: int
    head_bytes: int
    token_bytes: int


def _tokens(array: DeviceArray, slot: int, start: int) -> _Tokens:
    """The tokens of a slot, from position ``start`` on."""
    _, num_heads, max_length, head_dim = array.shape
    token_bytes = head_dim * array.dtype.itemsize
    pointer = array[slot : slot + 1].pointer + start * token_bytes
    return _Tokens(pointer, num_heads, max_length * token_bytes, token_bytes)


def _on_host(array: NDArray[np.generic]) -> _Tokens:
    """The tokens of (num_heads, num_tokens, head_dim) in main memory."""
    num_heads, num_tokens, head_dim = array.shape
    token_bytes = head_dim * array.itemsize
    return _Tokens(on_host(array).pointer, num_heads, num_tokens * token_bytes, token_bytes)
