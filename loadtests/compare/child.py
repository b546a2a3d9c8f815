"""Child: an entrant's process, which runs only while it is asked."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from loadtests.compare.entrants import Entrant
from loadtests.compare.setup import Setup
from loadtests.compare.work import Work
from loadtests.errors import LoadTestError

_LOAD_SECONDS = 300.0
_PREPARE_SECONDS = 1200.0
_TURN_SECONDS = 240.0
_STOP_SECONDS = 10.0


class Child:
    """One entrant in a process group of its own, stopped (SIGSTOP) between its turns.

    So neither threads that spin for work nor servers that wake up disturb the others. If this
    process is killed the system ends the group, because it is orphaned then, and stopped.

    Args:
        entrant: whose runner to start.
        setup: passed on to it.
        log: where it and its libraries write.
    """

    def __init__(
        self, entrant: Entrant, setup: Setup, log: Path, mode: Literal["prepare", "serve"]
    ) -> None:
        self._log = log
        arguments = [entrant.module, json.dumps(asdict(setup)), mode]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "loadtests.compare.worker", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                process_group=0,
            )
        self.pid = self._process.pid
        self._replies: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @classmethod
    def prepare(cls, entrant: Entrant, setup: Setup, log: Path) -> None:
        """Makes what the entrant needs, in a process that ends then.

        Raises:
            LoadTestError: it failed.
        """
        child = cls(entrant, setup, log, "prepare")
        try:
            child._reply(_PREPARE_SECONDS)
        finally:
            child.close()

    @classmethod
    def serve(cls, entrant: Entrant, setup: Setup, log: Path) -> "Child":
        """An entrant that is loaded, and stopped.

        Raises:
            LoadTestError: it failed.
        """
        child = cls(entrant, setup, log, "serve")
        try:
            child._reply(_LOAD_SECONDS)
        except BaseException:
            child.close()
            raise
        child._signal(signal.SIGSTOP)
        return child

    def run(self, work: Work) -> float:
        """Lets it run for one piece of work, and returns the seconds that it reports.

        Raises:
            LoadTestError: it failed.
        """
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None, "the process was started with a pipe"
            with contextlib.suppress(BrokenPipeError):  # it ended: there is no reply either
                self._process.stdin.write(json.dumps(work.as_json()) + "\n")
                self._process.stdin.flush()
            return float(self._reply(_TURN_SECONDS)["seconds"])
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Ends it, and what it started."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None, "the process was started with a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._thread.join()
        assert self._process.stdout is not None, "the process was started with a pipe"
        self._process.stdout.close()

    def _reply(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._replies.get(timeout=seconds)
        except queue.Empty:
            self._signal(signal.SIGKILL)
            raise LoadTestError(f"no answer within {seconds:g} s; see {self._log}") from None
        if not line:
            raise LoadTestError(f"its process ended; see {self._log}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise LoadTestError(f"{reply['error']}; see {self._log}")
        return reply

    def _read(self) -> None:
        assert self._process.stdout is not None, "the process was started with a pipe"
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put("")

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
