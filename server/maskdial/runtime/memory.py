"""What the code for GPUs needs of a device: memory, copies, and one order of work.

Nothing here knows CUDA: `maskdial.runtime.cuda` does, and tests put main memory in its place.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """A C-contiguous array in a device's memory. It does not own the memory."""

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> "DeviceArray":
        """Adjoining rows, as a view: slices of the first axis without a step."""
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise IndexError("a view has adjoining rows")
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        shape = (max(stop - start, 0), *self.shape[1:])
        return DeviceArray(self.pointer + start * row_bytes, shape, self.dtype)


class Device(Protocol):
    """A device's memory, and the stream in which copies and passes follow each other.

    Copies are queued: they see what was queued before them, and the host may be ahead of them until
    `synchronize`. Arrays from `pinned` must be left alone meanwhile; of any other array in main
    memory a copy has read or written all when the call returns. Memory is the process's until it
    ends.
    """

    @property
    def name(self) -> Literal["cpu", "cuda"]:
        """What ONNX Runtime calls memory of this kind in an IO binding."""

    @property
    def stream(self) -> int:
        """The stream, as a pointer, for ONNX Runtime to queue its kernels in."""

    def free_bytes(self) -> int:
        """The memory that is free now, for every process on the device."""

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        """Zeroed memory.

        Raises:
            ConfigError: there is not that much.
        """

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A zeroed array in main memory that copies need no detour to.

        Raises:
            ConfigError: there is not that much.
        """

    def copy(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
    ) -> None:
        """Queues a copy of ``height`` runs of ``width`` bytes, which begin ``pitch`` bytes apart.

        ``target`` and ``source`` are pointers to main memory or the device's.
        """

    def synchronize(self) -> None:
        """Waits until all that was queued is done.

        Raises:
            RuntimeError: some of it failed.
        """


def copy_array(device: Device, target: DeviceArray, source: DeviceArray) -> None:
    """Queues a copy between arrays of the same size."""
    num_bytes = source.num_bytes
    assert target.num_bytes == num_bytes, "sizes differ"
    device.copy(target.pointer, num_bytes, source.pointer, num_bytes, num_bytes, 1)


def on_host(array: NDArray[Any]) -> DeviceArray:
    """A C-contiguous array in main memory, for copies; keep it alive while they may run."""
    assert array.flags.c_contiguous, "copies take whole runs of bytes"
    return DeviceArray(array.ctypes.data, array.shape, array.dtype)


def download(device: Device, source: DeviceArray) -> NDArray[Any]:
    """A copy in main memory of what is in an array once all that was queued is done."""
    array = np.empty(source.shape, source.dtype)
    copy_array(device, on_host(array), source)
    device.synchronize()
    return array


class Staging:
    """An array on the device that the host writes by way of pinned memory.

    One write at a time: the pass that reads it ends with `Device.synchronize` before the next.
    """

    def __init__(self, device: Device, size: int, dtype: Any) -> None:
        """``size`` is the most elements of one write."""
        self._device = device
        self._pinned = device.pinned((size,), np.dtype(dtype))
        self._array = device.allocate((size,), np.dtype(dtype))

    def write(self, values: NDArray[Any]) -> DeviceArray:
        """Queues a copy of an array to the device and returns it there, in the same shape."""
        pinned = self._pinned[: values.size].reshape(values.shape)
        pinned[...] = values
        target = DeviceArray(self._array.pointer, values.shape, self._array.dtype)
        if values.size:
            copy_array(self._device, target, on_host(pinned))
        return target
