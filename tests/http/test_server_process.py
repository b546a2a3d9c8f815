"""The server as a process: its stderr, its signals, its sockets."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.process import Process

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="descriptors and signals"),
    pytest.mark.slow,
]


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    running: list[Process] = []

    def start(*arguments: str, **options: Any) -> Process:
        running.append(Process(*arguments, **options))
        return running[-1]

    yield start
    for each in running:
        each.close()


@pytest.mark.parametrize("closed", [(2,), (0, 1, 2)])
def test_a_closed_stderr_is_a_clean_end(
    start: Callable[..., Process], closed: tuple[int, ...]
) -> None:
    """libuv ends the process if a socket of its own is one of the three, and is closed."""

    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    server = start(preexec_fn=close)
    server.wait_until_ready()
    assert server.http.post("/classify", json={"inputs": "good"}).status_code == 200
    assert server.stop() == 0


def test_a_reader_of_stderr_that_leaves_stops_nothing(start: Callable[..., Process]) -> None:
    read, write = os.pipe()
    server = start("--log-format", "json", stderr=write)
    os.close(write)
    server.wait_until_ready()
    os.close(read)
    for _ in range(10):
        assert server.http.post("/classify", json={"inputs": "good"}).status_code == 200
    assert server.stop() == 0


def test_a_hangup_while_the_server_starts_is_no_end(start: Callable[..., Process]) -> None:
    server = start()
    # When the interpreter runs our code, this signal is ignored first.
    status = Path(f"/proc/{server.process.pid}/status")
    mask = 1 << (signal.SIGHUP - 1)
    deadline = time.monotonic() + 60
    while not any(
        int(line.split()[1], 16) & mask
        for line in status.read_text().splitlines()
        if line.startswith(("SigIgn", "SigCgt"))
    ):
        assert time.monotonic() < deadline
        assert server.process.poll() is None
    for _ in range(20):
        server.process.send_signal(signal.SIGHUP)
        time.sleep(0.02)
    server.wait_until_ready()
    assert server.stop() == 0


def test_a_second_server_at_a_socket_ends_with_a_sentence(start: Callable[..., Process]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"
        first = start("--uds", str(path))
        wait_for_socket(path)
        second = start("--uds", str(path), stderr=subprocess.PIPE)
        _, errors = second.process.communicate(timeout=120)
        assert second.process.returncode == 1
        assert errors.decode().splitlines()[-1].startswith(f"maskdial: --uds {path}: another")
        assert "Traceback" not in errors.decode()
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url=first.url) as http:
            assert http.get("/health/live").status_code == 200
        assert first.stop() == 0
        assert not path.exists()


def wait_for_socket(path: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        assert time.monotonic() < deadline
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            return
        time.sleep(0.05)


def test_few_descriptors_leave_some_for_everyone(start: Callable[..., Process]) -> None:
    import resource

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))

    server = start(preexec_fn=limit, stderr=subprocess.PIPE)
    server.wait_until_ready()
    port = httpx.URL(server.url).port
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        for _ in range(5):
            assert httpx.get(f"{server.url}/health/live", timeout=60).status_code == 200
    assert server.stop() == 0
    assert server.process.stderr is not None
    log = server.process.stderr.read().decode()
    assert "too few for --max-connections 2000; it is 100" in log
    assert "no file can be opened" not in log
    server.process.stderr.close()


def test_a_key_file_that_has_become_a_fifo_stops_nothing(
    start: Callable[..., Process], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice:secret\n")
    server = start("--api-key-file", str(keys), stderr=subprocess.PIPE)
    server.wait_until_ready()
    keys.unlink()
    os.mkfifo(keys)
    server.process.send_signal(signal.SIGHUP)
    headers = {"x-api-key": "secret"}
    for _ in range(10):
        reply = server.http.post("/classify", json={"inputs": "good"}, headers=headers)
        assert reply.status_code == 200
    assert server.stop() == 0
    assert server.process.stderr is not None
    log = server.process.stderr.read().decode()
    assert "the keys remain as they were" in log
    assert "is no regular file" in log
    server.process.stderr.close()
