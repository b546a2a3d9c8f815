"""An export in a process of its own: what it needs would stay in the server's memory."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from maskdial.errors import ConfigError, io_reason

_MODULE = "maskdial_export.intake"
_FOLDER = ".intake."
_END_SECONDS = 5.0
_ERROR_LINES = 3


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an export is.

    Attributes:
        phase: Downloading, Writing, Checking...
        done: how many ``things`` are done; bytes, where these are "bytes".
        total: how many there are; 0 if that is not known.
    """

    phase: str
    done: int
    total: int
    things: str


Show = Callable[[Progress], None]


def export_apart(
    options: list[str],
    folder: Path,
    show: Show,
    say: Callable[[str], None],
    stopping: threading.Event | None = None,
) -> None:
    """Exports to a folder that does not exist yet; whatever happens, nothing else is left there.

    If another process has made the folder meanwhile, its own stays.

    Args:
        options: the source, and the options of the export.
        folder: of the bundle.
        show: is told how far it is.
        say: is told what was found, a line at a time.
        stopping: gives up once it is set.

    Raises:
        ConfigError: it failed, in a sentence.
        InterruptedError: ``stopping`` was set.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _temporary(folder.parent) as place:
        bundle = place / folder.name
        command = [sys.executable, "-m", _MODULE, *options, str(bundle)]
        told = f"{bundle}: "  # the place is nobody's business
        error = _run(command, show, lambda line: say(line.removeprefix(told)), stopping)
        if error is not None:
            raise ConfigError(error)
        with suppress(OSError):  # there is one already
            bundle.rename(folder)


def _run(
    command: list[str],
    show: Show,
    say: Callable[[str], None],
    stopping: threading.Event | None,
) -> str | None:
    """Runs a command to its end; returns what it failed of, if it did."""
    reason: str | None = None
    with tempfile.TemporaryFile() as errors:
        # A group of its own: Ctrl-C in a terminal is for the caller, who ends it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            process_group=0,
            env={"OPENBLAS_NUM_THREADS": "1", **os.environ},  # as `maskdial export` has it
        )
        assert process.stdin is not None
        assert process.stdout is not None
        done = threading.Event()
        watch = threading.Thread(target=_watch, args=(process, stopping, done), daemon=True)
        watch.start()
        try:
            for line in process.stdout:
                reason = _read(line, show, say) or reason
            process.wait()
        except BaseException:
            end(process)
            raise
        finally:
            done.set()
            watch.join()
            process.stdin.close()
            process.stdout.close()
        if stopping is not None and stopping.is_set():
            raise InterruptedError("the export was given up")
        if process.returncode == 0:
            return None
        if reason is None and process.returncode > 0:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").splitlines()
            reason = " ".join(lines[-_ERROR_LINES:]) or f"it ended with {process.returncode}"
    return reason or _signalled(-process.returncode)


def _signalled(number: int) -> str:
    name = signal.strsignal(number) or f"signal {number}"  # of mapped weights that were cut: SIGBUS
    return f"the export's process was ended ({name}): memory ran out, or the file was cut meanwhile"


def _read(line: bytes, show: Show, say: Callable[[str], None]) -> str | None:
    """Passes one event on; returns it if it is an error."""
    event = json.loads(line)
    if "error" in event:
        return str(event["error"])
    if "line" in event:
        say(str(event["line"]))
    else:
        show(Progress(event["phase"], event["done"], event["total"], event["things"]))
    return None


def _watch(
    process: "subprocess.Popen[bytes]", stopping: threading.Event | None, done: threading.Event
) -> None:
    """Ends the process once it is to stop."""
    while stopping is not None and not done.wait(0.1):
        if stopping.is_set():
            end(process)
            return


def end(process: "subprocess.Popen[bytes]") -> None:
    """Ends an export. It cleans up as its input is closed; what hangs is killed."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def _temporary(parent: Path) -> Iterator[Path]:
    """A hidden folder, removed at the end; and those whose processes were killed are.

    Raises:
        ConfigError: it cannot be made.
    """
    with ExitStack() as locks:
        try:
            with ExitStack() as lock_of_all:  # or another one would remove it before it is locked
                lock_of_all.callback(os.close, _lock(parent))
                _remove_abandoned(parent)
                place = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=parent))
                locks.callback(os.close, _lock(place))
        except OSError as error:
            reason = io_reason(error)
            raise ConfigError(f"the cache {parent} cannot be written: {reason}") from error
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_FOLDER}*"):
        with suppress(OSError):  # it is in use, or gone
            descriptor = _lock(folder, fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _lock(folder: Path, flags: int = 0) -> int:
    """A descriptor that holds the lock of a folder until it is closed.

    Raises:
        OSError: the folder cannot be opened, or is locked and ``flags`` say not to wait.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
