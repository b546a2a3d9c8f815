"""The memory's read bandwidth: a buffer that no cache holds, summed by all threads or a GPU."""

import torch

from loadtests.compare.runners.device import Device
from loadtests.compare.runners.passes import mean_seconds
from loadtests.compare.setup import Runner, Setup
from loadtests.compare.work import Work


def open_runner(setup: Setup) -> Runner:
    """Takes the memory at the first turn."""
    return _Buffer(Device(setup))


class _Buffer:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffer = torch.empty(0)

    def run(self, work: Work) -> float:
        num_elements = work.length * 2**20 // self._buffer.element_size()
        if len(self._buffer) != num_elements:
            self._buffer = torch.ones(num_elements, device=self._device.name)
        seconds = mean_seconds(self._buffer.sum, work.repeats, self._device.wait)
        if self._device.name == "cuda":
            seconds = min(seconds, self._half_copy(work))
        return seconds

    def close(self) -> None:
        """Holds nothing but memory."""

    def _half_copy(self, work: Work) -> float:
        """A copy reads as much as it writes."""
        copy = torch.empty_like(self._buffer)
        return mean_seconds(lambda: copy.copy_(self._buffer), work.repeats, self._device.wait) / 2
