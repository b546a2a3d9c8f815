"""Begun: a coroutine of which the first step is made at once, to be awaited later."""

from collections.abc import Awaitable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Begun(Generic[T]):
    """What is awaited, as far as it gets without waiting.

    Most of what a request awaits is there already. Then nothing has to be set up for the wait: no
    task, no timeout.

    Args:
        awaitable: runs until it has to wait; what it raises until then is raised here.

    Attributes:
        is_done: whether it did not have to wait at all.
    """

    __slots__ = ("_result", "_step", "_steps", "is_done")

    def __init__(self, awaitable: Awaitable[T]) -> None:
        self._steps: Generator[Any, Any, T] = awaitable.__await__()
        self.is_done = False
        self._step: Any = None
        self._result: Any = None
        try:
            self._step = next(self._steps)
        except StopIteration as end:
            self.is_done, self._result = True, end.value

    def __await__(self) -> Generator[Any, None, T]:
        while not self.is_done:
            try:
                yield self._step
            except BaseException as error:
                try:
                    self._step = self._steps.throw(error)
                except StopIteration as end:
                    self.is_done, self._result = True, end.value
            else:
                self._result = yield from self._steps
                self.is_done = True
        result: T = self._result
        return result
