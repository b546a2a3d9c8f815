"""KVCache: the keys and values of every running sequence."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import KVLayout
from maskdial.errors import ConfigError
from maskdial.runtime.memory import Buffer, Memory


@dataclass(frozen=True, slots=True)
class KVCache:
    """Per layer, keys and values of shape (slots, num_heads, max_length, width).

    A slot holds one sequence. In main memory a slot costs what its longest sequence has used since
    `release_pages`; the memory of a GPU is taken when the cache is allocated.

    With an encoder, ``source`` is the cache of the source texts, in slots of the same numbers.
    """

    keys: tuple[Buffer, ...]
    values: tuple[Buffer, ...]
    bytes_per_token: int
    lengths: NDArray[np.int64]
    """int64 (slots,), the tokens that each slot holds; what lies beyond them may be overwritten."""
    _token_bytes: int
    """What one head of one layer's keys or values takes for a token."""
    _memory: Memory
    source: "KVCache | None" = None

    @classmethod
    def allocate(
        cls,
        memory: Memory,
        layout: KVLayout,
        slots: int,
        max_length: int,
        max_source_length: int | None = None,
    ) -> "KVCache":
        """Allocates the cache, and one for source texts if these have a length.

        Raises:
            ConfigError: the memory is too small.
        """
        source = None
        if max_source_length is not None:
            source = cls.allocate(memory, layout, slots, max_source_length)
        shape = (slots, layout.num_heads, max_length, layout.width)
        dtype = layout.element
        buffers = tuple(memory.allocate(shape, dtype) for _ in range(2 * layout.num_layers))
        keys, values = buffers[: layout.num_layers], buffers[layout.num_layers :]
        lengths, token_bytes = np.zeros(slots, np.int64), layout.width * dtype.itemsize
        size = layout.bytes_per_token
        return cls(keys, values, size, lengths, token_bytes, memory, source)

    def named(self) -> Iterator[tuple[str, Buffer]]:
        """Each layer's keys and values, as the graph's inputs call them."""
        for kind, buffers in (("key", self.keys), ("value", self.values)):
            for layer, buffer in enumerate(buffers):
                yield f"{kind}.{layer}", buffer

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the first tokens of one slot to another, and the source text."""
        self.copy_tokens(source, target, 0, num_tokens)
        if self.source is not None:
            self.source.copy(source, target, int(self.source.lengths[source]))

    def copy_tokens(self, source: int, target: int, start: int, num_tokens: int) -> None:
        """Copies tokens from position ``start`` on, where both slots have the same before it."""
        source_offset = self._offset(source, start, num_tokens)
        target_offset = self._offset(target, start, num_tokens)
        _, num_heads, max_length, _ = self.keys[0].shape
        pitch, width = max_length * self._token_bytes, num_tokens * self._token_bytes
        for buffer in (*self.keys, *self.values):
            first = buffer.pointer
            self._memory.copy(
                first + target_offset, pitch, first + source_offset, pitch, width, num_heads
            )
        self.lengths[target] = start + num_tokens

    def read(self, slot: int, start: int, num_tokens: int) -> NDArray[np.generic]:
        """A copy of ``num_tokens`` tokens of a slot, from position ``start`` on.

        Returns:
            Keys and values, (num_layers, 2, num_heads, num_tokens, width), in the cache's dtype.
        """
        _, num_heads, max_length, width = self.keys[0].shape
        shape = (len(self.keys), 2, num_heads, num_tokens, width)
        block: NDArray[np.generic] = np.empty(shape, self.keys[0].dtype)
        pitch, size = max_length * self._token_bytes, num_tokens * self._token_bytes
        for tokens, part in self._pointers(slot, start, block):
            self._memory.copy(part, size, tokens, pitch, size, num_heads)
        self._memory.synchronize()
        return block

    def write(self, slot: int, start: int, block: NDArray[np.generic]) -> None:
        """Writes what `read` returned to a slot, from position ``start`` on."""
        _, num_heads, max_length, _ = self.keys[0].shape
        num_tokens = block.shape[3]
        pitch, width = max_length * self._token_bytes, num_tokens * self._token_bytes
        for tokens, part in self._pointers(slot, start, block):
            self._memory.copy(tokens, pitch, part, width, width, num_heads)
        self.lengths[slot] = start + num_tokens

    def release_pages(self, slot: int) -> None:
        """Forgets the content of a slot, and returns its pages in main memory to the system.

        A page that is shared with a neighboring slot stays, and so does the memory of a GPU.
        """
        for buffer in (*self.keys, *self.values):
            self._memory.decommit(buffer[slot : slot + 1])
        self.lengths[slot] = 0
        if self.source is not None:
            self.source.release_pages(slot)

    def _pointers(
        self, slot: int, start: int, block: NDArray[np.generic]
    ) -> Iterator[tuple[int, int]]:
        """Where the first head of each layer's keys and values lies in the cache and in a block."""
        num_layers, num_heads, _, width = len(self.keys), *self.keys[0].shape[1:]
        num_tokens = block.shape[3]
        if block.shape != (num_layers, 2, num_heads, num_tokens, width) or (
            block.dtype != self.keys[0].dtype or not block.flags.c_contiguous
        ):
            raise ValueError(f"not a block of this cache: {block.dtype} {block.shape}")
        offset = self._offset(slot, start, num_tokens)
        part, part_bytes = block.ctypes.data, block.nbytes // (2 * num_layers)
        for key, value in zip(self.keys, self.values, strict=True):
            for buffer in (key, value):
                yield buffer.pointer + offset, part
                part += part_bytes

    def _offset(self, slot: int, start: int, num_tokens: int) -> int:
        """Where tokens of a slot's first head begin, in bytes; copies check no bounds themselves.

        Raises:
            IndexError: they do not lie within the slot.
        """
        slots, num_heads, max_length, _ = self.keys[0].shape
        if not (0 <= slot < slots and 0 <= start <= start + num_tokens <= max_length):
            raise IndexError(
                f"tokens {start} to {start + num_tokens} of slot {slot} lie outside a cache of "
                f"{slots} slots of {max_length} tokens"
            )
        return (slot * num_heads * max_length + start) * self._token_bytes


_MIN_CONTEXT = 8  # tokens, as of --max-context


def plan_slots(
    layout: KVLayout, max_length: int, *, asked: int | None, max_slots: int, budget: int | None
) -> int:
    """The number of slots of a KV cache.

    Args:
        layout: of the model's cache.
        max_length: number of tokens that a slot holds.
        asked: the number of slots, None to let the memory decide.
        max_slots: the number of slots if none was asked for and the memory suffices.
        budget: size of the cache in bytes; None for no limit.

    Raises:
        ConfigError: the slots do not fit; the message says what would.
    """
    slots = asked or max_slots
    if budget is None:
        return slots
    fitting = budget // (max_length * layout.bytes_per_token)
    if fitting >= slots or (fitting and asked is None):
        return min(fitting, slots)
    needed = asked or 1
    ways = [f"--slots {fitting}"] if fitting else []
    fitting_length = budget // (needed * layout.bytes_per_token)
    if fitting_length >= _MIN_CONTEXT:
        ways.append(f"--max-context {fitting_length}")
    raise ConfigError(
        f"a KV cache of {needed} slot{'s' if needed > 1 else ''} of {max_length} tokens takes "
        f"{_size(needed * max_length * layout.bytes_per_token)}, and {_size(budget)} may be used: "
        + (f"{' or '.join(ways)} would fit" if ways else "not even a short text would fit")
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.1f} MB"
