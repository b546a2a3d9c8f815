"""Penalties on the device: which tokens of a row are penalised, and by how much."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.sequence import Sequence
from maskdial.runtime.memory import Device, DeviceArray, Staging

MOST_PENALISED = 4096
_FEWEST = 64


@dataclass(frozen=True, slots=True)
class TokenPenalties:
    """Different tokens, int64 (n,), ascending, and what is subtracted from their scores.

    That is float32 (n,). The repetition penalty comes before it, and is the same for all of them.
    """

    token_ids: NDArray[np.int64]
    subtracted: NDArray[np.float32]

    @classmethod
    def of(cls, sequence: Sequence) -> "TokenPenalties | None":
        """Those of a sequence's next token; None where nothing is penalised."""
        params = sequence.params
        of_prompt = params.repetition_penalty != 1.0
        by_count = bool(params.frequency_penalty or params.presence_penalty)
        token_ids = sequence.token_ids if of_prompt else sequence.generated_ids
        if not (of_prompt or by_count) or not len(token_ids):
            return None
        if not by_count:
            different = np.unique(token_ids)
            return cls(different, np.zeros(len(different), np.float32))
        different, places = np.unique(token_ids, return_inverse=True)
        generated = places[len(token_ids) - sequence.num_generated :]
        counts = np.bincount(generated, minlength=len(different))
        penalties = counts * params.frequency_penalty + params.presence_penalty
        return cls(different, np.where(counts, penalties, 0).astype(np.float32))


class PenaltyStaging:
    """Takes penalties to the device.

    Args:
        device: where they are needed.
        max_rows: most rows of one pass.
    """

    def __init__(self, device: Device, max_rows: int) -> None:
        self._token_ids = Staging(device, max_rows * MOST_PENALISED, np.int64)
        self._subtracted = Staging(device, max_rows * MOST_PENALISED, np.float32)

    def write(
        self, num_rows: int, penalties: Mapping[int, TokenPenalties]
    ) -> dict[str, DeviceArray]:
        """Queues a copy of the penalties of some rows, each of `MOST_PENALISED` tokens at most.

        Rows are filled up with their first token, once more with the same penalty: to write a
        score twice does no harm. The others penalise token 0 by nothing.

        Returns:
            ``token_ids`` and ``penalties``, (num_rows, width). The width is a power of two, so
            that there are few of them.
        """
        most = max(len(each.token_ids) for each in penalties.values())
        width = max(_FEWEST, 1 << (most - 1).bit_length())
        token_ids = np.zeros((num_rows, width), np.int64)
        subtracted = np.zeros((num_rows, width), np.float32)
        for row, each in penalties.items():
            num_tokens = len(each.token_ids)
            for target, values in ((token_ids, each.token_ids), (subtracted, each.subtracted)):
                target[row, :num_tokens] = values
                target[row, num_tokens:] = values[0]
        return {
            "token_ids": self._token_ids.write(token_ids),
            "penalties": self._subtracted.write(subtracted),
        }
