"""Runner: passes of a causal model over the KV cache, in place."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from maskdial.models.bundle import KVLayout
from maskdial.runtime.kv_cache import KVCache
from maskdial.runtime.session import Session


def pass_inputs(
    input_ids: NDArray[np.int64],
    starts: NDArray[np.int64],
    num_tokens: NDArray[np.int64],
    rows: NDArray[np.int64],
) -> dict[str, NDArray[Any]]:
    """What a pass is fed beside the cache, by the names that `maskdial.models.bundle` gives them.

    Args:
        input_ids: int64 (batch, longest), right-padded.
        starts: int64 (batch,), tokens that each row has in the cache.
        num_tokens: int64 (batch,), how many of its tokens are new.
        rows: int64 (num_rows,), flat indices of the tokens whose logits are wanted.
    """
    seqlens_k = (starts + num_tokens - 1).astype(np.int32)
    return {
        "input_ids": np.ascontiguousarray(input_ids),
        "position_ids": starts[:, None] + np.arange(input_ids.shape[1]),
        "seqlens_k": seqlens_k,
        "total_sequence_length": np.array(seqlens_k.max() + 1, np.int32),
        "rows": rows,
    }


def pad_prompts(prompts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Prompts of different lengths as one batch, int64 (num_prompts, longest), right-padded."""
    token_ids = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
    for row, prompt in zip(token_ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return token_ids


class Runner:
    """Runs prompts and decode steps; a pass writes the new keys and values where they stay.

    Past and present of each layer are bound to the same memory: adjoining slots of the cache. Those
    bindings are made once per first slot and number of slots, and only the small inputs are bound
    anew.

    Args:
        session: of a causal graph on the CPU; `maskdial.models.bundle` has its inputs and outputs.
        layout: the shape of a layer's cache.
        slots: sequences that the cache holds.
        max_length: most tokens per sequence.
        vocab_size: the width of the logits.

    Raises:
        ConfigError: the cache does not fit into memory.
    """

    def __init__(
        self, session: Session, layout: KVLayout, *, slots: int, max_length: int, vocab_size: int
    ) -> None:
        self._session = session
        self._vocab_size = vocab_size
        self.cache = KVCache.allocate(layout, slots, max_length)
        self._decode_logits: NDArray[np.float32] = np.empty((slots, vocab_size), np.float32)
        self._bindings: dict[tuple[int, int], ort.IOBinding] = {}

    def prefill(
        self, slot: int, token_ids: NDArray[np.int64], start: int, num_logits: int = 1
    ) -> NDArray[np.float32]:
        """Reads a piece of a text into a slot.

        Args:
            slot: whose first ``start`` tokens are in the cache.
            token_ids: int64 (num_tokens,), at least one.
            start: position of the first of them.
            num_logits: how many of them the logits are wanted of, counted from the last.

        Returns:
            Logits, float32 (num_logits, vocab_size).
        """
        num_tokens = len(token_ids)
        logits = np.empty((num_logits, self._vocab_size), np.float32)
        rows = np.arange(num_tokens - num_logits, num_tokens)
        self._run(slot, token_ids[None], np.array([start]), np.array([num_tokens]), rows, logits)
        return logits

    def prefill_together(
        self, slot: int, prompts: Sequence[NDArray[np.int64]]
    ) -> NDArray[np.float32]:
        """Reads several whole prompts into empty slots, from ``slot`` on, as one padded batch.

        Args:
            slot: of the first prompt; the others follow it.
            prompts: int64 (num_tokens,) each.

        Returns:
            The logits of each prompt's last token, float32 (num_prompts, vocab_size).
        """
        num_tokens = np.array([len(prompt) for prompt in prompts])
        token_ids = pad_prompts(prompts)
        logits = np.empty((len(prompts), self._vocab_size), np.float32)
        rows = np.arange(len(prompts)) * token_ids.shape[1] + num_tokens - 1
        self._run(slot, token_ids, np.zeros_like(num_tokens), num_tokens, rows, logits)
        return logits

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
        logits = self._decode_logits[: len(rows)]
        self._run(0, token_ids[:, None], lengths, np.ones_like(lengths), rows, logits)
        return logits

    def warm_up(self) -> None:
        """Runs a first pass of each kind; slot 0 must not be in use."""
        self.prefill(0, np.zeros(1, np.int64), 0)
        self.decode(*np.array([[0], [1], [0]], np.int64))

    def _run(
        self,
        slot: int,
        input_ids: NDArray[np.int64],
        starts: NDArray[np.int64],
        num_tokens: NDArray[np.int64],
        rows: NDArray[np.int64],
        logits: NDArray[np.float32],
    ) -> None:
        """One pass of ``input_ids`` (batch, longest), right-padded, in the slots from ``slot`` on.

        Row i has ``num_tokens[i]`` tokens, which follow the first ``starts[i]`` of its slot.
        """
        batch = len(input_ids)
        feeds = pass_inputs(input_ids, starts, num_tokens, rows)
        if (slot, batch) not in self._bindings:
            self._bindings[slot, batch] = self._bind_cache(slot, batch)
        binding = self._bindings[slot, batch]
        for name in feeds.keys() & self._session.input_names:
            array = feeds[name]  # bound without a copy: `feeds` keeps it alive through the pass
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        binding.bind_output("logits", "cpu", 0, logits.dtype, logits.shape, logits.ctypes.data)
        self._session.run_with_binding(binding)

    def _bind_cache(self, slot: int, n: int) -> ort.IOBinding:
        binding = self._session.io_binding()
        for kind, arrays in (("key", self.cache.keys), ("value", self.cache.values)):
            for layer, array in enumerate(arrays):
                view = array[slot : slot + n]
                where = ("cpu", 0, view.dtype, view.shape, view.ctypes.data)
                binding.bind_input(f"past_{kind}.{layer}", *where)
                binding.bind_output(f"present_{kind}.{layer}", *where)
        return binding
