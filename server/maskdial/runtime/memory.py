"""Memory: where the KV cache, a pass's inputs and its logits lie, and how bytes move between them.

The model's runner and cache are the same on every device; only their memory differs. `HostMemory`
is main memory. `maskdial.runtime.cuda` has that of an NVIDIA GPU, `maskdial.runtime.webgpu` that of
other GPUs, and the tests have one that stands in for a GPU and checks the bounds of every copy.
"""

import ctypes
import gc
import mmap
import sys
import weakref
from bisect import bisect_right, insort
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from maskdial.errors import ConfigError, io_reason
from maskdial.runtime.host_limits import available_bytes, reservable_bytes

_M_MMAP_THRESHOLD = -3  # of mallopt(3)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A C-contiguous array in some memory, by its address. It does not own the memory.

    Addresses of a device need not be those of any memory: see `Memory.bound`.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> "Buffer":
        """Adjacent rows, as a view.

        Raises:
            IndexError: the slice has a step.
        """
        start, stop, step = rows.indices(len(self))
        if step != 1:
            raise IndexError("a view of a buffer has adjacent rows; its slice takes no step")
        row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        shape = (max(stop - start, 0), *self.shape[1:])
        return Buffer(self.pointer + start * row_bytes, shape, self.dtype)


class Memory(Protocol):
    """The memory of one device, and the stream that orders copies and passes.

    Copies are queued: each sees the result of what was queued before it, and the host may run ahead
    of them until `synchronize`. Arrays from `pinned` must not change meanwhile; any other array in
    main memory has been read or written when `copy` returns. Buffers live as long as the object.
    """

    @property
    def device(self) -> str:
        """What ONNX Runtime calls this memory in an IO binding, such as ``cuda``."""

    @property
    def on_host(self) -> bool:
        """Whether it is main memory: NumPy arrays are bound where they are, without a copy."""

    @property
    def binds_views(self) -> bool:
        """Whether ONNX Runtime can be given a buffer that begins within an allocation."""

    @property
    def max_buffer_bytes(self) -> int | None:
        """The size of the largest allocation; None if there is no limit, or it is not known."""

    @property
    def of_passes(self) -> "Memory":
        """Where passes read their small inputs and write logits: this memory, or main memory."""

    @property
    def stream(self) -> int:
        """The pointer of the stream that ONNX Runtime is to queue its kernels in; 0 for none."""

    def bound(self, buffer: Buffer) -> int:
        """What ONNX Runtime takes for the address of a buffer."""

    def view(self, buffer: Buffer) -> NDArray[Any] | None:
        """A buffer as a NumPy array of its shape and dtype that shares its memory; None unless
        `on_host`.
        """

    def free_bytes(self) -> int | None:
        """Bytes that can still be allocated; None if the system does not tell."""

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        """Allocates zeroed memory.

        Raises:
            ConfigError: there is not enough.
        """

    def decommit(self, buffer: Buffer) -> None:
        """Gives pages that lie wholly within a buffer back to the system, if the memory has pages.

        The content of the buffer is undefined afterwards.
        """

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A zeroed array of any shape and dtype in main memory, from which the device copies.

        Raises:
            ConfigError: there is not enough.
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

        ``target`` and ``source`` are pointers to this memory or to main memory.
        """

    def synchronize(self) -> None:
        """Waits until everything that was queued is done.

        Raises:
            RuntimeError: some of it failed.
        """


class HostMemory:
    """Main memory, whose pages the operating system commits when they are first written."""

    device = "cpu"
    on_host = True
    binds_views = True
    max_buffer_bytes = None
    stream = 0
    _all: ClassVar["weakref.WeakSet[HostMemory]"] = weakref.WeakSet()

    def __init__(self) -> None:
        self._addresses: list[int] = []  # ascending
        self._mappings: dict[int, mmap.mmap] = {}  # by address
        self._all.add(self)

    @property
    def of_passes(self) -> "HostMemory":
        return self

    def bound(self, buffer: Buffer) -> int:
        return buffer.pointer

    def view(self, buffer: Buffer) -> NDArray[Any]:
        address, mapping = self._mapping_of(buffer)
        return np.ndarray(buffer.shape, buffer.dtype, mapping, buffer.pointer - address)

    def free_bytes(self) -> int | None:
        available = available_bytes()
        if available is None:
            return None
        # What was promised to this and other models, but not written yet, is not free.
        promised = sum(memory._uncommitted_bytes() for memory in tuple(self._all))
        free, reservable = max(available - promised, 0), reservable_bytes()
        return free if reservable is None else min(free, reservable)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        num_bytes = max(prod(shape) * dtype.itemsize, 1)
        try:
            mapping = _reserve(num_bytes)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot allocate another {num_bytes / 1e9:.2f} GB of memory ({io_reason(error)}); "
                "use fewer --slots or a shorter --max-context"
            ) from error
        pointer = np.frombuffer(mapping, np.uint8).ctypes.data
        insort(self._addresses, pointer)
        self._mappings[pointer] = mapping
        return Buffer(pointer, shape, dtype)

    def decommit(self, buffer: Buffer) -> None:
        address, mapping = self._mapping_of(buffer)
        first = buffer.pointer - address
        start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (first + buffer.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop:
            _advise(mapping, "MADV_DONTNEED", start, stop - start)

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
        for _ in range(height):
            ctypes.memmove(target, source, width)
            target += target_pitch
            source += source_pitch

    def synchronize(self) -> None:
        pass

    def _uncommitted_bytes(self) -> int:
        return sum(
            len(mapping) - _resident_bytes(address, mapping)
            for address, mapping in tuple(self._mappings.items())
        )

    def _mapping_of(self, buffer: Buffer) -> tuple[int, mmap.mmap]:
        """The mapping that a buffer lies in, and its address."""
        address = self._addresses[bisect_right(self._addresses, buffer.pointer) - 1]
        return address, self._mappings[address]


def _reserve(num_bytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    # Private, because MADV_DONTNEED frees nothing of a shared mapping, which is the default.
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # In the KV cache the tokens of a slot are scattered, head by head. In huge pages, which NumPy
    # asks for, 8 slots of 2,048 with 20 tokens each of a 135M Llama took 640 MB instead of 22, and
    # attention was no faster.
    _advise(mapping, "MADV_NOHUGEPAGE", 0, num_bytes)
    return mapping


def _resident_bytes(address: int, mapping: mmap.mmap) -> int:
    """The bytes of a mapping that are in memory; all, where the system does not tell."""
    pages = np.zeros(-(-len(mapping) // mmap.PAGESIZE), np.uint8)
    try:
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(address),
            ctypes.c_size_t(len(mapping)),
            pages.ctypes.data_as(ctypes.c_void_p),
        )
    except (OSError, AttributeError):
        failed = True
    if failed:
        return len(mapping)
    return min(int((pages & 1).sum()) * mmap.PAGESIZE, len(mapping))


def _advise(mapping: mmap.mmap, advice: str, start: int, length: int) -> None:
    """Gives the operating system advice, which it may not know (Windows) or may refuse."""
    option = getattr(mmap, advice, None)
    if option is not None:
        with suppress(OSError):
            mapping.madvise(option, start, length)


def map_large_blocks() -> None:
    """Has the C library, where that is glibc, map blocks of 4 MB and more apart from its heap, so
    that they go back to the system when they are freed.

    By default it does so for ever larger ones only, and what a model took stays in the heap, partly
    in use, when the model goes: 20 replacements under load left the process 17% larger.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 4 * 2**20)


def return_free_memory() -> None:
    """Returns what the C library's heap has free to the system, where that is glibc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def freeze_heap() -> None:
    """Exempts all Python objects that exist now from garbage collection.

    A full collection looks at each of them, and stops every thread for as long: 0.1 s in a server.
    For a process whose objects stay, once it has loaded its models. What is unloaded later is freed
    all the same, as models have no reference cycles.
    """
    gc.collect()
    gc.freeze()


class Staging:
    """A pass's input: how an array of the host gets to where the pass reads it.

    That is an address that never changes, so that it is bound once; a CUDA graph needs it, too. On
    the way to a device the array goes through pinned memory. There is one write at a time: the pass
    that reads it ends with `Memory.synchronize` before the next.

    Args:
        memory: where the pass reads it.
        size: the largest number of elements of one write.
        dtype: of the elements.

    Raises:
        ConfigError: there is not enough memory.
    """

    def __init__(self, memory: Memory, size: int, dtype: Any) -> None:
        self._memory = memory
        self._dtype = np.dtype(dtype)
        self._host = memory.pinned((size,), self._dtype)
        source = host_buffer(self._host)
        self._source = source.pointer
        self._target = (source if memory.on_host else memory.allocate((size,), self._dtype)).pointer

    def write(self, values: NDArray[Any]) -> Buffer:
        """Makes an array readable to the next pass, in the same shape and the staging's dtype."""
        self._host[: values.size].reshape(values.shape)[...] = values
        target = Buffer(self._target, values.shape, self._dtype)
        if values.size and self._target != self._source:
            copy_buffer(self._memory, target, replace(target, pointer=self._source))
        return target


def host_buffer(array: NDArray[Any]) -> Buffer:
    """A C-contiguous array of any dtype as a buffer; keep the array alive while it is in use."""
    assert array.flags.c_contiguous, "a buffer is contiguous"
    return Buffer(array.__array_interface__["data"][0], array.shape, array.dtype)


def copy_buffer(memory: Memory, target: Buffer, source: Buffer) -> None:
    """Queues a copy between buffers of the same size."""
    num_bytes = source.num_bytes
    assert target.num_bytes == num_bytes, "the buffers differ in size"
    memory.copy(target.pointer, num_bytes, source.pointer, num_bytes, num_bytes, 1)
