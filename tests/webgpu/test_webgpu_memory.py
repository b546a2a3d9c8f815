"""The memory of a WebGPU device: parts of buffers, up, down and across."""

import numpy as np
import pytest
from numpy.typing import NDArray

from maskdial.errors import ConfigError
from maskdial.runtime.memory import Buffer, copy_buffer, host_buffer
from maskdial.runtime.providers.webgpu import PROVIDER
from maskdial.runtime.webgpu import WebGpuMemory

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("adapter")]

SHAPE = 6, 5, 8
NAN = 0x7FC0_1234
"""A number that is not one, with a payload that copies must not lose."""


@pytest.fixture(scope="module")
def memory(adapter: None) -> WebGpuMemory:
    return PROVIDER.memory()


def allocate(memory: WebGpuMemory, values: NDArray[np.int32]) -> Buffer:
    buffer = memory.allocate(values.shape, values.dtype)
    copy_buffer(memory, buffer, host_buffer(values))
    return buffer


def content(memory: WebGpuMemory, buffer: Buffer) -> NDArray[np.int32]:
    values = np.zeros(buffer.shape, np.int32)
    copy_buffer(memory, host_buffer(values), buffer)
    memory.synchronize()
    return values


def numbers(start: int) -> NDArray[np.int32]:
    values = np.arange(start, start + np.prod(SHAPE), dtype=np.int32).reshape(SHAPE)
    values[2, 3, 4] = NAN
    return values


def test_new_memory_is_zero(memory: WebGpuMemory) -> None:
    assert not content(memory, memory.allocate(SHAPE, np.dtype(np.float32))).any()


def test_rows_go_up_and_come_down(memory: WebGpuMemory) -> None:
    wanted = numbers(100)
    buffer = allocate(memory, wanted)
    assert np.array_equal(content(memory, buffer), wanted)
    assert np.array_equal(content(memory, buffer[2:4]), wanted[2:4])
    copy_buffer(memory, buffer[4:5], host_buffer(wanted[0:1]))
    wanted[4] = wanted[0]
    assert np.array_equal(content(memory, buffer), wanted)


def test_runs_with_pitches_go_in_all_directions(memory: WebGpuMemory) -> None:
    """As the tokens of a slot, which lie apart for each head."""
    first, second = numbers(0), numbers(1000)
    source, target = allocate(memory, first), allocate(memory, second)
    row = 8 * 4
    slot = 5 * row
    # Rows 1 to 3 of every slot but the last, to rows 2 to 4 of the next one.
    where = target.pointer + slot + 2 * row, slot
    memory.copy(*where, source.pointer + row, slot, 3 * row, 5)
    second[1:, 2:5] = first[:5, 1:4]
    assert np.array_equal(content(memory, target), second)
    # Within a buffer, overlapping.
    memory.copy(source.pointer + row, slot, source.pointer, slot, 2 * row, 6)
    first[:, 1:3] = first[:, 0:2].copy()
    assert np.array_equal(content(memory, source), first)
    packed = np.zeros((6, 2, 8), np.int32)
    memory.copy(packed.ctypes.data, 2 * row, source.pointer + 3 * row, slot, 2 * row, 6)
    assert np.array_equal(packed, first[:, 3:5])
    packed += 7
    memory.copy(target.pointer, slot, packed.ctypes.data, 2 * row, 2 * row, 6)
    second[:, 0:2] = packed
    assert np.array_equal(content(memory, target), second)


def test_copies_stay_within_their_buffers(memory: WebGpuMemory) -> None:
    buffer = memory.allocate(SHAPE, np.dtype(np.int32))
    beyond = Buffer(buffer.pointer + 4, buffer.shape, buffer.dtype)
    with pytest.raises(IndexError, match="beyond the end"):
        copy_buffer(memory, beyond, buffer)
    memory.copy(buffer.pointer, 4, buffer.pointer, 4, 0, 3)  # nothing


def test_a_buffer_that_the_device_cannot_hold_is_an_error(memory: WebGpuMemory) -> None:
    with pytest.raises(ConfigError, match=r"the GPU cannot hold another 5\.37 GB in one buffer"):
        memory.allocate((5 * 2**28,), np.dtype(np.float32))
    assert not content(memory, memory.allocate(SHAPE, np.dtype(np.float32))).any()
