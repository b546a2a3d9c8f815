"""`--front-ends`: the replies of one process, from several that take connections for it."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.errors import ConfigError
from maskdial.http.listener import listen_in_groups
from maskdial.registry.catalog import STARTER_FOLDER
from tests.http.process import Process
from tests.servers import PATIENCE, metric, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc for processes"),
]

_HYBRID = ("--model", f"hybrid={STARTER_FOLDER / 'hybrid'}")
_TEXT = "the acting was wonderful"
_LONG = {"max_new_tokens": 400, "ignore_eos": True, "do_sample": False}
# What may differ between two servers: when, and which request it was.
_OWN = {"date", "x-request-id", "x-total-time", "x-queue-time", "x-inference-time"}

REQUESTS: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/classify", {"inputs": _TEXT}),
    ("POST", "/classify", {"inputs": [_TEXT, "dull"], "parameters": {"top_k": 1}}),
    ("POST", "/classify", {"inputs": _TEXT, "timeout": 30}),
    ("POST", "/classify", {"inputs": _TEXT, "model": "sentiment:full"}),
    ("POST", "/classify", {"inputs": "film " * 3000}),
    ("POST", "/classify", {"inputs": "film " * 40_000, "parameters": {"truncate": True}}),
    ("POST", "/classify", {"inputs": "x" * 2_100_000}),
    ("POST", "/classify", {"inputs": 5}),
    ("POST", "/classify", {"inputs": _TEXT, "unknown": 1}),
    ("POST", "/classify", {"inputs": _TEXT, "model": "nobody"}),
    ("POST", "/classify", {"inputs": _TEXT, "model": "hybrid"}),
    ("POST", "/v1/embeddings", {"input": _TEXT}),
    ("POST", "/fill-mask", {"inputs": "the [MASK] was good"}),
    ("POST", "/generate", {"inputs": "The film", "parameters": {"max_new_tokens": 8, "seed": 1}}),
    (
        "POST",
        "/generate",
        {"inputs": "The", "parameters": {"max_new_tokens": 8, "seed": 1}, "stream": True},
    ),
    ("POST", "/nowhere", {}),
    ("PUT", "/classify", {}),
    ("GET", "/health/ready", None),
    ("HEAD", "/health/ready", None),
    ("GET", "/openapi.json", None),
)


class Fronts(Process):
    """A server with two front ends."""

    def __init__(self, *arguments: str, **options: Any) -> None:
        super().__init__("--front-ends", "2", *_HYBRID, *arguments, **options)

    def pids(self) -> list[int]:
        """Its front ends."""
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        children = [pid for each in threads for pid in (each / "children").read_text().split()]
        return [pid for pid in map(int, children) if b"maskdial.fronts" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def fronts() -> Iterator[Fronts]:
    server = Fronts()
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def single() -> Iterator[Process]:
    server = Process(*_HYBRID)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()


def _reply(http: httpx.Client, method: str, path: str, body: object) -> tuple[Any, ...]:
    reply = http.request(method, path, json=body)
    headers = [(name, value) for name, value in reply.headers.multi_items() if name not in _OWN]
    return reply.status_code, headers, reply.content


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_replies_are_those_of_one_process(
    fronts: Fronts, single: Process, method: str, path: str, body: object
) -> None:
    expected = _reply(single.http, method, path, body)
    for _ in range(3):  # several connections, so that each front end is asked
        with fronts.client() as http:
            assert _reply(http, method, path, body) == expected


def _connect(server: Process) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)


def _read_until(client: socket.socket, end: bytes, count: int = 1) -> bytes:
    received = b""
    while received.count(end) < count:
        part = client.recv(65_536)
        assert part, received
        received += part
    return received


def test_pipelined_requests_are_answered_in_order(fronts: Fronts) -> None:
    post = b'POST /classify HTTP/1.1\r\nhost: a\r\ncontent-length: 17\r\n\r\n{"inputs":"fine"}'
    with _connect(fronts) as client:
        client.sendall(post + b"GET /health/live HTTP/1.1\r\nhost: a\r\n\r\n" + post)
        received = _read_until(client, b"POSITIVE", 2)
    assert received.count(b"200 OK") == 3
    assert received.index(b"POSITIVE") < received.index(b"live") < received.rindex(b"POSITIVE")


def test_a_body_is_sent_when_the_owner_wants_it(fronts: Fronts) -> None:
    head = b"POST %s HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
    with _connect(fronts) as client:
        client.sendall(head % (b"/classify", 17))
        assert b"100 Continue" in _read_until(client, b"\r\n\r\n")
        client.sendall(b'{"inputs":"fine"}')
        assert b"200 OK" in _read_until(client, b"POSITIVE")
    with _connect(fronts) as client:
        client.sendall(head % (b"/classify", 10**10))
        received = _read_until(client, b"\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 413")


def test_a_body_may_come_in_parts(fronts: Fronts) -> None:
    with _connect(fronts) as client:
        client.sendall(b"POST /classify HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        for part in (b'{"inputs"', b":", b'"fi', b'ne"}'):
            time.sleep(0.02)
            client.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        client.sendall(b"0\r\n\r\n")
        assert b"200 OK" in _read_until(client, b"POSITIVE")


def test_what_runs_for_a_client_that_leaves_is_cancelled(fronts: Fronts) -> None:
    def num_cancelled() -> float:
        return metric(fronts.http, "maskdial_cancelled_total", model="hybrid", reason="disconnect")

    before = num_cancelled()
    for _ in range(5):  # where processors are scarce, a reply may be complete before it is told
        with (
            fronts.client() as http,
            http.stream(
                "POST", "/generate", json={"inputs": "A", "parameters": _LONG, "stream": True}
            ) as reply,
        ):
            next(reply.iter_lines())
    wait_for(lambda: num_cancelled() > before)


def _num_open(server: Fronts) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    (line,) = (each for each in lines if each.startswith("maskdial_connections "))
    return float(line.split()[1])


def test_connections_are_counted(fronts: Fronts) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(_connect(fronts))
        wait_for(lambda: _num_open(fronts) >= 11)  # that of the metrics is one
    wait_for(lambda: _num_open(fronts) == 1)


def test_nonsense_is_refused_by_the_front_end(fronts: Fronts) -> None:
    with _connect(fronts) as client:
        client.sendall(b"nonsense\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 400")
    wait_for(
        lambda: metric(fronts.http, "maskdial_connections_ended_total", reason="malformed") > 0
    )


def test_a_front_end_that_dies_is_started_anew(fronts: Fronts) -> None:
    def num_cancelled() -> float:
        return metric(
            fronts.http, "maskdial_requests_total", route="/classify", outcome="cancelled"
        )

    before, cancelled = fronts.pids(), num_cancelled()
    assert len(before) == 2
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(_connect(fronts)) for _ in range(4)]
        for client in clients:
            client.sendall(b"POST /classify HTTP/1.1\r\nhost: a\r\ncontent-length: 17\r\n\r\n")
        _wait_until_read(fronts, len(clients))
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        for client in clients:
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1000) == b""
    # Those that connect meanwhile wait.
    with fronts.client() as http:
        assert http.post("/classify", json={"inputs": _TEXT}).status_code == 200
    assert not set(before) & set(fronts.pids())
    wait_for(lambda: num_cancelled() == cancelled + len(clients))


def _wait_until_read(server: Fronts, num_requests: int) -> None:
    """Waits until the front ends have so many connections, and have read what was sent there."""
    wait_for(lambda: _num_open(server) >= num_requests)
    time.sleep(0.2)


def test_keys_limits_and_the_drain_are_the_owners() -> None:
    limit = ("--max-requests-per-client", "1")
    server = Fronts("--api-key", "secret-secret-1", *limit, stderr=subprocess.PIPE)
    try:
        server.http.headers["authorization"] = "Bearer secret-secret-1"
        server.wait_until_ready()
        with server.client() as http:
            assert http.post("/classify", json={"inputs": _TEXT}).status_code == 401
        pids = server.pids()
        with _connect(server) as client:
            # A request is open from its headers on.
            client.sendall(
                b"POST /classify HTTP/1.1\r\nhost: a\r\nx-api-key: secret-secret-1\r\n"
                b"content-length: 17\r\n\r\n"
            )

            def status() -> int:  # of whichever front end has the connection
                with server.client() as http:
                    http.headers.update(server.http.headers)
                    return http.post("/classify", json={"inputs": _TEXT}).status_code

            wait_for(lambda: status() == 429)
            assert [status() for _ in range(4)] == [429] * 4
            server.process.send_signal(signal.SIGTERM)
            # A drain gives bodies up that do not come.
            assert b"503 Service Unavailable" in _read_until(client, b"shutting down")
        _, log = server.process.communicate(timeout=PATIENCE)
        assert server.process.returncode == 0
        assert not any(_command(pid) for pid in pids)
        assert b"killed" not in log
    finally:
        server.close()


def test_front_ends_end_with_their_owner() -> None:
    server = Fronts()
    try:
        server.wait_until_ready()
        pids = server.pids()
        with _connect(server) as client:
            client.sendall(b"POST /classify HTTP/1.1\r\nhost: a\r\ncontent-length: 17\r\n\r\n")
            server.process.kill()
            assert b"503 Service Unavailable" in _read_until(client, b"the server has stopped")
        wait_for(lambda: not any(_command(pid) for pid in pids))
    finally:
        server.close()


@pytest.mark.wide
def test_front_ends_end_the_encryption() -> None:
    server = Fronts(tls=True)
    try:
        server.wait_until_ready()
        for _ in range(4):
            with server.client() as http:
                assert http.post("/classify", json={"inputs": _TEXT}).status_code == 200
        pids = server.pids()
        assert server.stop() == 0
        assert not any(_command(pid) for pid in pids)
    finally:
        server.close()


def test_a_port_in_use_is_taken_by_nobody() -> None:
    (first,), (second,) = listen_in_groups("127.0.0.1", 0, 10, 2)
    with first, second:
        port = first.getsockname()[1]
        assert second.getsockname()[1] == port
        with pytest.raises(ConfigError, match="the port is in use"):
            listen_in_groups("127.0.0.1", port, 10, 2)
