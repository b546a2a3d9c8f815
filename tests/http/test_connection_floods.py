"""Floods by strangers, plain and under TLS: a health check beside them is always answered."""

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.http.scripted_server import GET, Server, post, read_all, wait_for

LIVE = GET + b"connection: close\r\n\r\n"
MAX = 20
NUM = 60


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    limits: dict[str, Any] = {"header_timeout": 60, "body_timeout": 60, "write_timeout": 60}
    limits["max_unsent_bytes"] = 10**9
    running = Server(tls=request.param, max_connections=MAX, **limits)
    yield running
    running.stop()


def handshake_half_done(server: Server) -> socket.socket:
    client = server.connect_raw()
    context, out = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO()
    half = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        half.do_handshake()
    client.sendall(out.read())
    return client


def answered(request: bytes) -> Callable[[Server], socket.socket]:
    def connect(server: Server) -> socket.socket:
        client = server.connect(request)
        assert b" 200 " in client.recv(4096)
        return client

    return connect


UNREAD = b"GET /size/4000000 HTTP/1.1\r\nhost: x\r\n\r\n"
HALF_A_BODY = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nx"
FLOODS: dict[str, Callable[[Server], socket.socket]] = {
    "silent": Server.connect_raw,
    "half a handshake": handshake_half_done,
    "silent after the handshake": Server.connect,
    "half of the headers": lambda server: server.connect(GET + b"x-a: b"),
    "kept alive": answered(GET + b"\r\n"),
    "kept alive, with half of the next request": answered(GET + b"\r\nGET /e"),
    "garbage": lambda server: server.connect(b"\x00\r\n\r\n"),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_health_check_is_answered_beside(server: Server, flood: Any) -> None:
    held = []
    for number in range(NUM):
        with contextlib.suppress(OSError):  # some were closed already to make room
            held.append(flood(server))
        if number % 10 == 9:
            # A second is what the finding allows; a test only wants an end.
            assert b" 200 " in read_all(server.connect(LIVE))
    assert server.num_open() <= MAX
    for client in held:
        client.close()
    wait_for(lambda: server.num_open() == 0)


@pytest.mark.parametrize("request_", [HALF_A_BODY, UNREAD], ids=["half a body", "unread"])
def test_slow_clients_keep_their_place_for_a_second(server: Server, request_: bytes) -> None:
    """Those that send or take something slowly, as nobody knows that they do nothing."""
    held = [server.connect(request_) for _ in range(MAX)]
    wait_for(lambda: server.num_open() == MAX)
    deadline = time.monotonic() + 20
    while b" 200 " not in read_all(server.connect(LIVE)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert server.ended("displaced") >= 1
    assert len(held) == MAX


def test_clients_that_are_being_answered_keep_theirs(server: Server) -> None:
    held = [server.connect(post("/wait")) for _ in range(MAX)]
    wait_for(lambda: server.app.num_waiting == MAX)
    reply = read_all(server.connect(LIVE))
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert b"too many connections; try again later" in reply
    server.app.release.set()
    for client in held:
        assert b" 200 " in client.recv(4096)
    assert server.ended("displaced") == 0
    assert server.ended("limit") == 1


def test_the_log_has_one_line_for_a_flood(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    held = [server.connect_raw() for _ in range(NUM)]
    wait_for(lambda: server.ended("displaced") == NUM - MAX)
    lines = [each.getMessage() for each in caplog.records if each.name == "maskdial.connections"]
    assert len(lines) == 1
    assert f"{MAX} connections are open (--max-connections)" in lines[0]
    assert len(held) == NUM


@pytest.mark.parametrize("flood", ["silent", "half a handshake"])
def test_a_handshake_has_to_be_done_in_time(flood: str) -> None:
    server = Server(tls=True, header_timeout=0.3)
    try:
        client = FLOODS[flood](server)
        read_all(client)
        wait_for(lambda: server.ended("handshake") == 1 and server.num_open() == 0)
    finally:
        server.stop()


def test_a_client_that_leaves_before_its_handshake_leaves_nothing(server: Server) -> None:
    for _ in range(NUM):
        server.connect_raw().close()
    wait_for(lambda: server.num_open() == 0)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_the_unread_end_of_a_last_reply_is_not_held_for_ever(tls: bool) -> None:
    """Too little for the transport to say that its client does not read."""
    server = Server(tls=tls, write_timeout=0.5, max_connections=100)
    try:
        held = []
        for size in range(2_200_000, 2_900_000, 30_000):  # some fit but for the last bytes
            head = b"GET /size/%d HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
            held.append(server.connect(head % size))
        wait_for(lambda: server.num_open() == 0)
        assert len(held) > 10
    finally:
        server.stop()
