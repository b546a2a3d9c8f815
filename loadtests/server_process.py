"""ServerProcess: our server as a child process, on a free port of this machine."""

import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from loadtests.errors import LoadTestError

_LISTENING = re.compile(r"listening on (http://\S+)")
_POLL_SECONDS = 0.01
_STOP_SECONDS = 15.0
_LAST_WORDS_SECONDS = 1.0
_LOG_LINES = 20


class ServerProcess:
    """A server that is ready; `running_server` makes one.

    Attributes:
        url: where it listens.
        start_seconds: from the start of the process until it listened.
        ready_seconds: from the start of the process until ``/health/ready`` said 200.
    """

    def __init__(self, url: str, pid: int, start_seconds: float, ready_seconds: float) -> None:
        self.url = url
        self.start_seconds = start_seconds
        self.ready_seconds = ready_seconds
        self._process = psutil.Process(pid)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def cpu_seconds(self) -> float:
        """CPU time of all its threads since it started, the kernel's part of it included."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        """Its memory that is not swapped out or reserved only."""
        return int(self._process.memory_info().rss)


@contextmanager
def running_server(
    models: Mapping[str, Path], *, timeout: float = 120.0, **settings: object
) -> Iterator[ServerProcess]:
    """A server for as long as the block lasts, ready to take requests.

    Args:
        models: bundle folders to serve, by name; none: the starter models.
        timeout: seconds within which it has to be ready.
        settings: fields of `maskdial.config.Config`; ``MASKDIAL_*`` variables set the others.

    Raises:
        LoadTestError: it did not start; the message ends with what it said last.
    """
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "maskdial.cli", "serve", *_flags(models, settings)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = _Log(process)
    try:
        url = log.wait_for_url(timeout)
        listening = time.perf_counter()
        _wait_until_ready(url, process, log, timeout - (listening - started))
        ready = time.perf_counter()
        yield ServerProcess(url, process.pid, listening - started, ready - started)
    finally:
        _stop(process)
        log.close()


class _Log:
    """What a server writes to its standard error: read as it comes, the last lines kept."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None, "the process was started with a pipe"
        self._stream = process.stderr
        self._lines: deque[str] = deque(maxlen=_LOG_LINES)
        self._url = ""
        self._known = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for_url(self, timeout: float) -> str:
        self._known.wait(timeout)
        if not self._url:
            raise self.failure("the server did not start")
        return self._url

    def failure(self, what: str) -> LoadTestError:
        self._thread.join(_LAST_WORDS_SECONDS)
        return LoadTestError("\n".join((f"{what}; it said:", *self._lines)))

    def close(self) -> None:
        self._thread.join()
        self._stream.close()

    def _read(self) -> None:
        for line in self._stream:
            self._lines.append(line.rstrip())
            if not self._url and (found := _LISTENING.search(line)):
                self._url = found[1]
                self._known.set()
        self._known.set()  # it ended


def _flags(models: Mapping[str, Path], settings: Mapping[str, object]) -> list[str]:
    given = {"host": "127.0.0.1", "port": 0, "log_level": "info"} | dict(settings)
    flags: list[str] = []
    for name, path in models.items():
        flags += ["--model", f"{name}={path.resolve()}"]
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def _wait_until_ready(
    url: str, process: "subprocess.Popen[str]", log: _Log, timeout: float
) -> None:
    deadline = time.perf_counter() + timeout
    with httpx.Client(trust_env=False) as client:
        while True:
            try:
                if client.get(f"{url}/health/ready").status_code == httpx.codes.OK:
                    return
            except httpx.TransportError as error:
                raise log.failure("the server ended before it was ready") from error
            if process.poll() is not None or time.perf_counter() > deadline:
                raise log.failure("the server is not ready")
            time.sleep(_POLL_SECONDS)


def _stop(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
