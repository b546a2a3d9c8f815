"""DeviceLogits: logits that stay where the model wrote them until the host asks for them."""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from maskdial.runtime.memory import Device, DeviceArray, copy_array, on_host


class DeviceLogits:
    """Rows of logits, float32 (num_rows, vocab_size), in a device's memory.

    Valid until the next pass of the same kind. ``numpy.asarray`` copies them to the host.

    Args:
        array: all logits of a pass.
        rows: which of its rows these are, int64 (num_rows,).
        device: where they lie.
    """

    def __init__(self, array: DeviceArray, rows: NDArray[np.int64], device: Device) -> None:
        self.array = array
        self.rows = rows
        self._device = device

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: slice | list[int]) -> "DeviceLogits":
        """Some of the rows; nothing is copied."""
        return DeviceLogits(self.array, self.rows[rows], self._device)

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> NDArray[np.float32]:
        """A copy on the host."""
        if copy is False:
            raise ValueError("logits on a device cannot be read without a copy")
        host: NDArray[Any] = np.empty((len(self), *self.array.shape[1:]), self.array.dtype)
        for target, row in zip(host, self.rows.tolist(), strict=True):
            copy_array(self._device, on_host(target), self.array[row : row + 1])
        self._device.synchronize()
        return host if dtype is None else host.astype(dtype)
