"""Penalties for the device: which tokens of a row are penalized, and by how much."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.sampling.processors import penalized
from maskdial.causal.sequence import Sequence
from maskdial.runtime.memory import Buffer, Memory, Staging

MAX_PENALIZED = 4096
"""The largest number of penalized tokens in a row that is sampled on the device."""

_MIN_WIDTH = 64
_NONE: NDArray[np.int64] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class TokenPenalties:
    """The tokens that a sequence penalizes, and what is subtracted from their scores.

    The repetition penalty is applied before that, and is the same for all of them.
    """

    token_ids: NDArray[np.int64]
    """int64 (n,), unique and ascending."""
    subtracted: NDArray[np.float32]
    """float32 (n,), what the frequency and presence penalties make of it."""

    @classmethod
    def of(cls, sequence: Sequence, never: NDArray[np.int64] = _NONE) -> "TokenPenalties | None":
        """The penalties for a sequence's next token; None if nothing is penalized.

        Tokens that must ``never`` be drawn, int64 (n,), unique and ascending, lose all of their
        score.
        """
        penalties = cls._of_tokens(sequence)
        if not len(never):
            return penalties
        forbidden = cls(never, np.full(len(never), np.inf, np.float32))
        return forbidden if penalties is None else penalties._and(forbidden)

    def _and(self, other: "TokenPenalties") -> "TokenPenalties":
        """Both, for tokens of which some may be in both."""
        token_ids = np.union1d(self.token_ids, other.token_ids)
        subtracted = np.zeros(len(token_ids), np.float32)
        for each in (self, other):
            subtracted[np.searchsorted(token_ids, each.token_ids)] += each.subtracted
        return TokenPenalties(token_ids, subtracted)

    @classmethod
    def _of_tokens(cls, sequence: Sequence) -> "TokenPenalties | None":
        params = sequence.params
        of_prompt = params.repetition_penalty != 1.0
        by_count = bool(params.frequency_penalty or params.presence_penalty)
        repeated, counted = penalized(sequence)
        token_ids = repeated if of_prompt else counted
        if not (of_prompt or by_count) or not len(token_ids):
            return None
        if not by_count:
            unique = np.unique(token_ids)
            return cls(unique, np.zeros(len(unique), np.float32))
        unique, indices = np.unique(token_ids, return_inverse=True)
        counts = np.bincount(indices[len(token_ids) - len(counted) :], minlength=len(unique))
        penalties = counts * params.frequency_penalty + params.presence_penalty
        return cls(unique, np.where(counts, penalties, 0).astype(np.float32))


class PenaltyStaging:
    """Copies penalties to the device.

    Args:
        memory: the device's.
        max_rows: maximum number of rows of one pass.
    """

    def __init__(self, memory: Memory, max_rows: int) -> None:
        self._token_ids = Staging(memory, max_rows * MAX_PENALIZED, np.int64)
        self._subtracted = Staging(memory, max_rows * MAX_PENALIZED, np.float32)

    def write(self, num_rows: int, penalties: Mapping[int, TokenPenalties]) -> dict[str, Buffer]:
        """Queues a copy of the penalties of some rows, each with at most `MAX_PENALIZED` tokens.

        A row is padded with its first token and that token's penalty: writing a score twice does no
        harm. Rows without penalties subtract 0 from token 0.

        Returns:
            ``token_ids`` and ``penalties``, (num_rows, width). The width is a power of two, so that
            there are few different ones to bind.
        """
        longest = max(len(each.token_ids) for each in penalties.values())
        width = max(_MIN_WIDTH, 1 << (longest - 1).bit_length())
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
