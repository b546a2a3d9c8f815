"""Watchdog: notices an engine or an event loop that makes no progress, or an engine that died."""

import asyncio
import faulthandler
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterable

from maskdial.config import Config
from maskdial.engine.life import Engine, EngineState
from maskdial.engine.thread import in_thread
from maskdial.errors import io_reason
from maskdial.logs import STACKS

_log = logging.getLogger("maskdial.watchdog")

_INTERVAL = 1.0


class Watchdog:
    """Watches from a thread of its own, since what it watches may be stuck.

    When something is, the log gets the stacks of all threads, once, and ``/health/live`` turns red,
    so that an orchestrator restarts the process.

    Args:
        engines: gives those that run; called on the event loop, where models come and go.
        config: how long a step may take, and what to do about a dead engine.
    """

    def __init__(self, engines: Callable[[], Iterable[Engine]], config: Config) -> None:
        self.stalled = ""
        """What makes no progress, in a sentence; empty if everything does."""
        self.on_death: Callable[[str], None] = lambda _: None
        """Called with the cause of an engine's death if the server is to exit then."""
        self._engines = engines
        self._running: tuple[Engine, ...] = ()
        self._timeout = config.stall_timeout
        self._exits = config.on_engine_failure == "exit"
        self._beat = time.monotonic()
        self._ended = threading.Event()
        self._beating: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._watch, name="maskdial-watchdog", daemon=True)

    def start(self) -> None:
        """Begins to watch the engines, and the event loop that runs."""
        self._beating = asyncio.create_task(self._keep_beating())
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread that watches passes and the event loop."""
        self._ended.set()
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait({self._beating})
            await in_thread(self._thread.join)

    async def _keep_beating(self) -> None:
        while True:
            self._beat = time.monotonic()
            self._running = tuple(self._engines())
            await asyncio.sleep(_INTERVAL)

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL):
            stalled = "" if self._timeout is None else self._find_stalled(self._timeout)
            if stalled and not self.stalled:
                message = "%s; the stacks of all threads follow"
                _log.critical(message, stalled, extra={STACKS: _stacks_of_all_threads()})
            elif self.stalled and not stalled:
                _log.warning("no longer stalled: %s", self.stalled)
            self.stalled = stalled
            if self._exits:
                self._look_for_dead_engines()

    def _find_stalled(self, timeout: float) -> str:
        idle = time.monotonic() - self._beat
        if idle > timeout + _INTERVAL:
            return f"the event loop has made no progress for {idle:.0f} s"
        for engine in self._running:
            if engine.step_seconds > timeout:
                return (
                    f"the engine of model {engine.name!r} has made no progress for "
                    f"{engine.step_seconds:.0f} s"
                )
        return ""

    def _look_for_dead_engines(self) -> None:
        for engine in self._running:
            if engine.state is EngineState.DEAD:
                self._exits = False
                self.on_death(engine.cause_of_death)
                return


def _stacks_of_all_threads() -> str:
    """In a file first, as the interpreter stands still while they are written."""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read().decode(errors="backslashreplace")
    except OSError as error:
        return f"they cannot be written: {io_reason(error)}"
