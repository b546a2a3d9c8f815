"""ServerProcess: our server as a child process on a free port, and connections to it."""

import asyncio
import contextlib
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httptools
import httpx
import psutil

from loadtests import LoadTestError

_LISTENING = re.compile(r"listening on (http://[\w.:]+)")
_COLLECTED = re.compile(r"^collected: (\d+) (\d+)$")
_COLLECTING = Path(__file__).with_name("collecting_server.py")
_COLLECT_TIMEOUT = 30.0
_POLL_SECONDS = 0.01
_STOP_TIMEOUT = 15.0
_LAST_LINES_TIMEOUT = 1.0
_LOG_LINES = 20


class ServerProcess:
    """A server that is ready; created by `running_server`.

    Attributes:
        url: where it listens.
        start_seconds: from the start of the process until it listened.
        ready_seconds: from the start of the process until ``/health/ready`` returned 200.
    """

    def __init__(
        self, url: str, pid: int, log: "_Log", start_seconds: float, ready_seconds: float
    ) -> None:
        self.url = url
        self._log = log
        self.start_seconds = start_seconds
        self.ready_seconds = ready_seconds
        self._process = psutil.Process(pid)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def cpu_seconds(self) -> float:
        """User and system CPU time of all threads since the start."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        """Resident set size."""
        return int(self._process.memory_info().rss)

    def collect(self) -> tuple[int, int]:
        """Has it give free memory back and collect its garbage; it has to be ``collecting``.

        Returns:
            The resident set size before the collection and after it, in bytes.
        """
        self._process.send_signal(signal.SIGUSR1)
        return self._log.collected.get(timeout=_COLLECT_TIMEOUT)

    def num_files(self) -> int:
        """Open file descriptors."""
        return int(self._process.num_fds())

    def num_threads(self) -> int:
        """Threads, of Python and of native code."""
        return int(self._process.num_threads())

    def suspend(self) -> None:
        """Stops it where it is, until `resume`."""
        self._process.suspend()

    def resume(self) -> None:
        """Lets it go on."""
        self._process.resume()

    def reload(self) -> None:
        """Has it read its key file again (SIGHUP)."""
        self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """Ends it at once (SIGKILL)."""
        self._process.kill()

    def kill_children(self) -> int:
        """Kills the processes that it has started; returns how many those were."""
        children = self._process.children()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        return len(children)


@contextmanager
def running_server(
    models: Mapping[str, Path],
    *,
    timeout: float = 120.0,
    on_line: Callable[[str], None] | None = None,
    collecting: bool = False,
    **settings: object,
) -> Iterator[ServerProcess]:
    """Runs a server for the duration of the block; it is ready when the block begins.

    Args:
        models: bundle folders to serve, by name; without any, the starter models.
        timeout: seconds until it must be ready.
        on_line: called with each line of its log, from another thread.
        collecting: it can be told to `ServerProcess.collect`.
        settings: fields of `maskdial.config.Config`; ``MASKDIAL_*`` variables set the others.

    Raises:
        LoadTestError: it did not start; the message includes its last log lines.
    """
    started = time.perf_counter()
    process = spawn_server(models, collecting=collecting, **settings)
    log = _Log(process, on_line)
    try:
        url = log.wait_for_url(timeout)
        listening = time.perf_counter()
        _wait_until_ready(url, process, log, timeout - (listening - started))
        ready = time.perf_counter()
        yield ServerProcess(url, process.pid, log, listening - started, ready - started)
    finally:
        _stop(process)
        log.close()


def spawn_server(
    models: Mapping[str, Path], *, collecting: bool = False, **settings: object
) -> "subprocess.Popen[str]":
    """Starts a server, whose log is the process's standard error; arguments as `running_server`."""
    # -P: or the file's own folder would be searched for modules.
    program = ["-P", str(_COLLECTING)] if collecting else ["-m", "maskdial.cli"]
    return subprocess.Popen(
        [sys.executable, *program, "serve", *_flags(models, settings)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


class _Log:
    """Reads a server's standard error and keeps the last lines."""

    def __init__(
        self, process: "subprocess.Popen[str]", on_line: Callable[[str], None] | None
    ) -> None:
        self.collected: queue.Queue[tuple[int, int]] = queue.Queue()
        self._on_line = on_line
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
        self._thread.join(_LAST_LINES_TIMEOUT)
        return LoadTestError("\n".join((f"{what}; its log ends with:", *self._lines)))

    def close(self) -> None:
        self._thread.join()
        self._stream.close()

    def _read(self) -> None:
        for line in self._stream:
            self._lines.append(line.rstrip())
            if found := _COLLECTED.search(line):
                self.collected.put((int(found[1]), int(found[2])))
            if self._on_line is not None:
                self._on_line(line)
            if not self._url and (found := _LISTENING.search(line)):
                self._url = found[1]
                self._known.set()
        self._known.set()  # the process ended


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
        process.wait(_STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete reply. For an event stream, ``body`` is all events with their line ends."""

    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        return self.status == httpx.codes.OK

    def __str__(self) -> str:
        return f"{self.status} {self.body[-200:].decode(errors='replace')}"


def count_tokens(data: bytes) -> int:
    """The number of token events that begin in a piece of an event stream."""
    return data.count(b'data: {"index"')


def post(path: str, content: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """A POST request with a JSON body."""
    more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"{more}Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class Connection(asyncio.Protocol):
    """A keep-alive HTTP/1.1 connection that costs this process as little CPU time as Python allows.

    The load generator shares its cores with the server, so requests are encoded beforehand and
    replies are kept as bytes. One request at a time.
    """

    def __init__(self) -> None:
        self._reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._body: list[bytes] = []
        self._on_body: Callable[[bytes], None] | None = None

    @classmethod
    async def open(cls, port: int) -> "Connection":
        """Connects to a port on localhost."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, "127.0.0.1", port)
        return connection

    @property
    def closed(self) -> bool:
        """Whether either side closed it; the server closes idle connections."""
        return self._transport.is_closing()

    async def send(self, request: bytes, on_body: Callable[[bytes], None] | None = None) -> Reply:
        """Sends a request and reads the whole reply.

        Args:
            request: from `post`.
            on_body: called with each piece of the body as it arrives.

        Raises:
            LoadTestError: the server closed the connection.
        """
        if self.closed:
            raise LoadTestError("the server closed a connection before the request was sent")
        self._parser = httptools.HttpResponseParser(self)
        self._reply = asyncio.get_running_loop().create_future()
        self._body = []
        self._on_body = on_body
        self._transport.write(request)
        return await self._reply

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        if not self._reply.done():
            self._reply.set_exception(LoadTestError("the server closed a connection"))
            self._reply.exception()  # marks it as retrieved: there may be no waiter

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._body.append(data)
        if self._on_body is not None:
            self._on_body(data)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if not self._reply.done():
            self._reply.set_result(Reply(self._parser.get_status_code(), b"".join(self._body)))
