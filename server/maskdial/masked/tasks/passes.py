"""Passes: a task that reads what earlier passes gave before it knows its next ones."""

from collections.abc import Generator, Sequence
from typing import TypeVar

from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.masked.tasks.task import Reading

T = TypeVar("T")

Passes = Generator[Sequence[MaskedInput], Sequence[MaskedResult], T]
"""Yields the inputs of a pass and is sent their results; returns the task's answer."""


def reading(passes: Passes[T], num_truncated: int, seconds: float) -> Reading[T]:
    """What `maskdial.masked.run` runs of the passes: the first, whose answer is the next.

    Args:
        passes: yields once at least.
        num_truncated: tokens of the request that were cut off.
        seconds: estimate of how long the work between two passes takes.
    """

    def answer(results: Sequence[MaskedResult]) -> T | Reading[T]:
        try:
            return Reading(passes.send(results), answer, seconds=seconds)
        except StopIteration as end:
            content: T = end.value
            return content

    return Reading(next(passes), answer, num_truncated, seconds)
