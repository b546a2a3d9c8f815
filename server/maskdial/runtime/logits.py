"""Logits of a pass: on the host, or in a device's memory until the host asks for them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from maskdial.runtime.memory import Buffer, Memory, copy_buffer, host_buffer


@dataclass(frozen=True, slots=True)
class SummarizedLogits:
    """Rows of logits on the host, and the graph's summary of them.

    Valid until the next pass of the same kind. ``numpy.asarray`` gives the logits themselves.

    Attributes:
        values: float32 (num_rows, vocab_size).
        best: int64 (num_rows,), the first token with the greatest logit of each row.
        max_logits: float32 (num_rows,), that logit; NaN if any is.
        sum_exp: float64 (num_rows,), the sum of e to the power of each logit's distance from it; 0
            if it is not finite.
    """

    values: NDArray[np.float32]
    best: NDArray[np.int64]
    max_logits: NDArray[np.float32]
    sum_exp: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice | list[int] | NDArray[np.int64]) -> "SummarizedLogits":
        """Some of the rows; of a slice, nothing is copied."""
        return SummarizedLogits(
            self.values[rows], self.best[rows], self.max_logits[rows], self.sum_exp[rows]
        )

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> NDArray[np.float32]:
        return np.array(self.values, dtype, copy=copy)

    @property
    def summaries(self) -> list[tuple[int, float, float]]:
        """For each row, its best token, that logit and the sum."""
        found = self.best.tolist(), self.max_logits.tolist(), self.sum_exp.tolist()
        return list(zip(*found, strict=True))


class DeviceLogits:
    """Rows of logits, float32 (num_rows, vocab_size), in a device's memory.

    Valid until the next pass of the same kind. ``numpy.asarray`` copies them to the host.

    Args:
        buffer: all logits of a pass.
        rows: int64 (num_rows,), which of its rows these are.
        memory: where they lie.
    """

    def __init__(self, buffer: Buffer, rows: NDArray[np.int64], memory: Memory) -> None:
        self.buffer = buffer
        self.rows = rows
        self._memory = memory

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice | list[int]) -> "DeviceLogits":
        """Some of the rows; nothing is copied."""
        return DeviceLogits(self.buffer, self.rows[rows], self._memory)

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> NDArray[np.float32]:
        """A copy on the host."""
        if copy is False:
            raise ValueError("logits in a device's memory cannot be read without a copy")
        host: NDArray[Any] = np.empty((len(self), *self.buffer.shape[1:]), self.buffer.dtype)
        for target, row in zip(host, self.rows.tolist(), strict=True):
            copy_buffer(self._memory, host_buffer(target), self.buffer[row : row + 1])
        self._memory.synchronize()
        return host if dtype is None else host.astype(dtype)


Logits = NDArray[np.float32] | SummarizedLogits | DeviceLogits
"""Rows of logits, float32 (num_rows, vocab_size), on the host or where the model left them."""
