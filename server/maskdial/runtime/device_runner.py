"""DeviceRunner: passes of a causal model over a KV cache in a device's memory."""

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from maskdial.models.bundle import KVLayout
from maskdial.runtime.device_kv_cache import DeviceKVCache
from maskdial.runtime.device_logits import DeviceLogits
from maskdial.runtime.memory import Device, DeviceArray, Staging, on_host
from maskdial.runtime.runner import pad_prompts, pass_inputs
from maskdial.runtime.session import Session

# Decode steps are captured as CUDA graphs of these batch sizes, and of as many rows as there are
# slots. A step of fewer rows runs along with rows of no meaning.
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


class DeviceRunner:
    """Runs prompts and decode steps; a pass writes the new keys and values where they stay.

    Everything that a decode step reads and writes has one address for each batch size, as a CUDA
    graph needs it. The host waits for each pass. All passes must run in one thread.

    Args:
        session: of a causal graph on the device; see `maskdial.models.bundle`.
        device: where the cache and the logits lie.
        layout: the shape of a layer's cache.
        slots: sequences that the cache holds.
        max_length: most tokens per sequence.
        vocab_size: the width of the logits.
        max_tokens: most tokens of one pass, with padding.
        max_rows: most rows of logits of one pass over prompts.

    Raises:
        ConfigError: the memory is not there.
    """

    def __init__(
        self,
        session: Session,
        device: Device,
        layout: KVLayout,
        *,
        slots: int,
        max_length: int,
        vocab_size: int,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self._session = session
        self._device = device
        self._max_length = max_length
        self.cache = DeviceKVCache.allocate(device, layout, slots, max_length)
        self.batch_sizes = (*(size for size in BATCH_SIZES if size < slots), slots)
        logits = np.dtype(np.float32)
        self._decode_logits = device.allocate((slots, vocab_size), logits)
        self._prompt_logits = device.allocate((max_rows, vocab_size), logits)
        self._inputs = {
            "input_ids": Staging(device, max(max_tokens, slots), np.int64),
            "position_ids": Staging(device, max(max_tokens, slots), np.int64),
            "seqlens_k": Staging(device, slots, np.int32),
            "rows": Staging(device, max(max_rows, slots), np.int64),
        }
        # What a captured step takes for its longest row. The kernels go by each row's own length.
        self._longest = np.array(max_length, np.int32)
        self._bindings: dict[tuple[int, int], ort.IOBinding] = {}
        self._steps: dict[int, ort.IOBinding] = {}

    def prefill(
        self, slot: int, token_ids: NDArray[np.int64], start: int, num_logits: int = 1
    ) -> DeviceLogits:
        """Reads a piece of a text into a slot; arguments as of `maskdial.runtime.runner.Runner`.

        Returns:
            Logits, float32 (num_logits, vocab_size), valid until the next prompt is read.
        """
        num_tokens = len(token_ids)
        rows = np.arange(num_tokens - num_logits, num_tokens)
        return self._read(slot, token_ids[None], np.array([start]), np.array([num_tokens]), rows)

    def prefill_together(self, slot: int, prompts: Sequence[NDArray[np.int64]]) -> DeviceLogits:
        """Reads several whole prompts into empty slots, from ``slot`` on, as one padded batch.

        Returns:
            The logits of each prompt's last token, float32 (num_prompts, vocab_size), valid until
            the next prompt is read.
        """
        num_tokens = np.array([len(prompt) for prompt in prompts])
        token_ids = pad_prompts(prompts)
        rows = np.arange(len(prompts)) * token_ids.shape[1] + num_tokens - 1
        return self._read(slot, token_ids, np.zeros_like(num_tokens), num_tokens, rows)

    def decode(
        self, token_ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> DeviceLogits:
        """One step of the sequences in slots 0..n-1; arguments as of the CPU's runner.

        Returns:
            Logits, float32 (num_rows, vocab_size), valid until the next decode.
        """
        num_rows = len(token_ids)
        batch = next(size for size in self.batch_sizes if size >= num_rows)
        ids = np.zeros((batch, 1), np.int64)
        ids[:num_rows, 0] = token_ids
        # A row of no meaning writes where its slot's next token comes, or where none is left.
        starts = np.minimum(self.cache.lengths[:batch], self._max_length - 1)
        starts[:num_rows] = lengths
        self._step(ids, starts)
        self.cache.lengths[rows] = lengths[rows] + 1
        return DeviceLogits(self._decode_logits, rows, self._device)

    def warm_up(self) -> None:
        """Runs a first pass of each kind, which captures the decode steps; all slots are empty."""
        self.prefill(0, np.zeros(1, np.int64), 0)
        self.cache.lengths[0] = 0
        for batch in self.batch_sizes:
            self._step(np.zeros((batch, 1), np.int64), np.zeros(batch, np.int64))

    def _read(
        self,
        slot: int,
        token_ids: NDArray[np.int64],
        starts: NDArray[np.int64],
        num_tokens: NDArray[np.int64],
        rows: NDArray[np.int64],
    ) -> DeviceLogits:
        """A pass of prompts, (batch, longest), in the slots from ``slot`` on."""
        batch = len(token_ids)
        if (slot, batch) not in self._bindings:
            self._bindings[slot, batch] = self._bind_cache(slot, batch)
        binding = self._bindings[slot, batch]
        feeds = pass_inputs(token_ids, starts, num_tokens, rows)
        self._bind_inputs(binding, feeds)
        self._bind_output(binding, "logits", self._prompt_logits[: len(rows)])
        self._session.run_with_binding(binding)
        self._device.synchronize()
        self.cache.lengths[slot : slot + batch] = starts + num_tokens
        return DeviceLogits(self._prompt_logits, np.arange(len(rows)), self._device)

    def _step(self, token_ids: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """A decode step of one of the batch sizes."""
        batch = len(token_ids)
        feeds = pass_inputs(token_ids, starts, np.ones_like(starts), np.arange(batch))
        if self._session.captures:
            feeds["total_sequence_length"] = self._longest
        if batch not in self._steps:
            self._steps[batch] = self._bind_cache(0, batch)
            self._bind_output(self._steps[batch], "logits", self._decode_logits[:batch])
        # The same addresses and shapes each time: a replay reads what is written there.
        self._bind_inputs(self._steps[batch], feeds)
        self._session.run_with_binding(self._steps[batch], batch)
        self._device.synchronize()

    def _bind_cache(self, slot: int, batch: int) -> ort.IOBinding:
        binding = self._session.io_binding()
        for kind, arrays in (("key", self.cache.keys), ("value", self.cache.values)):
            for layer, array in enumerate(arrays):
                view = array[slot : slot + batch]
                self._bind_input(binding, f"past_{kind}.{layer}", view)
                self._bind_output(binding, f"present_{kind}.{layer}", view)
        return binding

    def _bind_inputs(self, binding: ort.IOBinding, feeds: dict[str, NDArray[np.generic]]) -> None:
        for name in feeds.keys() & self._session.input_names:
            if name in self._inputs:
                self._bind_input(binding, name, self._inputs[name].write(feeds[name]))
            else:  # the one that the operators read on the host
                array = on_host(feeds[name])
                binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.pointer)

    def _bind_input(self, binding: ort.IOBinding, name: str, array: DeviceArray) -> None:
        binding.bind_input(name, self._device.name, 0, array.dtype, array.shape, array.pointer)

    def _bind_output(self, binding: ort.IOBinding, name: str, array: DeviceArray) -> None:
        binding.bind_output(name, self._device.name, 0, array.dtype, array.shape, array.pointer)
