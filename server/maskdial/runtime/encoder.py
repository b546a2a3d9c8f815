"""Encoder: reads source texts into the cache that a decoder attends to."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from maskdial.runtime.kv_cache import KVCache
from maskdial.runtime.memory import Memory, host_buffer
from maskdial.runtime.session import Session


class Encoder:
    """The encoder of an encoder-decoder model.

    A pass writes the keys and values of its texts, padded, to a staging buffer in the memory of the
    cache; from there they are copied to their slots.

    Args:
        session: of an encoder's graph; `maskdial.bundle.bundle` lists its inputs and outputs.
        cache: of the source texts, which the decoder reads.
        memory: where the cache lies.
        max_tokens: maximum number of tokens of one pass, padding included.

    Raises:
        ConfigError: the memory is too small.
    """

    def __init__(self, session: Session, cache: KVCache, memory: Memory, max_tokens: int) -> None:
        self._session = session
        self._cache = cache
        self._memory = memory
        self._staging = KVCache.allocate(memory, cache.layout, 1, max_tokens)

    def encode(
        self, slots: Sequence[int], sources: Sequence[NDArray[np.int64]], width: int = 0
    ) -> None:
        """Reads source texts in one padded batch.

        Args:
            slots: where the keys and values of each text go.
            sources: int64 (num_tokens,) each, at least one token.
            width: the least number of tokens that texts are padded to.
        """
        lengths = np.array([len(source) for source in sources], np.int32)
        input_ids = np.zeros((len(sources), max(width, int(lengths.max()))), np.int64)
        for row, source in zip(input_ids, sources, strict=True):
            row[: len(source)] = source
        padded = self._staging.divided(*input_ids.shape)
        with self._session.turn:
            self._pass(input_ids, lengths, padded)
        for index, (slot, length) in enumerate(zip(slots, lengths.tolist(), strict=True)):
            self._cache.copy_from(padded, index, slot, 0, length)
        self._memory.synchronize()

    def _pass(
        self, input_ids: NDArray[np.int64], lengths: NDArray[np.int32], padded: KVCache
    ) -> None:
        binding = self._session.io_binding()
        inputs = {"input_ids": host_buffer(input_ids), "lengths": host_buffer(lengths)}
        for name, buffer in inputs.items():
            binding.bind_input(name, "cpu", 0, buffer.dtype, buffer.shape, buffer.pointer)
        for name, buffer in padded.named():
            device, address = self._memory.device, self._memory.bound(buffer)
            binding.bind_output(f"cross_{name}", device, 0, buffer.dtype, buffer.shape, address)
        self._session.run_with_binding(binding)
