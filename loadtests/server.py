"""ServerProcess: our server as a child process on a free port, and connections to it."""

import asyncio
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
        process: of the system.
        start_seconds: from the start of the process until it listened.
        ready_seconds: from the start of the process until ``/health/ready`` returned 200.
    """

    def __init__(
        self, url: str, pid: int, log: "_Log", start_seconds: float, ready_seconds: float
    ) -> None:
        self.url = url
        self.port = int(url.rpartition(":")[2])
        self.process = psutil.Process(pid)
        self.start_seconds = start_seconds
        self.ready_seconds = ready_seconds
        self._log = log

    def cpu_seconds(self) -> float:
        """User and system CPU time of all threads since the start."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        """Resident set size."""
        return int(self.process.memory_info().rss)

    def resources(self) -> tuple[int, int, int]:
        """Resident bytes, open file descriptors, and threads of Python and of native code."""
        return self.resident_bytes(), self.process.num_fds(), self.process.num_threads()

    def collect(self) -> tuple[int, int]:
        """Frees memory and collects garbage, if it is ``collecting``; resident bytes around it.

        Raises:
            LoadTestError: the server does not do so, or is gone.
        """
        try:
            self.process.send_signal(signal.SIGUSR1)
            return self._log.collected.get(timeout=_COLLECT_TIMEOUT)
        except (psutil.Error, queue.Empty) as error:
            raise LoadTestError("the server does not collect its garbage") from error


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
        collecting: whether it can `ServerProcess.collect`.
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
    """A keep-alive HTTP/1.1 connection to localhost, with one request at a time.

    The load generator shares its cores with the server, so requests are encoded beforehand and
    replies are kept as bytes.
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
        """Reads the whole reply to a request; ``on_body`` gets each piece of the body.

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

    # Called by the event loop, and by the parser.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._reply.done():
            self._reply.set_exception(LoadTestError("the server closed a connection"))
            self._reply.exception()  # marks it as retrieved: there may be no waiter

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        if self._on_body is not None:
            self._on_body(data)

    def on_message_complete(self) -> None:
        if not self._reply.done():
            self._reply.set_result(Reply(self._parser.get_status_code(), b"".join(self._body)))


class Client:
    """Sends over one connection, and opens the next when that is closed or was too slow."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection: Connection | None = None

    async def send(self, request: bytes, seconds: float = 60.0) -> Reply:
        """Reads the whole reply to a request.

        Raises:
            LoadTestError: there was none within the time.
        """
        try:
            async with asyncio.timeout(seconds):
                if self._connection is None or self._connection.closed:
                    self._connection = await Connection.open(self._port)
                return await self._connection.send(request)
        except (OSError, TimeoutError) as error:
            self.close()
            raise LoadTestError(f"no reply within {seconds:.3g} s: {error!r}") from error

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
