"""Encoder: reads source texts into the cache that a decoder attends to."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from maskdial.runtime.kv_cache import KVCache
from maskdial.runtime.session import Session


class Encoder:
    """The encoder of an encoder-decoder model.

    Args:
        session: of an encoder's graph; `maskdial.bundle.bundle` lists its inputs and outputs.
        cache: of the source texts, which the decoder reads.
    """

    def __init__(self, session: Session, cache: KVCache) -> None:
        self._session = session
        self._cache = cache
        self._names = [f"cross_{name}" for name, _ in cache.named()]

    def encode(self, slots: Sequence[int], sources: Sequence[NDArray[np.int64]]) -> None:
        """Reads source texts in one padded batch.

        Args:
            slots: where the keys and values of each text go.
            sources: int64 (num_tokens,) each, at least one token.
        """
        lengths = np.array([len(source) for source in sources], np.int32)
        input_ids = np.zeros((len(sources), lengths.max()), np.int64)
        for row, source in zip(input_ids, sources, strict=True):
            row[: len(source)] = source
        outputs = self._session.run_for(self._names, {"input_ids": input_ids, "lengths": lengths})
        num_layers = len(self._names) // 2
        keys, values = outputs[:num_layers], outputs[num_layers:]
        for row, (slot, length) in enumerate(zip(slots, lengths.tolist(), strict=True)):
            pairs = zip(keys, values, strict=True)
            parts = [each[row, :, :length].ravel() for pair in pairs for each in pair]
            self._cache.write(slot, 0, np.concatenate(parts).reshape(length, -1))
