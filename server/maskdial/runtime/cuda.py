"""CudaMemory: the memory of an NVIDIA GPU, through NVIDIA's own bindings of the CUDA runtime."""

import ctypes
import threading
import weakref
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskdial.errors import ConfigError
from maskdial.extras import how_to_install
from maskdial.runtime.memory import Buffer


class CudaMemory:
    """A `maskdial.runtime.memory.Memory`: that of the first GPU that the process sees.

    ``CUDA_VISIBLE_DEVICES`` chooses the GPU. Each object has a stream of its own, which is never
    destroyed: sessions of ONNX Runtime may outlive the object. What it allocates is freed with it.

    Raises:
        ConfigError: there is no device or no driver, or CUDA cannot use them.
    """

    device = "cuda"
    on_host = False
    binds_views = True
    max_buffer_bytes = None

    def __init__(self) -> None:
        self._runtime = _cuda_runtime()
        check_device()
        try:
            self._call("cudaSetDevice", 0)
            (stream,) = self._call("cudaStreamCreateWithFlags", self._runtime.cudaStreamNonBlocking)
        except RuntimeError as error:
            raise _unusable(error) from error
        self.stream = int(stream)
        self._allocated: list[tuple[str, int]] = []
        freeing = weakref.finalize(self, _free, self._runtime, self._allocated)
        freeing.atexit = False  # the driver frees what a process held

    @property
    def of_passes(self) -> "CudaMemory":
        return self

    def bound(self, buffer: Buffer) -> int:
        return buffer.pointer

    def view(self, buffer: Buffer) -> None:
        return None

    def free_bytes(self) -> int:
        free, _ = self._call("cudaMemGetInfo")
        return int(free)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Buffer:
        num_bytes = max(prod(shape) * dtype.itemsize, 1)
        pointer = self._allocate("cudaMalloc", "cudaFree", num_bytes, "GPU memory")
        self._call("cudaMemsetAsync", pointer, 0, num_bytes, self.stream)
        return Buffer(pointer, shape, dtype)

    def decommit(self, buffer: Buffer) -> None:
        pass

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        num_bytes = max(prod(shape) * dtype.itemsize, 1)
        pointer = self._allocate("cudaMallocHost", "cudaFreeHost", num_bytes, "pinned memory")
        memory = (ctypes.c_byte * num_bytes).from_address(pointer)
        array: NDArray[Any] = np.ndarray(shape, dtype, memory)  # type: ignore[arg-type]
        array[...] = 0
        return array

    def copy(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
    ) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDefault  # CUDA infers it from the pointers
        if height == 1:
            self._call("cudaMemcpyAsync", target, source, width, kind, self.stream)
            return
        self._call(
            "cudaMemcpy2DAsync",
            *(target, target_pitch, source, source_pitch),
            *(width, height, kind, self.stream),
        )

    def synchronize(self) -> None:
        self._call("cudaStreamSynchronize", self.stream)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        with TURN:
            return _call(self._runtime, name, *arguments)

    def _allocate(self, name: str, free: str, num_bytes: int, kind: str) -> int:
        try:
            (pointer,) = self._call(name, num_bytes)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot allocate another {num_bytes / 1e9:.2f} GB of {kind} ({error}); use fewer "
                "--slots or a shorter --max-context"
            ) from error
        self._allocated.append((free, int(pointer)))
        return int(pointer)


def _free(runtime: Any, allocated: list[tuple[str, int]]) -> None:
    """Frees pointers, each by the function named beside it, which waits for what uses them."""
    with TURN:
        for name, pointer in allocated:
            getattr(runtime, name)(pointer)


class Turn:
    """A context in which a thread may use the GPU while others capture CUDA graphs.

    ONNX Runtime captures in CUDA's global mode. Meanwhile, allocations and waits of other threads
    fail and spoil the capture, unless these threads are in the relaxed mode, in which this leaves
    them. A capture concerns its own stream alone, so nothing is lost by that.
    """

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def __enter__(self) -> None:
        if getattr(self._of_thread, "relaxed", False):
            return
        try:
            runtime = _cuda_runtime()
        except ConfigError:
            return  # without NVIDIA's bindings, nothing is captured
        # Where there is no driver, this fails, and the call that follows says so.
        runtime.cudaThreadExchangeStreamCaptureMode(
            runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
        )
        self._of_thread.relaxed = True

    def __exit__(self, *_: object) -> None:
        pass


TURN = Turn()


def check_device() -> None:
    """Checks that there is a CUDA device, without allocating anything on it.

    Raises:
        ConfigError: there is none, or no driver.
    """
    try:
        (num_devices,) = _call(_cuda_runtime(), "cudaGetDeviceCount")
    except RuntimeError as error:
        raise _unusable(error) from error
    if num_devices == 0:
        raise ConfigError("there is no CUDA device")


def lost_reason() -> str | None:
    """What CUDA says of a device that no later pass can use; None if it can still be used.

    Errors of kernels and of the hardware stay until the process ends: then every call fails.
    """
    try:
        _call(_cuda_runtime(), "cudaMemGetInfo")
    except RuntimeError as error:
        return str(error)
    return None


def _unusable(error: RuntimeError) -> ConfigError:
    return ConfigError(f"no CUDA device can be used here ({error})")


def _call(runtime: Any, name: str, *arguments: Any) -> tuple[Any, ...]:
    """Calls a function of the CUDA runtime and returns its results without the status.

    Raises:
        RuntimeError: the call failed.
    """
    status, *results = getattr(runtime, name)(*arguments)
    if status != runtime.cudaError_t.cudaSuccess:
        _, reason = runtime.cudaGetErrorString(status)
        raise RuntimeError(f"{name}: {reason.decode()}")
    return tuple(results)


def _cuda_runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        how = how_to_install("cuda")
        raise ConfigError(f"NVIDIA's cuda-bindings are missing; {how}") from error
    return runtime
