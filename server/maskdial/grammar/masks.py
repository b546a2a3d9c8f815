"""MaskThreads: compute masks beside the model, each within a limit of CPU time.

llguidance's own limits bound the masks of every grammar that is known to us, but it has computed
masks without end before. A thread cannot be stopped, so a mask over the limit is given up: its
sequence fails, its thread is left alone, and another thread takes its place.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from maskdial.errors import ValidationError

T = TypeVar("T")

CPU_SECONDS = 2.0
_MAX_LOST = 4
_POLL_SECONDS = 0.05

_log = logging.getLogger(__name__)


class MaskThreads:
    """A few threads that compute masks. Thread-safe.

    Args:
        num_threads: how many, without those that were given up.
    """

    def __init__(self, num_threads: int) -> None:
        self._tasks: queue.SimpleQueue[_Task[Any] | None] = queue.SimpleQueue()
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._running: set[_Task[Any]] = set()
        self._num_lost = 0
        for _ in range(num_threads):
            self._start()

    @property
    def exhausted(self) -> bool:
        """Whether so many threads are lost to masks without end that no more may be risked."""
        return self._num_lost >= _MAX_LOST

    def submit(self, compute: Callable[[], T]) -> "Pending[T]":
        """Has a thread compute a mask, or several."""
        task = _Task(compute)
        self._tasks.put(task)
        return Pending(task.result, self)

    def give_up_slow(self) -> None:
        """Fails the masks that are over the limit, and replaces their threads."""
        with self._lock:
            slow = [task for task in self._running if task.cpu_seconds > CPU_SECONDS]
            self._running.difference_update(slow)
            self._num_lost += len(slow)
        for task in slow:
            _log.error("a grammar's mask took more than %g s of CPU time", CPU_SECONDS)
            task.result.set_exception(
                ValidationError(
                    "the grammar cannot be used: finding the tokens that may follow takes more "
                    f"than {CPU_SECONDS:g} s"
                )
            )
            self._start()

    def close(self) -> None:
        """Ends the threads as soon as they are done with their masks."""
        for _ in range(self._num_threads):
            self._tasks.put(None)

    def _start(self) -> None:
        # A daemon: the process may end while a mask is being computed.
        threading.Thread(target=self._run, name="maskdial-grammar-mask", daemon=True).start()

    def _run(self) -> None:
        clock = _thread_clock()
        while (task := self._tasks.get()) is not None:
            task.begin(clock)
            with self._lock:
                self._running.add(task)
            result, error = task.compute()
            with self._lock:
                if task not in self._running:  # given up; another thread has this one's place
                    self._num_lost -= 1
                    return
                self._running.remove(task)
            if error is None:
                task.result.set_result(result)
            else:
                task.result.set_exception(error)
            # Until the next task, it would keep the memory of its grammar.
            del task, result, error


class Pending(Generic[T]):
    """A mask that is being computed, or waits for it."""

    def __init__(self, result: Future[T], threads: MaskThreads) -> None:
        self._result = result
        self._threads = threads

    @property
    def ready(self) -> bool:
        """Whether `result` returns or fails at once."""
        if not self._result.done():
            self._threads.give_up_slow()
        return self._result.done()

    def wait(self, seconds: float) -> None:
        """Waits until the mask is there, at most so long."""
        wait([self._result], seconds)

    def result(self) -> T:
        """The mask; waits for it.

        Raises:
            ValidationError: it takes more CPU time than a mask may, or cannot be computed.
        """
        while not self.ready:
            self.wait(_POLL_SECONDS)
        return self._result.result()


class _Task(Generic[T]):
    """What a thread has to do.

    ``result`` is set by the thread or when the task is given up.
    """

    def __init__(self, compute: Callable[[], T]) -> None:
        self.result: Future[T] = Future()
        self._compute = compute
        self._clock: Callable[[], float] = time.monotonic
        self._began_at = 0.0

    def begin(self, clock: Callable[[], float]) -> None:
        """Notes the time on the thread's clock."""
        self._clock, self._began_at = clock, clock()

    @property
    def cpu_seconds(self) -> float:
        """CPU time since it began."""
        return self._clock() - self._began_at

    def compute(self) -> tuple[T | None, BaseException | None]:
        """The result, or why there is none."""
        try:
            return self._compute(), None
        except BaseException as error:
            return None, error


def _thread_clock() -> Callable[[], float]:
    """Reads the CPU time of the calling thread, from any thread while that one lives."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    clock = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(clock)
