"""Engines and timers that a test holds, so that nothing depends on how fast the machine is."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import Context, copy_context
from functools import partial
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
        # asyncio's own loops make both kinds of timers with `call_at`, uvloop with `call_later`.
        self._method = "call_at" if isinstance(loop, asyncio.BaseEventLoop) else "call_later"
        self._set = getattr(loop, self._method)
        self._timers: list[tuple[asyncio.TimerHandle, Callable[[], object]]] = []

    def __enter__(self) -> "HeldTimers":
        setattr(self._loop, self._method, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        delattr(self._loop, self._method)

    @property
    def num_set(self) -> int:
        """Of those that were not cancelled."""
        return sum(not timer.cancelled() for timer, _ in self._timers)

    def go_off(self) -> None:
        """Has all of them go off, in the event loop."""
        self._loop.call_soon_threadsafe(self._let_go_off)

    def _note(
        self,
        time: float,
        callback: Callable[..., object],
        *arguments: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        context = context or copy_context()
        timer: asyncio.TimerHandle = self._set(time, callback, *arguments, context=context)
        delay = time - self._loop.time() if self._method == "call_at" else time
        if delay > HOUR / 2:
            self._timers.append((timer, partial(context.run, callback, *arguments)))
        return timer

    def _let_go_off(self) -> None:
        timers, self._timers = self._timers, []
        for timer, call in timers:
            if not timer.cancelled():
                timer.cancel()
                call()
