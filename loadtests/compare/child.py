"""Child: an entrant's process, which runs only during its turns; both ends of the pipe.

The child is ``python -m loadtests.compare.child MODULE SETUP prepare|serve``. It reads and writes
one JSON object per line; the output of libraries goes to standard error.
"""

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TextIO

import psutil

from loadtests import LoadTestError
from loadtests.compare.entrants import Entrant
from loadtests.compare.setup import Setup
from loadtests.compare.work import Work

_LOAD_TIMEOUT = 300.0
_PREPARE_TIMEOUT = 300.0
"""Seconds without progress; an export on a busy machine takes longer than any fixed time."""
_TURN_TIMEOUT = 240.0
_STOP_TIMEOUT = 10.0
_MIN_PROGRESS = 0.01
"""CPU seconds per second of a process that works."""
_HOME = "loadtests.compare.peers"


class Child:
    """One entrant in a process group of its own, stopped (SIGSTOP) between its turns.

    So neither spinning threads nor servers that wake up disturb the others. If this process is
    killed, the system ends the group, which is then orphaned and stopped.

    Args:
        entrant: the peer to start.
        setup: passed on to it.
        log: file for its output and that of its libraries.
        mode: whether to convert the model or to run it.
    """

    def __init__(
        self, entrant: Entrant, setup: Setup, log: Path, mode: Literal["prepare", "serve"]
    ) -> None:
        self._log = log
        arguments = [entrant.module, json.dumps(asdict(setup)), mode]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "loadtests.compare.child", *arguments],
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
        """Makes what the entrant needs, in a process that then ends.

        Raises:
            LoadTestError: it failed.
        """
        child = cls(entrant, setup, log, "prepare")
        try:
            child._reply(_PREPARE_TIMEOUT, while_working=True)
        finally:
            child.close()

    @classmethod
    def serve(cls, entrant: Entrant, setup: Setup, log: Path) -> "Child":
        """Loads an entrant; its process is stopped when this returns.

        Raises:
            LoadTestError: it failed.
        """
        child = cls(entrant, setup, log, "serve")
        try:
            child._reply(_LOAD_TIMEOUT)
        except BaseException:
            child.close()
            raise
        child._signal(signal.SIGSTOP)
        return child

    def run(self, work: Work) -> float:
        """Resumes it for one piece of work and returns the seconds that it reports.

        Raises:
            LoadTestError: it failed.
        """
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None, "the process was started with a pipe"
            with contextlib.suppress(BrokenPipeError):  # it has ended, so no reply comes either
                self._process.stdin.write(json.dumps(work.as_json()) + "\n")
                self._process.stdin.flush()
            return float(self._reply(_TURN_TIMEOUT)["seconds"])
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Ends the process and what it started."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None, "the process was started with a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._thread.join()
        assert self._process.stdout is not None, "the process was started with a pipe"
        self._process.stdout.close()

    def _reply(self, timeout: float, *, while_working: bool = False) -> dict[str, Any]:
        """The next reply; ``while_working`` waits on as long as the process uses the processor."""
        worked = self._cpu_seconds()
        while True:
            with contextlib.suppress(queue.Empty):
                line = self._replies.get(timeout=timeout)
                break
            before, worked = worked, self._cpu_seconds()
            if not while_working or worked - before < _MIN_PROGRESS * timeout:
                self._signal(signal.SIGKILL)
                raise LoadTestError(f"no reply within {timeout:g} s; see {self._log}")
        if not line:
            raise LoadTestError(f"its process ended; see {self._log}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise LoadTestError(f"{reply['error']}; see {self._log}")
        return reply

    def _cpu_seconds(self) -> float:
        """What the process and its children have used of the processors."""
        total = 0.0
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            for each in (process, *process.children(recursive=True)):
                times = each.cpu_times()
                total += times.user + times.system
        return total

    def _read(self) -> None:
        assert self._process.stdout is not None, "the process was started with a pipe"
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put("")

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def main(module_name: str, setup_json: str, mode: str) -> None:
    """The child process: prepares and exits, or serves until its standard input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        setup = Setup(**json.loads(setup_json))
        name = module_name if "." in module_name else f"{_HOME}.{module_name}"
        module = importlib.import_module(name)
        if mode == "prepare":
            module.prepare(setup)
            _say(replies, {"ready": True})
        else:
            _serve(module, setup, sys.stdin, replies)
    except Exception as error:
        _say(replies, {"error": _sentence(error)})
        raise


def _serve(module: Any, setup: Setup, requests: Iterable[str], replies: TextIO) -> None:
    runner = module.open_runner(setup)
    try:
        _say(replies, {"ready": True})
        for line in requests:
            work = Work(**json.loads(line))
            _say(replies, {"seconds": runner.run(work)})
    finally:
        runner.close()


def _say(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


if __name__ == "__main__":
    main(*sys.argv[1:])
