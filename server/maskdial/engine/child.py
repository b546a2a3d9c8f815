"""ChildProcess: a subprocess with limits of CPU time and memory, for work of unbounded cost.

The child runs one module of this package, whose `main` calls `serve`. It talks in JSON lines, and
is ended by the system when one answer takes more CPU time or memory than its limits allow.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from maskdial.errors import UnavailableError

_START_SECONDS = 60.0
_VARIABLES = frozenset(
    {
        "HOME",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "PATH",
        "SYSTEMROOT",
        "TEMP",
        "TMP",
        "TMPDIR",
        "TZ",
        "VIRTUAL_ENV",
    }
)
_PREFIXES = ("COVERAGE_", "LC_", "PYTHON")


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """What one answer of a child process may take.

    ``wall_seconds`` must exceed ``cpu_seconds`` by far: a busy machine needs longer for them.
    ``memory_bytes`` is address space, that of the whole process (Linux only).
    """

    cpu_seconds: float
    wall_seconds: float
    memory_bytes: int


class ChildDiedError(Exception):
    """The child process ended before it had answered.

    ``too_complex`` says that it was the question's fault: the answer took too much CPU time.
    Otherwise the machine may be too busy, or out of memory, and the question can be asked again.
    """

    def __init__(self, *, too_complex: bool) -> None:
        super().__init__("too complex" if too_complex else "died")
        self.too_complex = too_complex


class ChildProcess:
    """A child process that answers questions. For one thread at a time.

    The first question starts it, and so does the next one after it has died.

    Args:
        module: what it runs, by its full name.
        setup: what `serve` hands to the module first.
        limits: for each answer.
    """

    def __init__(self, module: str, setup: Mapping[str, Any], limits: ChildLimits) -> None:
        self._module = module
        self._setup = setup
        self._limits = limits
        self._process: subprocess.Popen[str] | None = None
        self._stop: Callable[[], object] | None = None

    def ask(self, question: object) -> Any:
        """The child process's answer.

        Raises:
            ChildDiedError: there is none.
            UnavailableError: no child process can be started.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        return self._exchange(question, self._limits.wall_seconds)

    def close(self) -> None:
        """Ends the child process."""
        if self._stop is not None:
            self._stop()
        self._process = self._stop = None

    def _start(self) -> None:
        self.close()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
                text=True,
                encoding="utf-8",
                # Ctrl-C in the terminal must reach the server only.
                start_new_session=True,
            )
            self._stop = weakref.finalize(self, _end, self._process)
            self._exchange({"limits": asdict(self._limits), "setup": self._setup}, _START_SECONDS)
        except (OSError, ChildDiedError) as error:
            self.close()
            raise UnavailableError(
                f"a child process ({self._module}) could not be started; the machine may be short "
                "of memory or processes"
            ) from error

    def _exchange(self, message: object, seconds: float) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line.endswith("\n"):
            return json.loads(line)
        status = process.wait()
        raise ChildDiedError(too_complex=hasattr(signal, "SIGPROF") and status == -signal.SIGPROF)


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a child process needs to run this Python with these packages, and nothing else.

    It is a list of what may pass: of what may not, such as keys, tokens and addresses with
    passwords in them, nobody knows all names.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name in _VARIABLES or name.startswith(_PREFIXES)
    }
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # unread input
                pipe.close()


Handler = Callable[[Any], Any]


def serve(prepare: Callable[[Any], Handler]) -> None:
    """The child's side: answers one question after another, each within the limits.

    Args:
        prepare: makes of the setup what answers the questions; both are values of JSON.
    """
    opening = json.loads(sys.stdin.readline())
    limits = ChildLimits(**opening["limits"])
    answer = prepare(opening["setup"])
    _limit_memory(limits.memory_bytes)
    print(json.dumps(None), flush=True)
    for line in sys.stdin:
        _limit_cpu(limits.cpu_seconds)
        given = json.dumps(answer(json.loads(line)))
        _limit_cpu(0)
        print(given, flush=True)


def _limit_cpu(seconds: float) -> None:
    """Makes the system end this process after so much CPU time; 0 lifts the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_memory(num_bytes: int) -> None:
    if sys.platform == "linux":
        import resource  # which Windows lacks

        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
