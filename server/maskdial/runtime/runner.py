"""Runner: passes of a causal model over the KV cache, in place."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from maskdial.bundle.manifest import KVLayout
from maskdial.kernels.logits import SUMMARY
from maskdial.runtime.kv_cache import KVCache
from maskdial.runtime.logits import DeviceLogits, Logits, SummarizedLogits
from maskdial.runtime.memory import Buffer, HostMemory, Memory, Staging, host_buffer
from maskdial.runtime.piece import Piece
from maskdial.runtime.session import Session

_TOTAL_LENGTH = "total_sequence_length"
_TOTAL_SOURCE_LENGTH = "total_source_length"
_NEW_TOKENS = "new_tokens"
_LENGTHS = "lengths"
_ADAPTERS = "adapters"
_AHEAD = "tokens_ahead"
_HIDDEN, _PREVIOUS_HIDDEN = "hidden", "previous_hidden"


class Runner:
    """Runs prefill and decode passes, which write the new keys and values where they stay.

    Each layer's past and present are bound to the same memory, adjacent slots of the cache; a graph
    that was rewritten for the kernels writes to the past, and has no present. These bindings are
    made once per first slot and number of slots; the small inputs and the logits are bound again
    when they have another shape. The host waits for each pass. All passes must run in one thread.

    Where a binding must begin with an allocation (WebGPU's buffers are handles, not addresses),
    passes of a prompt run in slot 0 or in a staging slot of its own, from which the new keys and
    values are copied to where they stay.

    Args:
        session: of a causal graph; `maskdial.bundle.bundle` lists its inputs and outputs.
        layout: the shape of a layer's cache.
        memory: that of the session's provider, where the cache and the logits lie. Default: main
            memory.
        slots: number of sequences that the cache holds.
        max_length: maximum number of tokens per sequence.
        vocab_size: the width of the logits.
        max_tokens: maximum number of tokens of one pass, padding included. Default: one full slot.
        max_rows: maximum number of rows of logits of one pass. Default: one full slot.
        max_ahead: maximum number of tokens of one pass that see later ones, and are not a prompt's,
            in addition to those and their rows of logits; of a graph that has such passes.
        max_source_length: maximum number of tokens of a source text, for the decoder of an
            encoder-decoder model, whose passes have one token per row.
        hidden_size: columns of the hidden states that the graph gives, and perhaps reads. Default:
            they are left alone.
        batch_sizes: the sizes that decode steps are padded to, ascending, in addition to ``slots``,
            so that each of them can be captured as a CUDA graph. Default: no padding.

    Attributes:
        adapters: int64 (slots,), the address of each slot's adapter or 0, to be set before its
            passes; None if the graph takes none.
        looks_ahead: whether tokens of a `Piece` may see later ones, in all layers.

    Raises:
        ConfigError: the memory is too small.
    """

    def __init__(
        self,
        session: Session,
        layout: KVLayout,
        *,
        memory: Memory | None = None,
        slots: int,
        max_length: int,
        vocab_size: int,
        max_tokens: int | None = None,
        max_rows: int | None = None,
        max_ahead: int = 0,
        max_source_length: int | None = None,
        hidden_size: int = 0,
        batch_sizes: Sequence[int] = (),
    ) -> None:
        self._session = session
        self._bindings: dict[tuple[bool, int, int], _Binding] = {}
        self._memory = memory = HostMemory() if memory is None else memory
        self.slots = slots
        self.max_length = max_length
        self._packs = _NEW_TOKENS in session.input_names
        takes_ahead = _AHEAD in session.input_names and not layout.states and not session.windows
        self.looks_ahead = takes_ahead and max_ahead > 0
        self._batch_sizes = (*(size for size in batch_sizes if size < slots), slots)
        self._pads = bool(batch_sizes)
        # The staging slot is the beginning of an allocation, for prompts of other slots.
        staging = None
        if not memory.binds_views and slots > 1 and max_source_length is None:
            staging = KVCache.allocate(memory, layout, 1, max_length, None, session.windows)
        self.cache = KVCache.allocate(
            memory, layout, slots, max_length, max_source_length, session.windows
        )
        self._staging = staging or self.cache
        io = memory.of_passes
        beside = slots if self._packs else 0  # steps in the pass of a prompt
        beside += max_ahead if self.looks_ahead else 0
        max_tokens = max((max_tokens or max_length) + beside, slots)
        max_rows = max((max_rows or max_length) + beside, slots)
        summarizes = SUMMARY.keys() <= set(session.output_names)
        self._decode_logits = _LogitsBuffer(io, slots, vocab_size, summarizes=summarizes)
        self._prefill_logits = _LogitsBuffer(io, max_rows, vocab_size, summarizes=summarizes)
        self._hidden, self._hidden_view = None, None
        if hidden_size:
            self._hidden = io.allocate((max_tokens, hidden_size), np.dtype(np.float32))
            self._hidden_view = io.view(self._hidden)
        self._last_read = 0, np.zeros(0, np.int64)
        inputs = {
            "input_ids": Staging(io, max_tokens, np.int64),
            "position_ids": Staging(io, max_tokens, np.int64),
            "seqlens_k": Staging(io, slots, np.int32),
            "rows": Staging(io, max_rows, np.int64),
            "source_seqlens_k": Staging(io, slots, np.int32),
            _NEW_TOKENS: Staging(io, slots, np.int32),
            _LENGTHS: Staging(io, slots, np.int32),
            _ADAPTERS: Staging(io, slots, np.int64),
            _AHEAD: Staging(io, max_tokens, np.int32),
            _PREVIOUS_HIDDEN: Staging(io, max_tokens * hidden_size, np.float32),
        }
        self._inputs = {n: each for n, each in inputs.items() if n in session.input_names}
        takes_adapters = _ADAPTERS in session.input_names
        self.adapters = np.zeros(slots, np.int64) if takes_adapters else None
        # The operators read these on the host.
        self._lengths = {
            name: Staging(HostMemory(), 1, np.int32)
            for name in (_TOTAL_LENGTH, _TOTAL_SOURCE_LENGTH)
            if name in session.input_names
        }
        self._numbers = np.arange(slots)
        self._none_ahead = np.zeros(max_tokens, np.int64)

    def __del__(self) -> None:
        with self._session.turn:
            self._bindings.clear()

    def prefill(
        self, slot: int, token_ids: NDArray[np.int64], start: int, num_logits: int = 1
    ) -> Logits:
        """Reads a piece of a text into a slot.

        Args:
            slot: whose first ``start`` tokens are in the cache.
            token_ids: int64 (num_tokens,), at least one.
            start: position of the first of them.
            num_logits: how many of them to compute logits for, counted from the last.

        Returns:
            Logits, float32 (num_logits, vocab_size), valid until the next prefill.
        """
        num_tokens = len(token_ids)
        rows = np.arange(num_tokens - num_logits, num_tokens)
        return self._prefill(slot, token_ids[None], np.array([start]), np.array([num_tokens]), rows)

    def prefill_together(self, slot: int, prompts: Sequence[NDArray[np.int64]]) -> Logits:
        """Reads several whole prompts into empty slots, from ``slot`` on, as one padded batch.

        Args:
            slot: of the first prompt; the others follow it.
            prompts: int64 (num_tokens,) each.

        Returns:
            The logits of each prompt's last token, float32 (num_prompts, vocab_size), valid until
            the next prefill.
        """
        num_tokens = np.array([len(prompt) for prompt in prompts])
        token_ids = _pad(prompts)
        rows = np.arange(len(prompts)) * token_ids.shape[1] + num_tokens - 1
        return self._prefill(slot, token_ids, np.zeros_like(num_tokens), num_tokens, rows)

    def decode(
        self, token_ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> Logits:
        """One step of the sequences in slots 0..n-1.

        Args:
            token_ids: int64 (n,), each slot's newest token.
            lengths: int64 (n,), tokens in the cache before this pass.
            rows: int64 (num_rows,), the slots whose logits are wanted, ascending, at least one.

        Returns:
            Logits, float32 (num_rows, vocab_size), valid until the next decode.
        """
        if self._pads:
            self._padded_step(token_ids, lengths, rows)
            logits = self._decode_logits.rows(rows)
        else:
            num_tokens = np.zeros_like(lengths)  # dummy rows leave their states as they are
            num_tokens[rows] = 1
            feeds = {
                "input_ids": token_ids[:, None],
                "position_ids": lengths[:, None],
                "seqlens_k": lengths,
                "rows": rows,
                _LENGTHS: num_tokens,
            }
            if self._packs:  # without the dummy rows
                feeds |= {
                    "input_ids": token_ids[rows][None],
                    "position_ids": lengths[rows][None],
                    "seqlens_k": lengths + num_tokens - 1,
                    "rows": self._numbers[: len(rows)],
                    _NEW_TOKENS: num_tokens,
                }
            self._pass(0, len(lengths), max(lengths.tolist()) + 1, feeds, self._decode_logits)
            logits = self._decode_logits.first(len(rows))
        self.cache.lengths[rows] = lengths[rows] + 1
        return logits

    @property
    def decode_and_prefill(self) -> Callable[..., Logits] | None:
        """`_decode_and_prefill`, if the graph takes rows of different lengths; else None."""
        return self._decode_and_prefill if self._packs else None

    def _decode_and_prefill(
        self,
        token_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        rows: NDArray[np.int64],
        pieces: Sequence[Piece],
    ) -> Logits:
        """A decode step and pieces of texts, in one pass.

        Args:
            token_ids: int64 (n,), as of `decode`.
            lengths: int64 (n,), as of `decode`.
            rows: int64 (num_rows,), the slots that decode, ascending, perhaps none; others are left
                alone.
            pieces: at least one.

        Returns:
            Logits, float32 (num_logits, vocab_size), those of the rows and then of each piece,
            valid until the next prefill.
        """
        slots = (*rows.tolist(), *(piece.slot for piece in pieces))
        first, last = min(slots), max(slots)
        longest = max(len(piece.token_ids) for piece in pieces)
        input_ids = np.zeros((last - first + 1, longest), np.int64)
        starts = np.ones(len(input_ids), np.int64)  # of a row without tokens, anything
        num_tokens = np.zeros(len(input_ids), np.int64)
        input_ids[rows - first, 0] = token_ids[rows]
        starts[rows - first] = lengths[rows]
        num_tokens[rows - first] = 1
        wanted = [(rows - first) * longest]
        ahead = None
        if any(piece.ahead is not None for piece in pieces):
            ahead = np.zeros_like(input_ids)
        for piece in pieces:
            if piece.start == 0:
                self.cache.clear_states(piece.slot)
            row, size = piece.slot - first, len(piece.token_ids)
            input_ids[row, :size] = piece.token_ids
            starts[row], num_tokens[row] = piece.start, size
            wanted.append(row * longest + piece.rows)
            if ahead is not None and piece.ahead is not None:
                ahead[row, :size] = piece.ahead
        flat = np.concatenate(wanted)
        hidden = None
        if _PREVIOUS_HIDDEN in self._inputs:
            in_order = sorted(pieces, key=lambda piece: piece.slot)
            rows_of = [each.previous_hidden for each in in_order]
            hidden = np.concatenate([each for each in rows_of if each is not None])[None]
        self._run(
            first,
            input_ids,
            starts,
            num_tokens,
            flat,
            self._prefill_logits,
            ahead=ahead,
            hidden=hidden,
        )
        took = np.flatnonzero(num_tokens)
        self.cache.lengths[first + took] = (starts + num_tokens)[took]
        return self._prefill_logits.first(len(flat))

    def hidden(self, slots: Iterable[int]) -> list[NDArray[np.float32]]:
        """The hidden states of the tokens that the last pass read in some slots.

        Only of a graph that takes rows of different lengths, and with a ``hidden_size``.

        Returns:
            float32 (num_tokens, hidden_size) for each slot, valid until the next pass.
        """
        view, (first, num_tokens) = self._hidden_view, self._last_read
        assert view is not None, "only a runner in main memory has hidden states"
        ends = [0, *np.cumsum(num_tokens).tolist()]
        return [view[ends[slot - first] : ends[slot - first + 1]] for slot in slots]

    def warm_up(self) -> None:
        """Runs a first pass of each kind, which captures the decode steps; all slots are empty."""
        if self.cache.source is None:
            self.prefill(0, np.zeros(1, np.int64), 0)
        for batch in self._batch_sizes if self._pads else (1,):
            self.decode(*np.zeros((3, batch), np.int64))
        self.cache.lengths[0] = 0

    def _prefill(
        self,
        slot: int,
        token_ids: NDArray[np.int64],
        starts: NDArray[np.int64],
        num_tokens: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> Logits:
        for row in np.flatnonzero(starts == 0):
            self.cache.clear_states(slot + int(row))
        if slot and self._staging is not self.cache:
            start, size = int(starts[0]), int(num_tokens[0])
            self._staging.copy_from(self.cache, slot, 0, 0, start)
            self._run(
                0, token_ids, starts, num_tokens, rows, self._prefill_logits, cache=self._staging
            )
            self.cache.copy_from(self._staging, 0, slot, start, size)
            return self._prefill_logits.first(len(rows))
        self._run(slot, token_ids, starts, num_tokens, rows, self._prefill_logits)
        self.cache.lengths[slot : slot + len(token_ids)] = starts + num_tokens
        return self._prefill_logits.first(len(rows))

    def _padded_step(
        self, token_ids: NDArray[np.int64], lengths: NDArray[np.int64], decoding: NDArray[np.int64]
    ) -> None:
        """A decode step of the next batch size, whose last rows are dummies."""
        num_rows = len(token_ids)
        batch = next(size for size in self._batch_sizes if size >= num_rows)
        padded = np.zeros((batch, 1), np.int64)
        padded[:num_rows, 0] = token_ids
        # A dummy row writes where its slot's next token goes, or over the last one of a full slot.
        starts = np.minimum(self.cache.lengths[:batch], self.max_length - 1)
        starts[:num_rows] = lengths
        rows, num_tokens = np.arange(batch), np.ones_like(starts)
        taken = np.isin(rows, decoding)
        self._run(0, padded, starts, num_tokens, rows, self._decode_logits, batch, taken)

    def _run(
        self,
        slot: int,
        input_ids: NDArray[np.int64],
        starts: NDArray[np.int64],
        num_tokens: NDArray[np.int64],
        rows: NDArray[np.int64],
        logits: "_LogitsBuffer",
        captured_size: int | None = None,
        taken: NDArray[np.bool_] | None = None,
        cache: KVCache | None = None,
        ahead: NDArray[np.int64] | None = None,
        hidden: NDArray[np.float32] | None = None,
    ) -> None:
        """One pass of ``input_ids`` (batch, longest), right-padded, in the slots from ``slot`` on.

        Row i has ``num_tokens[i]`` tokens, which follow the first ``starts[i]`` of its slot.
        ``rows`` are the flat indices of the tokens to compute logits for. With a
        ``captured_size`` the pass is captured under that number, if the session captures passes.
        Rows that are not ``taken``, bool (batch,), are dummies, which change no states. The slots
        are those of ``cache``, by default the runner's own. ``ahead`` (batch, longest) is that of
        each piece, ``hidden`` (1, sum of num_tokens, hidden_size) the hidden states before them.
        """
        last = starts + num_tokens - 1
        batch, position_ids = len(input_ids), starts[:, None] + np.arange(input_ids.shape[1])
        if self._packs:
            valid = np.arange(input_ids.shape[1]) < num_tokens[:, None]
            rows = (np.cumsum(valid) - 1)[rows]
            input_ids, position_ids = input_ids[valid][None], position_ids[valid][None]
            ahead = None if ahead is None else ahead[valid]
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "seqlens_k": last,
            "rows": rows,
            _NEW_TOKENS: num_tokens,
            _LENGTHS: num_tokens if taken is None else num_tokens * taken,
        }
        if ahead is not None:
            feeds[_AHEAD] = ahead
        if hidden is not None:
            feeds[_PREVIOUS_HIDDEN] = hidden
        self._pass(slot, batch, int(last.max()) + 1, feeds, logits, captured_size, cache)

    def _pass(
        self,
        slot: int,
        batch: int,
        total_length: int,
        feeds: dict[str, NDArray[Any]],
        logits: "_LogitsBuffer",
        captured_size: int | None = None,
        cache: KVCache | None = None,
    ) -> None:
        """One pass in ``batch`` slots from ``slot`` on, the longest of ``total_length`` tokens."""
        if captured_size is not None and self._session.captures:
            # A CUDA graph keeps the value that it is captured with, so it has to hold for every
            # step. Kernels go by each row's own length.
            total_length = self.max_length
        lengths = {_TOTAL_LENGTH: total_length}
        if self.cache.source is not None:
            sources = self.cache.source.lengths[slot : slot + batch].clip(1)
            feeds["source_seqlens_k"] = sources - 1
            lengths[_TOTAL_SOURCE_LENGTH] = int(sources.max())
        feeds.setdefault(_AHEAD, self._none_ahead[: feeds["input_ids"].size])
        if self.adapters is not None:
            feeds[_ADAPTERS] = self.adapters[slot : slot + batch]
        with self._session.turn:
            binding = self._binding(cache or self.cache, slot, batch)
            device = self._memory.of_passes.device
            for name, staging in self._inputs.items():
                binding.bind_input(name, device, staging.write(feeds[name]))
            for name, staging in self._lengths.items():
                binding.bind_input(name, "cpu", staging.write(np.array(lengths[name])))
            for name, buffer in logits.outputs(len(feeds["rows"])):
                binding.bind_output(name, device, buffer)
            if self._hidden is not None:
                self._last_read = slot, feeds[_NEW_TOKENS]
                binding.bind_output(_HIDDEN, device, self._hidden[: feeds["input_ids"].size])
            self._session.run_with_binding(binding.ort, captured_size)
        self._memory.synchronize()

    def _binding(self, cache: KVCache, slot: int, batch: int) -> "_Binding":
        """A binding of some adjacent slots of a cache."""
        key = cache is self.cache, slot, batch
        if key not in self._bindings:
            binding = _Binding(
                self._session.io_binding(), copies=self._memory.of_passes is not self._memory
            )
            self._bindings[key] = binding
            device = self._memory.device
            for name, view in self._views(cache, slot, batch):
                binding.bind_input(f"past_{name}", device, view)
                if f"present_{name}" in self._session.output_names:
                    binding.bind_output(f"present_{name}", device, view)
            if self.cache.source is not None:
                for name, view in self._views(self.cache.source, slot, batch):
                    binding.bind_input(f"cross_{name}", device, view)
        return self._bindings[key]

    def _views(self, cache: KVCache, slot: int, batch: int) -> Iterator[tuple[str, Buffer]]:
        """Some adjacent slots of a cache's arrays, by what ONNX Runtime takes for their address."""
        for name, buffer in cache.named():
            view = buffer[slot : slot + batch]
            yield name, replace(view, pointer=self._memory.bound(view))


class _Binding:
    """ONNX Runtime's binding; what it has already is not bound again, which takes microseconds.

    Args:
        binding: of a session.
        copies: whether inputs in main memory are copied to the device, as they are when bound.
    """

    def __init__(self, binding: ort.IOBinding, *, copies: bool) -> None:
        self.ort = binding
        self._copies = copies
        self._bound: dict[str, tuple[int, tuple[int, ...]]] = {}

    def bind_input(self, name: str, device: str, buffer: Buffer) -> None:
        self._bind(self.ort.bind_input, name, device, buffer)

    def bind_output(self, name: str, device: str, buffer: Buffer) -> None:
        self._bind(self.ort.bind_output, name, device, buffer)

    def _bind(self, bind: Callable[..., None], name: str, device: str, buffer: Buffer) -> None:
        place = buffer.pointer, buffer.shape
        if self._copies or self._bound.get(name) != place:
            bind(name, device, 0, buffer.dtype, buffer.shape, buffer.pointer)
            self._bound[name] = place


class _LogitsBuffer:
    """Where passes of one kind write their logits, float32 (max_rows, vocab_size).

    If the graph ``summarizes`` them, that is written beside them, in main memory.
    """

    def __init__(self, memory: Memory, max_rows: int, vocab_size: int, *, summarizes: bool) -> None:
        self._memory = memory
        self._logits = memory.allocate((max_rows, vocab_size), np.dtype(np.float32))
        self._buffers = {"logits": self._logits}
        self._view: NDArray[np.float32] | SummarizedLogits | None = memory.view(self._logits)
        if summarizes and self._view is not None:
            summary = {name: np.zeros(max_rows, dtype) for name, dtype in SUMMARY.items()}
            self._buffers |= {name: host_buffer(array) for name, array in summary.items()}
            self._view = SummarizedLogits(self._view, **summary)

    def outputs(self, num_rows: int) -> Iterator[tuple[str, Buffer]]:
        """The names of a pass's outputs, and where it writes them."""
        return ((name, buffer[:num_rows]) for name, buffer in self._buffers.items())

    def first(self, num_rows: int) -> Logits:
        """The logits of the first rows, float32 (num_rows, vocab_size)."""
        if self._view is not None:
            return self._view[:num_rows]
        return self.rows(np.arange(num_rows))

    def rows(self, rows: NDArray[np.int64]) -> Logits:
        """Some rows of the logits, by their indices, int64 (num_rows,)."""
        if self._view is not None:
            return self._view[rows]
        return DeviceLogits(self._logits, rows, self._memory)


def _pad(prompts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Prompts of different lengths as one batch, int64 (num_prompts, longest), right-padded."""
    token_ids = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
    for row, prompt in zip(token_ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return token_ids
