"""Runner: passes of a causal model over the KV cache, in place."""

from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from maskdial.bundle import KVLayout
from maskdial.causal.kv_cache import KVCache
from maskdial.errors import ConfigError
from maskdial.runtime import Session


class Runner:
    """Runs prompts and decode steps; a pass writes the new keys and values where they stay.

    Past and present of each layer are bound to the same memory: one slot for a prompt, the first n
    slots for a decode step. Those bindings are made once per slot and per n, and only the small
    inputs are bound anew.

    Args:
        session: of a causal graph, see `maskdial.bundle` for its inputs and outputs.
        layout: the shape of a layer's cache.
        slots: sequences that the cache holds.
        max_length: most tokens per sequence.
        vocab_size: the width of the logits.

    Raises:
        ConfigError: the session does not run on the CPU, or the cache does not fit into memory.
    """

    def __init__(
        self, session: Session, layout: KVLayout, *, slots: int, max_length: int, vocab_size: int
    ) -> None:
        if session.provider != "cpu":
            raise ConfigError(
                f"causal models run on the CPU only, not on {session.provider!r}: their cache "
                "lies in main memory; use --provider cpu"
            )
        self._session = session
        self._cache = KVCache.allocate(layout, slots, max_length)
        self._prefill_logits: NDArray[np.float32] = np.empty((1, vocab_size), np.float32)
        self._decode_logits: NDArray[np.float32] = np.empty((slots, vocab_size), np.float32)
        self._prefill_bindings: dict[int, ort.IOBinding] = {}
        self._decode_bindings: dict[int, ort.IOBinding] = {}

    @property
    def bytes_per_token(self) -> int:
        """Cache bytes that one token takes."""
        return self._cache.bytes_per_token

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copies the first tokens of one slot to another."""
        self._cache.copy(source, target, num_tokens)

    def prefill(self, slot: int, token_ids: NDArray[np.int64], start: int) -> NDArray[np.float32]:
        """Reads a piece of a prompt into a slot.

        Args:
            slot: whose first ``start`` tokens are in the cache.
            token_ids: int64 (num_tokens,), at least one.
            start: position of the first of them.

        Returns:
            The last token's logits, float32 (vocab_size,), valid until the next prefill.
        """
        num_tokens = len(token_ids)
        logits = self._prefill_logits
        if slot not in self._prefill_bindings:
            self._prefill_bindings[slot] = self._bind_cache(slot, 1)
        self._run(
            self._prefill_bindings[slot],
            token_ids.reshape(1, num_tokens),
            np.array([start], np.int64),
            np.array([num_tokens - 1], np.int64),
            logits,
        )
        return logits.reshape(-1)

    def decode(
        self, token_ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """One step of the sequences in slots 0..n-1.

        Args:
            token_ids: int64 (n,), each slot's newest token.
            lengths: int64 (n,), tokens in the cache before this pass.
            rows: int64 (num_rows,), the slots whose logits are wanted, at least one.

        Returns:
            Logits, float32 (num_rows, vocab_size), valid until the next decode.
        """
        n = len(token_ids)
        if n not in self._decode_bindings:
            self._decode_bindings[n] = self._bind_cache(0, n)
        logits = self._decode_logits[: len(rows)]
        self._run(self._decode_bindings[n], token_ids.reshape(n, 1), lengths, rows, logits)
        return logits

    def _bind_cache(self, slot: int, n: int) -> ort.IOBinding:
        binding = self._session.io_binding()
        for kind, arrays in (("key", self._cache.keys), ("value", self._cache.values)):
            for layer, array in enumerate(arrays):
                view = array[slot : slot + n]
                where = ("cpu", 0, view.dtype, view.shape, view.ctypes.data)
                binding.bind_input(f"past_{kind}.{layer}", *where)
                binding.bind_output(f"present_{kind}.{layer}", *where)
        return binding

    def _run(
        self,
        binding: ort.IOBinding,
        input_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        rows: NDArray[np.int64],
        logits: NDArray[np.float32],
    ) -> None:
        """One pass of ``input_ids`` (batch, new_tokens), after ``lengths`` (batch,) tokens."""
        num_new = input_ids.shape[1]
        seqlens_k = (lengths + (num_new - 1)).astype(np.int32)
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": np.ascontiguousarray(input_ids),
            "position_ids": lengths[:, None] + np.arange(num_new),
            "seqlens_k": seqlens_k,
            "total_sequence_length": np.array(seqlens_k.max() + 1, np.int32),
            "rows": rows,
        }
        for name in feeds.keys() & self._session.input_names:
            array = feeds[name]  # bound without a copy: `feeds` keeps it alive through the pass
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        binding.bind_output("logits", "cpu", 0, logits.dtype, logits.shape, logits.ctypes.data)
        self._session.run_with_binding(binding)
