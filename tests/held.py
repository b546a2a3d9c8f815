"""Engines and timers that a test holds, so that nothing depends on how fast the machine is."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from maskdial.runtime.session import Session
from tests.servers import PATIENCE

HOUR = 3600
"""A timeout in seconds that ends with `HeldTimers.go_off` only."""


@contextlib.contextmanager
def held(engine: Any, num_steps: int = 0) -> Iterator[Callable[[], None]]:
    """An engine that makes so many steps, and the next ones afterwards, or after a call of what is
    yielded.
    """
    permits, step = threading.Semaphore(num_steps), engine.step

    def wait_and_step() -> None:
        assert permits.acquire(timeout=PATIENCE)
        step()

    def go_on() -> None:
        if vars(engine).pop("step", None) is not None:
            permits.release()

    engine.step = wait_and_step
    try:
        yield go_on
    finally:
        go_on()


@contextlib.contextmanager
def held_passes() -> Iterator[threading.Event]:
    """Masked passes begin, and go on afterwards; the event says that one began."""
    began, go_on, run = threading.Event(), threading.Event(), Session.run

    def held_run(session: Session, feeds: Any) -> Any:
        began.set()
        assert go_on.wait(PATIENCE)
        return run(session, feeds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "run", held_run)
        try:
            yield began
        finally:
            go_on.set()


class HeldTimers:
    """The timers of an event loop that are set for about an hour, or for longer.

    They go off when the test says so, in an hour otherwise.
    """

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._call_at = loop.call_at
        self._timers: list[asyncio.TimerHandle] = []

    def __enter__(self) -> "HeldTimers":
        self._loop.call_at = self._note
        return self

    def __exit__(self, *_: object) -> None:
        del self._loop.call_at

    @property
    def num_set(self) -> int:
        """Of those that were not cancelled."""
        return sum(not timer.cancelled() for timer in self._timers)

    def go_off(self) -> None:
        """Has all of them go off, in the event loop."""
        self._loop.call_soon_threadsafe(self._let_go_off)

    def _note(self, when: float, *arguments: Any, **context: Any) -> asyncio.TimerHandle:
        timer: asyncio.TimerHandle = self._call_at(when, *arguments, **context)
        if when - self._loop.time() > HOUR / 2:
            self._timers.append(timer)
        return timer

    def _let_go_off(self) -> None:
        timers, self._timers = self._timers, []
        for timer in timers:
            if not timer.cancelled():
                timer._run()
                timer.cancel()
