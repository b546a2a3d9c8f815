"""The memory's read bandwidth: a buffer that no cache holds, summed by all threads."""

import torch

from loadtests.compare.runners.passes import mean_seconds
from loadtests.compare.setup import Runner, Setup
from loadtests.compare.work import Work


def open_runner(setup: Setup) -> Runner:
    """Takes the memory at the first turn."""
    torch.set_num_threads(setup.threads)
    return _Buffer()


class _Buffer:
    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def run(self, work: Work) -> float:
        num_elements = work.length * 2**20 // self._buffer.element_size()
        if len(self._buffer) != num_elements:
            self._buffer = torch.ones(num_elements)
        return mean_seconds(self._buffer.sum, work.repeats)

    def close(self) -> None:
        """Holds nothing but memory."""
