"""KVCache: the keys and values of every running sequence, and the states of recurrent layers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import KVLayout
from maskdial.errors import ConfigError
from maskdial.runtime.memory import Buffer, Memory, copy_buffer, host_buffer

_MAX_DROPPED = 256  # tokens: more than a pass has drafts


@dataclass(frozen=True, slots=True)
class KVCache:
    """Per layer, keys and values of shape (slots, num_heads, max_length, width); layers may differ.

    Each recurrent layer has a state of a fixed size per slot, float32. A state is that of all
    tokens before the next pass: it cannot be cut to fewer of them, as keys and values can.

    A slot holds one sequence. In main memory a slot costs what its longest sequence has used since
    `release_pages`; the memory of a GPU is taken when the cache is allocated.

    Layers in ``windows`` read as many of the last tokens as it says; `forget` returns the pages of
    those before them.

    With an encoder, ``source`` is the cache of the source texts, in slots of the same numbers.
    """

    keys: tuple[Buffer, ...]
    values: tuple[Buffer, ...]
    states: tuple[Buffer, ...]
    layout: KVLayout
    max_length: int
    lengths: NDArray[np.int64]
    """int64 (slots,), the tokens that each slot holds; what lies beyond them may be overwritten."""
    _memory: Memory
    source: "KVCache | None" = None
    windows: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def allocate(
        cls,
        memory: Memory,
        layout: KVLayout,
        slots: int,
        max_length: int,
        max_source_length: int | None = None,
        windows: Mapping[int, int] | None = None,
    ) -> "KVCache":
        """Allocates the cache, and one for source texts if these have a length.

        Raises:
            ConfigError: the memory is too small; if it holds a slot, the error says what would fit.
        """
        source = None
        if max_source_length is not None:
            source = cls.allocate(memory, layout, slots, max_source_length)
        wanted: list[tuple[tuple[int, ...], np.dtype[Any]]] = [
            ((slots, each.num_heads, max_length, layout.width(each)), layout.element)
            for each in (*layout.layers, *layout.layers)
        ]
        wanted += [((slots, *each), np.dtype(np.float32)) for each in layout.states]
        buffers: list[Buffer] = []
        for shape, dtype in wanted:
            try:
                buffers.append(memory.allocate(shape, dtype))
            except ConfigError as error:
                held = sum(each.num_bytes for each in buffers)
                room = _Room.of_cache(layout, max_length, held, "no more than {} can be allocated")
                if held < room.slot_bytes:
                    raise
                raise room.refusal(slots) from error
        layers, lengths = len(layout.layers), np.zeros(slots, np.int64)
        keys, values = tuple(buffers[:layers]), tuple(buffers[layers : 2 * layers])
        states = tuple(buffers[2 * layers :])
        return cls(keys, values, states, layout, max_length, lengths, memory, source, windows or {})

    @property
    def bytes_per_token(self) -> int:
        """The size of one token's keys and values."""
        return self.layout.bytes_per_token

    @property
    def state_bytes(self) -> int:
        """The size of a slot's states; 0 for a model without recurrent layers."""
        return self.layout.state_bytes

    def named(self) -> Iterator[tuple[str, Buffer]]:
        """Each layer's keys and values, and the states, as the graph's inputs call them."""
        parts = (("key", self.keys), ("value", self.values), ("state", self.states))
        for kind, buffers in parts:
            for layer, buffer in enumerate(buffers):
                yield f"{kind}.{layer}", buffer

    def divided(self, slots: int, max_length: int) -> "KVCache":
        """The beginning of its memory as a cache of other slots, whose content is undefined.

        Raises:
            IndexError: the memory is too small.
        """
        if slots * max_length > len(self.lengths) * self.max_length:
            raise IndexError(
                f"{slots} slots of {max_length} tokens lie outside a cache of "
                f"{len(self.lengths)} slots of {self.max_length} tokens"
            )

        def shaped(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
            shapes = [(slots, each.shape[1], max_length, each.shape[3]) for each in buffers]
            return tuple(
                replace(each, shape=shape) for each, shape in zip(buffers, shapes, strict=True)
            )

        return replace(
            self,
            keys=shaped(self.keys),
            values=shaped(self.values),
            max_length=max_length,
            lengths=np.zeros(slots, np.int64),
        )

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the first tokens of one slot to another, the states, and the source text."""
        self.copy_tokens(source, target, 0, num_tokens)
        if self.source is not None:
            self.source.copy(source, target, int(self.source.lengths[source]))

    def copy_tokens(self, source: int, target: int, start: int, num_tokens: int) -> None:
        """Copies tokens from position ``start`` on, where both slots have the same before it.

        The states are copied as they are. Of layers with a window, what lies before it is not.
        """
        self.copy_from(self, source, target, start, num_tokens)

    def copy_from(
        self, other: "KVCache", source: int, target: int, start: int, num_tokens: int
    ) -> None:
        """Copies tokens, as `copy_tokens` does, from a slot of another cache of the same memory.

        It differs in nothing but the number and the length of its slots.
        """
        other._check(source, start, num_tokens)
        self._check(target, start, num_tokens)
        end = start + num_tokens
        pairs = zip((*other.keys, *other.values), (*self.keys, *self.values), strict=True)
        for index, (from_buffer, to_buffer) in enumerate(pairs):
            first = max(start, self._first_kept(index % len(self.keys), end))
            from_run = _Run.of(from_buffer, first, end - first)
            to_run = _Run.of(to_buffer, first, end - first)
            self._memory.copy(
                to_run.pointer(target),
                to_run.pitch,
                from_run.pointer(source),
                from_run.pitch,
                to_run.width,
                to_run.num_heads,
            )
        for from_state, to_state in zip(other.states, self.states, strict=True):
            copy_buffer(
                self._memory, to_state[target : target + 1], from_state[source : source + 1]
            )
        self.lengths[target] = end

    def forget(self, slot: int, num_tokens: int) -> None:
        """Returns the pages that no token after the first ``num_tokens`` sees, to the system.

        Some more tokens than the windows' are kept, so that drafts may be dropped. What was
        forgotten cannot be read or copied any more; in main memory, it is zeros.
        """
        for layer in self.windows:
            first = self._first_kept(layer, num_tokens)
            for buffer in (self.keys[layer], self.values[layer]) if first > 0 else ():
                run = _Run.of(buffer, 0, first)
                for head in range(run.num_heads):
                    start = run.pointer(slot) + head * run.pitch
                    self._memory.decommit(Buffer(start, (first, buffer.shape[3]), buffer.dtype))

    def _first_kept(self, layer: int, num_tokens: int) -> int:
        """The first token that those after some tokens of a slot may see in a layer."""
        window = self.windows.get(layer)
        return 0 if window is None else max(num_tokens - window - _MAX_DROPPED, 0)

    def read(self, slot: int, start: int, num_tokens: int) -> NDArray[np.generic]:
        """A copy of ``num_tokens`` tokens of a slot, from position ``start`` on.

        Returns:
            The keys and the values of each layer in turn, (num_heads, num_tokens, width) each, in
            one array (num_tokens, elements_per_token) of the cache's dtype.
        """
        shape = num_tokens, self.layout.elements_per_token
        block: NDArray[np.generic] = np.empty(shape, self.layout.element)
        for run, part in self._parts(slot, start, block):
            self._memory.copy(
                part, run.width, run.pointer(slot), run.pitch, run.width, run.num_heads
            )
        self._memory.synchronize()
        return block

    def write(self, slot: int, start: int, block: NDArray[np.generic]) -> None:
        """Writes what `read` returned to a slot, from position ``start`` on."""
        for run, part in self._parts(slot, start, block):
            self._memory.copy(
                run.pointer(slot), run.pitch, part, run.width, run.width, run.num_heads
            )
        self.lengths[slot] = start + len(block)

    def read_states(self, slot: int) -> NDArray[np.float32]:
        """A copy of a slot's states, float32 (state_bytes / 4,), one after the other."""
        snapshot = np.empty(self.state_bytes // 4, np.float32)
        for state, part in self._states_of(slot, snapshot):
            copy_buffer(self._memory, part, state)
        self._memory.synchronize()
        return snapshot

    def write_states(self, slot: int, snapshot: NDArray[np.float32]) -> None:
        """Writes what `read_states` returned to a slot."""
        for state, part in self._states_of(slot, snapshot):
            copy_buffer(self._memory, state, part)

    def clear_states(self, slot: int) -> None:
        """Sets a slot's states to zero: those before a text's first token."""
        if self.states:
            self.write_states(slot, np.zeros(self.state_bytes // 4, np.float32))

    def release_pages(self, slot: int) -> None:
        """Forgets the content of a slot, and returns its pages in main memory to the system.

        A page that is shared with a neighboring slot stays, and so does the memory of a GPU.
        """
        for buffer in (*self.keys, *self.values, *self.states):
            self._memory.decommit(buffer[slot : slot + 1])
        self.lengths[slot] = 0
        if self.source is not None:
            self.source.release_pages(slot)

    def _parts(
        self, slot: int, start: int, block: NDArray[np.generic]
    ) -> Iterator[tuple["_Run", int]]:
        """The tokens of each layer's keys and values in the cache, and their place in a block."""
        if block.shape[1:] != (self.layout.elements_per_token,) or (
            block.dtype != self.layout.element or not block.flags.c_contiguous
        ):
            raise ValueError(f"not a block of this cache: {block.dtype} {block.shape}")
        self._check(slot, start, len(block))
        part = block.ctypes.data
        for key, value in zip(self.keys, self.values, strict=True):
            for buffer in (key, value):
                run = _Run.of(buffer, start, len(block))
                yield run, part
                part += run.num_heads * run.width

    def _states_of(
        self, slot: int, snapshot: NDArray[np.float32]
    ) -> Iterator[tuple[Buffer, Buffer]]:
        """Each state of a slot, and its part of a snapshot."""
        if snapshot.nbytes != self.state_bytes:
            raise ValueError(f"not the states of this cache: {snapshot.nbytes} bytes")
        start = 0
        for buffer in self.states:
            state = buffer[slot : slot + 1]
            end = start + state.num_bytes // 4
            yield state, host_buffer(snapshot[start:end].reshape(state.shape))
            start = end

    def _check(self, slot: int, start: int, num_tokens: int) -> None:
        """Copies check no bounds themselves.

        Raises:
            IndexError: the tokens do not lie within the slot.
        """
        slots, max_length = len(self.lengths), self.max_length
        if not (0 <= slot < slots and 0 <= start <= start + num_tokens <= max_length):
            raise IndexError(
                f"tokens {start} to {start + num_tokens} of slot {slot} lie outside a cache of "
                f"{slots} slots of {max_length} tokens"
            )


class _Run(NamedTuple):
    """Adjacent tokens of every head of a slot's keys or values, in bytes."""

    first: int
    slot_bytes: int
    pitch: int
    width: int
    num_heads: int

    @classmethod
    def of(cls, buffer: Buffer, start: int, num_tokens: int) -> "_Run":
        _, num_heads, max_length, columns = buffer.shape
        token = columns * buffer.dtype.itemsize
        pitch = max_length * token
        return cls(
            buffer.pointer + start * token, num_heads * pitch, pitch, num_tokens * token, num_heads
        )

    def pointer(self, slot: int) -> int:
        """Where they begin in a slot's first head."""
        return self.first + slot * self.slot_bytes


_MIN_CONTEXT = 8  # tokens, as of --max-context


def plan_slots(
    layout: KVLayout,
    max_length: int,
    *,
    asked: int | None,
    max_slots: int,
    budget: int | None,
    max_source_length: int = 0,
    max_buffer_bytes: int | None = None,
    pass_bytes: int = 0,
) -> int:
    """The number of slots of a KV cache.

    Args:
        layout: of the model's cache.
        max_length: number of tokens that a slot holds.
        asked: the number of slots, None to let the memory decide.
        max_slots: the number of slots if none was asked for and the memory suffices.
        budget: size of the cache in bytes; None for no limit.
        max_source_length: number of tokens of a source text, which a slot holds beside them.
        max_buffer_bytes: size of the largest allocation, which has the keys of one layer, or its
            values; None for no limit.
        pass_bytes: what passes take for a slot, of the budget too where no number was asked for.

    Raises:
        ConfigError: the slots do not fit; the message says what would.
    """
    slots = asked or max_slots
    if budget is not None:
        room = _Room.of_cache(layout, max_length + max_source_length, budget)
        if asked is None:
            slots = min(slots, max(budget // (room.slot_bytes + pass_bytes), 1))
        slots = room.plan(asked, slots)
    if max_buffer_bytes is not None and layout.layers:
        token = max(each.num_heads * layout.width(each) for each in layout.layers)
        room = _Room(
            what="a buffer",
            length=max(max_length, max_source_length),
            token_bytes=token * layout.element.itemsize,
            limit=max_buffer_bytes,
            holds="the GPU's largest one holds {}",
        )
        slots = room.plan(asked, slots)
    return slots


def plan_length(
    layout: KVLayout,
    max_length: int,
    *,
    slots: int,
    budget: int | None,
    max_source_length: int = 0,
    max_buffer_bytes: int | None = None,
) -> int:
    """The number of tokens that each of some slots can hold, at most ``max_length``; see
    `plan_slots`. It may be 0.
    """
    length = max_length
    if budget is not None and layout.bytes_per_token:
        left = budget // slots - layout.state_bytes
        length = min(length, max(left // layout.bytes_per_token - max_source_length, 0))
    if max_buffer_bytes is not None and layout.layers:
        token = max(each.num_heads * layout.width(each) for each in layout.layers)
        length = min(length, max_buffer_bytes // (slots * token * layout.element.itemsize))
    return length


@dataclass(frozen=True, slots=True)
class _Room:
    """A limit for what all slots take together.

    Attributes:
        what: what takes it.
        length: number of tokens of a slot.
        token_bytes: what each of them takes.
        limit: in bytes.
        holds: says the limit in an error, for its size.
        fixed_bytes: what a slot takes besides.
    """

    what: str
    length: int
    token_bytes: int
    limit: int
    holds: str
    fixed_bytes: int = 0

    @classmethod
    def of_cache(
        cls, layout: KVLayout, length: int, limit: int, holds: str = "{} may be used"
    ) -> "_Room":
        return cls("a KV cache", length, layout.bytes_per_token, limit, holds, layout.state_bytes)

    @property
    def slot_bytes(self) -> int:
        return self.length * self.token_bytes + self.fixed_bytes

    def plan(self, asked: int | None, slots: int) -> int:
        """How many slots fit, at most ``slots``.

        Raises:
            ConfigError: not as many as were asked for, or none.
        """
        fitting = self.limit // self.slot_bytes
        if fitting >= slots or (fitting and asked is None):
            return min(fitting, slots)
        raise self.refusal(asked or 1)

    def refusal(self, slots: int) -> ConfigError:
        """That so many slots do not fit, and what would."""
        fitting = self.limit // self.slot_bytes
        ways = [f"--slots {fitting}"] if fitting else []
        left = self.limit // slots - self.fixed_bytes
        fitting_length = left // self.token_bytes if self.token_bytes else 0
        if fitting_length >= _MIN_CONTEXT:
            ways.append(f"--max-context {fitting_length}")
        return ConfigError(
            f"{self.what} of {slots} slot{'s' if slots > 1 else ''} of {self.length} tokens takes "
            f"{_size(slots * self.slot_bytes)}, and {self.holds.format(_size(self.limit))}: "
            + (f"{' or '.join(ways)} would fit" if ways else "not even a short text would fit")
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.1f} MB"
