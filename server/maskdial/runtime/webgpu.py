"""WebGpuMemory: the memory of a GPU that ONNX Runtime's WebGPU plug-in works in."""

import ctypes
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from math import gcd, prod
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from maskdial.errors import ConfigError
from maskdial.runtime.memory import Buffer, HostMemory

_FIRST_ADDRESS = 1 << 62  # beyond every address of main memory
_ALIGNMENT = 256  # bytes between the addresses of allocations, so that none touch
_ELEMENT = 4  # bytes; WGSL's storage has no smaller integers
_MAX_ROW = 1024  # bytes; rows of copies are short, so that the device's threads share the work
_ERRORS_ONLY = 3
_MARK = 0x5EED


class WebGpuMemory:
    """A `maskdial.runtime.memory.Memory` of buffers that are handles of WebGPU's.

    A buffer has an address of no memory, from which `bound` and `copy` find its allocation. ONNX
    Runtime copies whole tensors only, so parts of them are copied by small graphs on the device.
    The inputs and logits of passes are in main memory: ONNX Runtime moves them with the pass.

    Args:
        devices: of the plug-in, registered with ONNX Runtime.
        graphs: `maskdial.kernels.webgpu.copy_graphs`.
        turn: held while the device is in use, since sessions share its queue.
        max_buffer_bytes: the size of the device's largest buffer, if it is known.
    """

    device = "webgpu"
    on_host = False
    binds_views = False
    stream = 0

    def __init__(
        self,
        devices: Sequence[ort.OrtEpDevice],
        graphs: Mapping[str, bytes],
        turn: AbstractContextManager[Any],
        max_buffer_bytes: int | None,
    ) -> None:
        self.max_buffer_bytes = max_buffer_bytes
        self._turn = turn
        self._addresses: list[int] = []  # ascending
        self._allocations: list[ort.OrtValue] = []
        self._sizes: list[int] = []  # bytes
        self._copies: dict[str, ort.InferenceSession] = {}
        settings = ort.SessionOptions()
        settings.log_severity_level = _ERRORS_ONLY
        settings.intra_op_num_threads = 1
        settings.add_provider_for_devices(devices, {})
        with turn:
            for name, graph in graphs.items():
                self._copies[name] = ort.InferenceSession(graph, settings)
        self._host = HostMemory()

    def __del__(self) -> None:
        with self._turn:
            self._allocations.clear()
            self._copies.clear()

    @property
    def of_passes(self) -> HostMemory:
        return self._host

    def bound(self, buffer: Buffer) -> int:
        index, offset = self._find(buffer.pointer)
        assert not offset, "WebGPU binds whole buffers only"
        return int(self._allocations[index].data_ptr())

    def view(self, buffer: Buffer) -> None:
        return None

    def free_bytes(self) -> None:
        return None

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        num_bytes = max(prod(shape) * dtype.itemsize, 1)
        elements = -(-num_bytes // _ELEMENT)
        try:
            with self._turn:
                value = ort.OrtValue.ortvalue_from_shape_and_type((elements,), np.int32, "webgpu")
        except Exception as error:  # ONNX Runtime's exceptions share no other base
            raise _too_small(num_bytes) from error
        end = self._addresses[-1] + self._sizes[-1] if self._addresses else _FIRST_ADDRESS
        address = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._addresses.append(address)
        self._allocations.append(value)
        self._sizes.append(elements * _ELEMENT)
        if not self._holds_data(address + (elements - 1) * _ELEMENT):
            raise _too_small(num_bytes)
        zeros = np.zeros(elements, np.int32)  # the value of the host does not keep it alive
        with self._turn:
            ort.copy_tensors([ort.OrtValue.ortvalue_from_numpy(zeros)], [value])
        return Buffer(address, shape, dtype)

    def decommit(self, buffer: Buffer) -> None:
        pass

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.zeros(shape, dtype)

    def copy(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
    ) -> None:
        if not width or not height:
            return
        unit = gcd(width, _MAX_ROW)
        for address, pitch in ((target, target_pitch), (source, source_pitch)):
            if address >= _FIRST_ADDRESS:
                unit = gcd(unit, self._find(address)[1], pitch if height > 1 else 0)
        assert not unit % _ELEMENT, "WebGPU copies elements of 4 bytes"
        num_rows = height * (width // unit)
        feeds: dict[str, _Bound] = {}
        output: tuple[str, _Bound]
        if source >= _FIRST_ADDRESS:
            feeds["source"] = self._rows_of(source, unit)
            feeds["from"] = _on_host(self._row_numbers(source, source_pitch, width, height, unit))
        else:
            values = np.ascontiguousarray(_strided(source, source_pitch, width, height))
            feeds["values"] = _on_host(values.view(np.int32).reshape(num_rows, -1))
        if target >= _FIRST_ADDRESS:
            numbers = self._row_numbers(target, target_pitch, width, height, unit)
            feeds["target"] = self._rows_of(target, unit)
            feeds["to"] = _on_host(numbers[:, None])
            output = "written", feeds["target"]
            with self._turn:
                self._run("across" if source >= _FIRST_ADDRESS else "up", feeds, output)
            return
        values = np.empty((height, width), np.uint8)
        output = "values", _on_host(values.view(np.int32).reshape(num_rows, -1))
        with self._turn:
            self._run("down", feeds, output)
        _strided(target, target_pitch, width, height)[...] = values

    def synchronize(self) -> None:
        pass  # what comes down has waited for all before it

    def _run(self, name: str, feeds: Mapping[str, "_Bound"], output: tuple[str, "_Bound"]) -> None:
        """Runs a copy, its turn held: binding copies to the device, and the end frees buffers."""
        session = self._copies[name]
        binding = session.io_binding()
        for each, (device, pointer, dtype, shape, _) in feeds.items():
            binding.bind_input(each, device, 0, dtype, shape, pointer)
        each, (device, pointer, dtype, shape, _) = output
        binding.bind_output(each, device, 0, dtype, shape, pointer)
        session.run_with_iobinding(binding)

    def _rows_of(self, address: int, unit: int) -> "_Bound":
        """The allocation of an address as rows of ``unit`` bytes."""
        index, _ = self._find(address)
        shape = self._sizes[index] // unit, unit // _ELEMENT
        return "webgpu", int(self._allocations[index].data_ptr()), np.dtype(np.int32), shape, None

    def _row_numbers(
        self, address: int, pitch: int, width: int, height: int, unit: int
    ) -> NDArray[np.int64]:
        """The rows of ``unit`` bytes that a copy touches, int64 (num_rows,).

        Raises:
            IndexError: they go beyond the allocation.
        """
        index, offset = self._find(address)
        starts = (offset + np.arange(height) * pitch) // unit
        numbers = (starts[:, None] + np.arange(width // unit)).ravel()
        if (int(numbers[-1]) + 1) * unit > self._sizes[index]:
            raise IndexError("a copy goes beyond the end of a buffer")
        return numbers

    def _find(self, address: int) -> tuple[int, int]:
        """The allocation that an address lies in, and its offset there in bytes."""
        index = bisect_right(self._addresses, address) - 1
        return index, address - self._addresses[index]

    def _holds_data(self, address: int) -> bool:
        """Whether an element can be written and read: WebGPU reports buffers that are too large to
        the log only.
        """
        values = np.array([_MARK, 0], np.int32)
        start = values.ctypes.data
        try:
            for target, source in ((address, start), (start + 4, address)):
                self.copy(target, _ELEMENT, source, _ELEMENT, _ELEMENT, 1)
        except Exception:  # ONNX Runtime's exceptions share no other base
            return False
        return int(values[1]) == _MARK


_Bound = tuple[str, int, np.dtype[Any], tuple[int, ...], NDArray[Any] | None]
"""Device, address, dtype and shape of what is bound, and the array to be kept alive meanwhile."""


def _on_host(array: NDArray[Any]) -> _Bound:
    return "cpu", array.ctypes.data, array.dtype, array.shape, array


def _strided(pointer: int, pitch: int, width: int, height: int) -> NDArray[np.uint8]:
    """Runs of bytes in main memory, uint8 (height, width)."""
    num_bytes = (height - 1) * pitch + width
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(pointer))
    return np.lib.stride_tricks.as_strided(memory, (height, width), (pitch, 1))


def _too_small(num_bytes: int) -> ConfigError:
    return ConfigError(
        f"the GPU cannot hold another {num_bytes / 1e9:.2f} GB in one buffer; use fewer --slots or "
        "a shorter --max-context"
    )
