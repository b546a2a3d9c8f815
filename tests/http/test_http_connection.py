"""Connections on a real port: what a client may send, hold and leave unread, and for how long."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from maskdial.http.connection import Connection
from maskdial.http.connections import ConnectionLimits, Connections
from maskdial.metrics import Metrics
from tests.held import HOUR, HeldTimers
from tests.http.scripted_server import GET, LIMITS, Scripted, Server, post, read_all
from tests.servers import wait_for


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.stop()


@pytest.mark.parametrize("times", [1, 3])
def test_a_client_that_sends_no_more_has_its_replies(
    server: Server, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``nc -N`` does; the connection ends with them."""
    monkeypatch.setattr("maskdial.http.connection._HALF_CLOSED_SECONDS", HOUR)
    client = server.connect(post("/wait") * times)
    wait_for(lambda: server.app.num_waiting == 1)
    client.shutdown(socket.SHUT_WR)
    server.app.release.set()
    assert read_all(client).count(b" 200 ") == times
    wait_for(lambda: server.num_open() == 0)


def test_a_client_that_leaves_is_not_kept(server: Server) -> None:
    """It looks as one that sends no more, for a moment."""
    client = server.connect(post("/wait"))
    wait_for(lambda: server.app.num_waiting == 1)
    client.close()
    wait_for(lambda: server.num_open() == 0)


def test_a_stream_goes_on_for_a_client_that_sends_no_more(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a write fails."""
    monkeypatch.setattr("maskdial.http.connection._HALF_CLOSED_SECONDS", 0.0)
    client = server.connect(post("/endless"))
    received = len(client.recv(65536))
    client.shutdown(socket.SHUT_WR)
    while received < 100_000_000:
        piece = client.recv(1_000_000)
        assert piece, "the stream has ended"
        received += len(piece)
    assert server.app.ended == []
    client.close()
    wait_for(lambda: server.num_open() == 0 and server.app.ended == ["endless"])


@pytest.mark.parametrize("sent", [b"", GET, post("/echo")[:-3]])
def test_half_a_request_is_not_waited_for_at_the_end(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(header_timeout=HOUR, body_timeout=HOUR)
    try:
        client = server.connect(sent)
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""
        wait_for(lambda: server.num_open() == 0)
    finally:
        server.stop()


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET / HT", GET, GET + b"x-a: " + b"b" * 1000])
def test_headers_have_to_arrive_in_time(server: Server, sent: bytes) -> None:
    assert read_all(server.connect(sent)) == b""
    assert server.ended("headers") == 1


def test_blank_lines_do_not_keep_an_idle_connection(server: Server) -> None:
    client = server.connect(GET + b"\r\n")
    assert b" 200 " in client.recv(4096)
    with contextlib.suppress(OSError):
        while True:
            client.sendall(b"\r\n")
            time.sleep(0.05)
    wait_for(lambda: server.ended("headers") == 1)
    assert server.ended("headers") == 1


def test_a_body_that_nobody_reads_has_to_arrive_in_time_as_well(server: Server) -> None:
    client = server.connect(b"POST /unread HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nx")
    assert b" 200 " in read_all(client)
    assert server.ended("body") == 1


@pytest.mark.parametrize(
    "headers",
    [
        b"x-a: " + b"b" * 5000,
        b"x-a: b\r\n" * 200,
        b"a:\r\n" * 200,  # small, but each is held as two objects
    ],
)
@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
def test_large_headers_are_431(server: Server, headers: bytes, end: bytes) -> None:
    reply = read_all(server.connect(GET + headers + end))
    assert reply.startswith(b"HTTP/1.1 431 ")
    assert b"more than 4,096 bytes (--max-header-bytes)" in reply
    assert b"connection: close" in reply
    assert server.ended("header_bytes") == 1


def test_a_header_without_end_is_431(server: Server) -> None:
    client = server.connect(GET + b"x-a: ")
    with contextlib.suppress(OSError):
        for _ in range(1000):
            client.sendall(b"b" * 10_000)
    assert read_all(client).startswith(b"HTTP/1.1 431 ")


def test_a_long_path_is_431(server: Server) -> None:
    reply = read_all(server.connect(b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: x\r\n\r\n"))
    assert reply.startswith(b"HTTP/1.1 431 ")


def test_headers_within_the_limit_pass(server: Server) -> None:
    client = server.connect(GET + b"x-a: " + b"b" * 3000 + b"\r\nconnection: close\r\n\r\n")
    assert read_all(client).endswith(b"0 host,x-a,connection")


CHUNKED = b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"


def test_trailers_are_dropped_and_bounded(server: Server) -> None:
    body = b"connection: close\r\n\r\n3\r\nabc\r\n0\r\n"
    reply = read_all(server.connect(CHUNKED + body + b"x-admin: yes\r\n\r\n"))
    assert reply.endswith(b"3 host,transfer-encoding,connection")
    assert b" 200 " not in read_all(server.connect(CHUNKED + body + b"a: b\r\n" * 200 + b"\r\n"))


def test_only_so_many_connections(server: Server) -> None:
    held = [server.connect(post("/wait")) for _ in range(LIMITS["max_connections"])]
    wait_for(lambda: server.app.num_waiting == len(held))
    reply = read_all(server.connect(GET + b"\r\n"))
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in reply
    assert b'"error_type":"unavailable"' in reply
    server.app.release.set()
    for client in held:
        client.close()
    wait_for(lambda: server.num_open() == 0)
    assert b" 200 " in server.connect(GET + b"\r\n").recv(4096)
    assert server.ended("limit") == 1


def test_who_stops_reading_a_stream_ends_it(server: Server) -> None:
    client = server.connect(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
    wait_for(lambda: len(server.app.ended) == 1)
    assert server.ended("write") == 1
    client.close()


def test_who_stops_reading_a_reply_does_not_hold_it(server: Server) -> None:
    client = server.connect(b"GET /big HTTP/1.1\r\nhost: x\r\n\r\n")
    wait_for(lambda: server.ended("write") == 1)
    assert len(read_all(client)) < 40_000_000


def test_all_unread_replies_together_are_bounded() -> None:
    """Two would hold 80 MB: the one that has held its own for longer is closed."""
    server = Server(write_timeout=3600)
    try:
        first = server.connect(b"GET /big HTTP/1.1\r\nhost: x\r\n\r\n")
        second_request = b"GET /big HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        wait_for(lambda: len(server.connections._unread) == 1)
        second = server.connect(second_request)
        wait_for(lambda: server.ended("unsent") == 1)
        assert len(read_all(second)) > 40_000_000
        assert len(read_all(first)) < 40_000_000
    finally:
        server.stop()


def test_garbage_after_a_request_does_not_get_into_its_reply(server: Server) -> None:
    client = server.connect(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n")
    wait_for(lambda: len(server.app.began) == 1)
    client.sendall(b"\x00 garbage\r\n\r\n")
    wait_for(lambda: server.ended("malformed") == 1)
    server.app.release.set()
    assert b" 400 " not in read_all(client)


def test_half_a_request_does_not_end_the_one_before(server: Server) -> None:
    """The connection ends after the reply to the first."""
    client = server.connect(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\nGET /echo HT")
    time.sleep(2 * LIMITS["header_timeout"])
    server.app.release.set()
    assert b" 200 " in read_all(client)


def test_a_blank_line_after_a_body_does_not_end_its_request(server: Server) -> None:
    """RFC 9112, 2.2: old clients send one."""
    client = server.connect(b"GET /wait HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n\r\n")
    time.sleep(2 * LIMITS["header_timeout"])
    server.app.release.set()
    assert read_all(client).endswith(b"0 host,connection")


def test_pipelining_is_bounded(server: Server) -> None:
    client = server.connect((GET + b"\r\n") * 3 + GET + b"connection: close\r\n\r\n")
    assert read_all(client).count(b" 200 ") == 4
    client = server.connect(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n" + (GET + b"\r\n") * 1000)
    wait_for(lambda: server.ended("malformed") == 1)
    server.app.release.set()
    assert read_all(client).count(b" 200 ") <= 17


class RecordingTransport(asyncio.Transport):
    """One that keeps what each call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.num_unsent = 0
        self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def write(self, data: Any) -> None:
        assert not self.closed
        self.writes.append(bytes(data))

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.num_unsent


class ClosedTransport(RecordingTransport):
    """uvloop's, after the client has reset the connection."""

    def is_closing(self) -> bool:
        return True

    def write(self, data: Any) -> None:
        raise RuntimeError("the handler is closed")


def answer(app: ASGIApp, transport: asyncio.Transport, request: bytes = GET + b"\r\n") -> None:
    """Lets an application answer a request on a transport."""

    async def main() -> None:
        connection = connect(app, transport)
        connection.data_received(request)
        while connection.tasks:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # what was called soon

    asyncio.run(main())


def connect(app: ASGIApp, transport: asyncio.Transport, **limits: Any) -> Connection:
    """A connection in the running event loop."""
    config = uvicorn.Config(app, log_config=None)
    config.load()
    connections = Connections(ConnectionLimits(**LIMITS | limits), Metrics())
    state = uvicorn.server.ServerState()
    connection = Connection(connections, config=config, server_state=state, app_state={})
    connection.connection_made(transport)
    return connection


def test_who_reads_slowly_may_go_on() -> None:
    """A thousand bytes a second are enough, and fewer are not."""
    transport, least = RecordingTransport(), HOUR * 1024
    transport.num_unsent = 10 * least

    async def main() -> None:
        connection = connect(Scripted(), transport, header_timeout=HOUR, write_timeout=HOUR)
        with HeldTimers(asyncio.get_running_loop()) as timers:
            connection.pause_writing()
            for taken, closed in [(least, False)] * 3 + [(least - 1, True)]:
                transport.num_unsent -= taken
                timers.go_off()
                await asyncio.sleep(0)
                assert transport.closed == closed
        connection.connection_lost(None)

    asyncio.run(main())


def test_a_reply_to_a_connection_that_is_gone_is_dropped() -> None:
    """Before the protocol has been told; uvicorn would raise what uvloop raises."""
    ended: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b"too late")(scope, receive, send)
        ended.append("well")

    answer(app, ClosedTransport())
    assert ended == ["well"]


@pytest.mark.parametrize("connection", [b"", b"connection: close\r\n"])
def test_a_head_and_a_small_body_are_one_write(connection: bytes) -> None:
    transport = RecordingTransport()
    answer(Response(b"body"), transport, GET + connection + b"\r\n")
    (reply,) = transport.writes
    assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
    assert reply.endswith(b"\r\n\r\nbody")
    assert transport.closed == bool(connection)


def test_a_large_body_is_not_copied() -> None:
    transport, body = RecordingTransport(), b"x" * 1_000_000
    answer(Response(body), transport)
    assert [len(each) for each in transport.writes[1:]] == [len(body)]


@pytest.mark.parametrize("connection", [b"", b"connection: close\r\n"])
def test_a_head_without_a_body_is_written(connection: bytes) -> None:
    transport = RecordingTransport()
    head = GET.replace(b"GET", b"HEAD") + connection + b"\r\n"
    answer(Response(b"body"), transport, head)
    (reply,) = transport.writes
    assert b"\r\ncontent-length: 4\r\n" in reply
    assert reply.endswith(b"\r\n\r\n")


def test_the_head_of_a_stream_does_not_wait_for_its_first_part() -> None:
    transport = RecordingTransport()
    before: list[int] = []

    async def parts() -> AsyncIterator[bytes]:
        await asyncio.sleep(0.01)
        before.append(len(transport.writes))
        yield b"part"

    answer(StreamingResponse(parts()), transport)
    assert before == [1]
    assert b"".join(transport.writes).endswith(b"\r\n\r\n4\r\npart\r\n0\r\n\r\n")


def test_a_reply_that_fails_after_its_head_ends_with_it() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"4")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        raise ValueError

    transport = RecordingTransport()
    answer(app, transport)
    (head,) = transport.writes
    assert head.endswith(b"content-length: 4\r\n\r\n")
    assert transport.closed


def test_in_an_overload_first_posts_are_refused_unread(server: Server) -> None:
    known = server.connect(post())
    assert b" 200 " in known.recv(4096)
    server.connections.overload.is_on = True
    reply = read_all(server.connect(post("/wait")))
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in reply
    assert b"connections come faster" in reply
    known.sendall(post())
    assert b" 200 " in known.recv(4096)
    assert b" 200 " in server.connect(GET + b"\r\n").recv(4096)
    server.connections.overload.is_on = False
    assert b" 200 " in server.connect(post()).recv(4096)
    assert server.ended("overload") == 1


@pytest.mark.parametrize("digits", [b"0" * 4000 + b"2", b"0" * 6000 + b"2", b"9" * 6000])
def test_a_content_length_of_thousands_of_digits_is_malformed(digits: bytes) -> None:
    server = Server(max_header_bytes=65_536)
    try:
        head = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: "
        reply = read_all(server.connect(head + digits + b"\r\n\r\nok"))
        assert reply.startswith(b"HTTP/1.1 400 ")
        assert b"the request is not valid HTTP" in reply
    finally:
        server.stop()
