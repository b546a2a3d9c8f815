"""Session: steps in processes of their own, and their results in a file that outlives each."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS, LOGS = "results.json", "logs.txt"
ENDED = ("passed", "failed", "timeout")
"""States of a step that no later run repeats."""

_MOST_TRIES = 2
_TAIL = 4000  # characters of a step's output that its result keeps
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_POLL = 0.05  # seconds


@dataclass(frozen=True, slots=True)
class Step:
    """A command, and what it is to find out.

    Attributes:
        name: in the results.
        asks: the question that it answers.
        command: its program and arguments.
        seconds: it is killed after so long.
        environment: variables in addition to the session's.
        report: a JSON file that the command writes; it becomes a part of the results.
    """

    name: str
    asks: str
    command: tuple[str, ...]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    report: Path | None = None


class Session:
    """Runs steps one after the other.

    A step has one of these states: ``running``; ``passed``; ``failed``, with its exit status;
    ``timeout``: it took longer than its own limit; ``interrupted``: the session's time was over
    before. Those that are left running (the machine went away) or interrupted are tried once more.

    Args:
        folder: has the results and the output of each step; made if necessary.
        copy_to: where the results and all output are copied after every step.
        tell: is called with lines for a reader.
    """

    def __init__(
        self,
        folder: Path,
        copy_to: Path | None = None,
        tell: Callable[[str], object] = print,
    ) -> None:
        self._folder = folder
        self._copy_to = copy_to
        self._tell = tell
        folder.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, dict[str, Any]] = {}
        with suppress(FileNotFoundError):
            self.results = json.loads((folder / RESULTS).read_text(encoding="utf-8"))

    def run(self, steps: Sequence[Step], seconds: float) -> None:
        """Runs what has not ended yet, for at most so many seconds."""
        deadline = time.monotonic() + seconds
        for step in steps:
            before = self.results.get(step.name, {})
            tries = before.get("tries", 0)
            if before.get("state") in ENDED or tries >= _MOST_TRIES:
                self._tell(f"{step.name}: {before['state']} before")
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                self._tell(f"{step.name}: no time is left")
                continue
            self._note(step, {"state": "running", "tries": tries + 1})
            result = self._run(step, left)
            self._note(step, result | {"tries": tries + 1})
            self._tell(f"{step.name}: {result['state']} after {result['seconds']} s")

    def _run(self, step: Step, left: float) -> dict[str, Any]:
        log = self._folder / f"{step.name}.log"
        if step.report is not None:
            step.report.unlink(missing_ok=True)
        started = time.monotonic()
        with log.open("wb") as output:
            try:
                # In a session of its own, by which all of its descendants are found.
                process = subprocess.Popen(
                    step.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"PYTHONUNBUFFERED": "1"} | step.environment,
                    start_new_session=True,
                )
            except OSError as error:
                return {"state": "failed", "seconds": 0.0, "output": str(error)}
            try:
                status = process.wait(min(step.seconds, left))
                state = "passed" if status == 0 else "failed"
            except subprocess.TimeoutExpired:
                status, state = None, "timeout" if step.seconds <= left else "interrupted"
            finally:
                end_session(process.pid)
                process.wait()
        result = {
            "state": state,
            "status": status,
            "seconds": round(time.monotonic() - started, 1),
            "output": log.read_text(encoding="utf-8", errors="replace")[-_TAIL:],
        }
        if step.report is not None and step.report.is_file():
            with suppress(ValueError):
                result["report"] = json.loads(step.report.read_text(encoding="utf-8"))
        return result

    def _note(self, step: Step, result: dict[str, Any]) -> None:
        self.results[step.name] = {
            "asks": step.asks,
            "command": list(step.command),
            "environment": dict(step.environment),
            **result,
        }
        for write in (self._write_results, self._copy):
            try:
                write()
            except OSError as error:  # the next step may find room, and writes all of them
                self._tell(f"{step.name}: its result could not be written ({error})")

    def _write_results(self) -> None:
        _replace(self._folder / RESULTS, json.dumps(self.results, indent=1).encode() + b"\n")

    def _copy(self) -> None:
        if self._copy_to is None:
            return
        self._copy_to.mkdir(parents=True, exist_ok=True)
        _replace(self._copy_to / RESULTS, (self._folder / RESULTS).read_bytes())
        with (self._copy_to / LOGS).open("wb") as logs:
            for name in self.results:
                log = self._folder / f"{name}.log"
                if log.is_file():
                    logs.write(f"==== {name}\n".encode() + log.read_bytes())


def _replace(path: Path, content: bytes) -> None:
    """Writes a file, or leaves it as it is where there is no room."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(path)


def end_session(leader: int) -> None:
    """Ends every process of a Unix session, by its leader's process id: what a step has started may
    be in a process group of its own.
    """
    for number, seconds in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _GRACE)):
        deadline = time.monotonic() + seconds
        _signal(members := _members(leader), number)
        _signal(members, signal.SIGCONT)  # a stopped one would not end
        while members and time.monotonic() < deadline:
            time.sleep(_POLL)
            members = _members(leader)
        if not members:
            return


def _signal(members: Sequence[int], number: int) -> None:
    for pid in members:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _members(leader: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError, ProcessLookupError):
            # The state and the session follow the name, which may have spaces and parentheses.
            state, *numbers = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(numbers[2]) == leader and state not in "ZX":
                found.append(int(folder.name))
    return found
