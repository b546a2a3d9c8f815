"""CudaMemory over a scripted CUDA runtime, whose device memory is main memory."""

import ctypes
import enum
import gc
import re
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maskdial.errors import ConfigError, DeviceLostError
from maskdial.extras import how_to_install
from maskdial.runtime.cuda import CudaMemory
from maskdial.runtime.memory import Buffer, Staging, copy_buffer, host_buffer
from maskdial.runtime.providers.cuda import PROVIDER
from maskdial.runtime.session import Session


class Status(enum.IntEnum):
    cudaSuccess = 0  # noqa: N815
    cudaErrorMemoryAllocation = 2  # noqa: N815
    cudaErrorNoDevice = 100  # noqa: N815


class FakeRuntime:
    """The functions of `cuda.bindings.runtime` that are called, with their forms of results."""

    cudaError_t = Status  # noqa: N815
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)  # noqa: N815
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeRelaxed=2)  # noqa: N815
    cudaStreamNonBlocking = 1  # noqa: N815

    def __init__(self, *, num_devices: int = 1, free: int = 10_000) -> None:
        self.num_devices = num_devices
        self.free = free
        self.failing = ""
        self.synchronized: list[int] = []
        self.relaxed: list[int] = []  # threads
        self._memory: dict[int, Any] = {}

    def cudaGetDeviceCount(self) -> tuple[Any, ...]:  # noqa: N802
        if self.num_devices < 0:
            return Status.cudaErrorNoDevice, None
        return Status.cudaSuccess, self.num_devices

    def cudaSetDevice(self, index: int) -> tuple[Any, ...]:  # noqa: N802
        return (Status.cudaSuccess if index < self.num_devices else Status.cudaErrorNoDevice,)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        assert flags == self.cudaStreamNonBlocking
        return Status.cudaSuccess, 77

    def cudaMemGetInfo(self) -> tuple[Any, ...]:  # noqa: N802
        if self.failing == "cudaMemGetInfo":
            return Status.cudaErrorNoDevice, None, None
        return Status.cudaSuccess, self.free, 20_000

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:  # noqa: N802
        if size > self.free:
            return Status.cudaErrorMemoryAllocation, None
        self.free -= size
        taken = ctypes.create_string_buffer(b"\xff" * size, size)
        self._memory[ctypes.addressof(taken)] = taken
        return Status.cudaSuccess, ctypes.addressof(taken)

    def cudaFree(self, pointer: int) -> tuple[Any, ...]:  # noqa: N802
        self.free += len(self._memory.pop(pointer))
        return (Status.cudaSuccess,)

    cudaMallocHost, cudaFreeHost = cudaMalloc, cudaFree  # noqa: N815

    def cudaThreadExchangeStreamCaptureMode(self, mode: int) -> tuple[Any, ...]:  # noqa: N802
        assert mode == 2
        self.relaxed.append(threading.get_ident())
        return Status.cudaSuccess, 0

    def cudaMemsetAsync(  # noqa: N802
        self, pointer: int, value: int, size: int, stream: int
    ) -> tuple[Any, ...]:
        assert stream == 77  # the stream waits for no other
        ctypes.memset(pointer, value, size)
        return (Status.cudaSuccess,)

    def cudaMemcpyAsync(  # noqa: N802
        self, target: int, source: int, size: int, kind: int, stream: int
    ) -> tuple[Any, ...]:
        assert (kind, stream) == (4, 77)
        if self.failing == "copy":
            return (Status.cudaErrorMemoryAllocation,)
        ctypes.memmove(target, source, size)
        return (Status.cudaSuccess,)

    def cudaMemcpy2DAsync(  # noqa: N802
        self, *arguments: int
    ) -> tuple[Any, ...]:
        target, target_pitch, source, source_pitch, width, height, kind, stream = arguments
        assert (kind, stream) == (4, 77)
        for row in range(height):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
        return (Status.cudaSuccess,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        self.synchronized.append(stream)
        return (Status.cudaSuccess,)

    def cudaGetErrorString(self, status: Status) -> tuple[Any, ...]:  # noqa: N802
        return Status.cudaSuccess, status.name.encode()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    install(fake, monkeypatch)
    return fake


def install(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = SimpleNamespace(runtime=runtime)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)


def download(memory: CudaMemory, buffer: Buffer) -> NDArray[Any]:
    """A copy of what is in a buffer once everything that was queued is done."""
    array: NDArray[Any] = np.empty(buffer.shape, buffer.dtype)
    copy_buffer(memory, host_buffer(array), buffer)
    memory.synchronize()
    return array


def test_memory_comes_zeroed_and_copies_go_both_ways(runtime: FakeRuntime) -> None:
    memory = CudaMemory()
    assert (memory.device, memory.stream, memory.free_bytes()) == ("cuda", 77, 10_000)
    assert not memory.on_host
    buffer = memory.allocate((3, 4), np.dtype(np.int32))
    assert memory.free_bytes() == 10_000 - 48
    assert np.array_equal(download(memory, buffer), np.zeros((3, 4)))
    assert runtime.synchronized == [77]
    rows = np.arange(8, dtype=np.int32).reshape(2, 4)
    copy_buffer(memory, buffer[1:3], host_buffer(rows))
    memory.decommit(buffer[1:3])  # a GPU's memory stays
    assert np.array_equal(download(memory, buffer), [[0] * 4, *rows.tolist()])
    assert buffer[5:9].shape == (0, 4)
    with pytest.raises(IndexError, match="adjacent"):
        buffer[::2]


def test_what_a_memory_allocated_is_freed_with_it(runtime: FakeRuntime) -> None:
    memory = CudaMemory()
    memory.allocate((1000,), np.dtype(np.uint8))
    memory.pinned((10, 10), np.dtype(np.float32))
    assert runtime.free == 10_000 - 1400
    del memory
    gc.collect()
    assert runtime.free == 10_000


def test_threads_may_allocate_while_others_capture_graphs(runtime: FakeRuntime) -> None:
    def work() -> None:
        for _ in range(2):
            CudaMemory().free_bytes()
            with PROVIDER.turn:  # of a session
                pass

    before = len(runtime.relaxed)
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert len(runtime.relaxed) == before + 2  # once in each thread


def test_copies_of_runs_that_lie_apart(runtime: FakeRuntime) -> None:
    memory = CudaMemory()
    buffer = memory.allocate((2, 8), np.dtype(np.uint8))
    source = np.arange(6, dtype=np.uint8)
    memory.copy(buffer.pointer + 2, 8, source.ctypes.data, 3, 3, 2)
    wanted = [[0, 0, 0, 1, 2, 0, 0, 0], [0, 0, 3, 4, 5, 0, 0, 0]]
    assert np.array_equal(download(memory, buffer), wanted)


def test_pinned_memory_is_an_array_and_staging_writes_through_it(runtime: FakeRuntime) -> None:
    memory = CudaMemory()
    pinned = memory.pinned((2, 3), np.dtype(np.float32))
    assert pinned.shape == (2, 3)
    assert not pinned.any()
    staging = Staging(memory, 6, np.int64)
    first = staging.write(np.arange(6).reshape(2, 3))
    assert np.array_equal(download(memory, first), np.arange(6).reshape(2, 3))
    second = staging.write(np.array([7, 8]))
    assert second.pointer == first.pointer
    assert np.array_equal(download(memory, second), [7, 8])
    assert staging.write(np.empty(0, np.int64)).shape == (0,)


def test_memory_that_is_not_there_is_a_sentence(runtime: FakeRuntime) -> None:
    memory = CudaMemory()
    for take in (memory.allocate, memory.pinned):
        with pytest.raises(
            ConfigError, match=r"another 0.02 GB of (GPU|pinned) memory .*Allocation.*--slots"
        ):
            take((20_000_000,), np.dtype(np.uint8))


@pytest.mark.parametrize("captures", [False, True])
def test_a_device_is_lost_if_every_call_fails(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch, captures: bool
) -> None:
    """Not by a pass that fails: one may have found no memory, and the next one does."""
    session = Session.__new__(Session)
    session.captures, session._provider, session.turn = captures, PROVIDER, PROVIDER.turn
    failure = RuntimeError("CUDA failure 700: an illegal memory access was encountered")

    def fail(*_: object) -> None:
        raise failure

    session._session = SimpleNamespace(run_with_iobinding=fail)
    with pytest.raises(RuntimeError) as caught:
        session.run_with_binding(SimpleNamespace(), 1)
    assert caught.value is failure
    monkeypatch.setattr(runtime, "failing", "cudaMemGetInfo")
    with pytest.raises(DeviceLostError, match=r"the GPU is lost \(cudaMemGetInfo: .*\); restart"):
        session.run_with_binding(SimpleNamespace(), 1)


def test_a_copy_that_fails_says_so(runtime: FakeRuntime) -> None:
    memory = CudaMemory()
    buffer = memory.allocate((4,), np.dtype(np.uint8))
    runtime.failing = "copy"
    with pytest.raises(RuntimeError, match="cudaMemcpyAsync: cudaErrorMemoryAllocation"):
        download(memory, buffer)


@pytest.mark.parametrize(
    ("num_devices", "reason"), [(0, "there is no CUDA device"), (-1, "cudaErrorNoDevice")]
)
def test_no_device_is_a_sentence(
    num_devices: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(FakeRuntime(num_devices=num_devices), monkeypatch)
    with pytest.raises(ConfigError, match=reason):
        CudaMemory()


def test_missing_bindings_say_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(ConfigError, match=re.escape(how_to_install("cuda"))):
        CudaMemory()
