"""Raw HTTP that no client library would send: requests that two readers could read differently,
and random bytes around valid ones. ``TESTS_FUZZ_EXAMPLES`` says how many of those.
"""

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from loadtests.faults.hostile import BODY, CHUNKED, LENGTH, POST, SMUGGLED, VALID, http_message
from maskdial.registry.catalog import STARTER_FOLDER

NUM_EXAMPLES = 50 * int(os.environ.get("TESTS_FUZZ_EXAMPLES", "4"))
SEED = os.environ.get("GITHUB_RUN_ID", "7")


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Iterator[Any]:
    running = start_server(
        models={"sentiment": STARTER_FOLDER / "sentiment"},
        header_timeout=0.5,
        body_timeout=0.5,
        keep_alive_timeout=1,
    )
    yield running
    running.stop()


def exchange(server: Any, *contents: bytes) -> bytes:
    """What the server replies to some bytes until it closes the connection."""
    port = int(server.url.rsplit(":", 1)[1])
    reply = b""
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection(("127.0.0.1", port), timeout=60) as client,
    ):
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for content in contents:
            client.sendall(content)
        while piece := client.recv(65536):
            reply += piece
    return reply


def statuses(reply: bytes) -> list[int]:
    return [int(part[:3]) for part in reply.split(b"HTTP/1.1 ")[1:]]


AMBIGUOUS = [
    # Two lengths
    LENGTH + CHUNKED + b"\r\n0\r\n\r\n",
    CHUNKED + LENGTH + b"\r\n0\r\n\r\n",
    LENGTH + b"content-length: 0\r\n\r\n",
    b"content-length: 0\r\n" + LENGTH + b"\r\n",
    b"content-length: 18, 18\r\n\r\n" + BODY,
    # Lengths that are none
    b"content-length: +18\r\n\r\n" + BODY,
    b"content-length: -1\r\n\r\n" + BODY,
    b"content-length: 0x12\r\n\r\n" + BODY,
    b"content-length: 1 8\r\n\r\n" + BODY,
    b"content-length: 1_8\r\n\r\n" + BODY,
    b"content-length: 18446744073709551617\r\n\r\n" + BODY,
    b"content-length: \xb2\r\n\r\n" + BODY,
    # Encodings that are not quite chunked
    b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    b"transfer-encoding: identity\r\n" + LENGTH + b"\r\n" + BODY,
    b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    b"transfer-encoding\x00: chunked\r\n\r\n0\r\n\r\n",
    b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    b"x: y\r\n transfer-encoding: chunked\r\n" + LENGTH + b"\r\n" + BODY,
    b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"transfer-encoding: x, chunked\r\n\r\n0\r\n\r\n",
    # Two hosts
    b"host: y\r\n" + LENGTH + b"\r\n" + BODY,
    # Chunks
    CHUNKED + b"\r\n0x12\r\n" + BODY + b"\r\n0\r\n\r\n",
    CHUNKED + b"\r\n-12\r\n" + BODY + b"\r\n0\r\n\r\n",
    CHUNKED + b"\r\n1 2\r\n" + BODY + b"\r\n0\r\n\r\n",
    CHUNKED + b"\r\n10000000000000012\r\n" + BODY + b"\r\n0\r\n\r\n",
    CHUNKED + b"\r\n12\r\n" + BODY + b"0\r\n\r\n",
    CHUNKED + b"\r\n12\n" + BODY + b"\r\n0\r\n\r\n",
    CHUNKED + b"\r\n\r\n0\r\n\r\n",
    # A body that the parser would take for another protocol's
    b"connection: upgrade\r\nupgrade: h2c\r\n" + LENGTH + b"\r\n" + BODY,
    # Line ends and headers
    b"x: a\nb: c\r\n" + LENGTH + b"\r\n" + BODY,
    b"x: a\rb: c\r\n" + LENGTH + b"\r\n" + BODY,
    b"x: a\x00b\r\n" + LENGTH + b"\r\n" + BODY,
    b": empty\r\n" + LENGTH + b"\r\n" + BODY,
    b"no colon\r\n" + LENGTH + b"\r\n" + BODY,
    b"x y: z\r\n" + LENGTH + b"\r\n" + BODY,
]


@pytest.mark.parametrize("rest", AMBIGUOUS)
def test_what_could_be_read_in_two_ways_is_refused(server: Any, rest: bytes) -> None:
    """With one reply at most, and what follows is not taken for a request."""
    reply = exchange(server, POST + rest + SMUGGLED)
    assert b"smuggled" not in reply
    assert statuses(reply) == [400], reply


@pytest.mark.parametrize(
    "start",
    [
        b"POST /classify HTTP/1.0\r\nconnection: keep-alive\r\n" + CHUNKED,  # knows no chunks
        b"POST /classify HTTP/1.0\r\nhost: x\r\nhost: y\r\n" + LENGTH,
        b"POST /classify HTTP/1.1\r\n" + LENGTH,
    ],
)
def test_headers_that_another_version_means_otherwise_are_refused(
    server: Any, start: bytes
) -> None:
    reply = exchange(server, start + b"\r\n" + SMUGGLED)
    assert statuses(reply) == [400], reply


@pytest.mark.parametrize("rest", VALID)
def test_what_can_be_read_in_one_way_only_is_answered(server: Any, rest: bytes) -> None:
    reply = exchange(server, POST + b"connection: close\r\n" * (b"connection" not in rest) + rest)
    assert statuses(reply)[-1] == 200


def test_nothing_after_an_upgrade_is_read(server: Any) -> None:
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"
    reply = exchange(server, b"GET /health HTTP/1.1\r\nhost: x\r\n" + upgrade, SMUGGLED)
    assert statuses(reply) == [200]


@pytest.mark.slow
def test_random_messages_are_answered_or_refused_in_time(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """No 5xx, no traceback; afterwards nothing is held, and the server answers as before."""
    source = random.Random(SEED)
    messages = [
        b"".join(http_message(source) for _ in range(source.choice((1, 1, 2))))
        for _ in range(NUM_EXAMPLES)
    ]
    with ThreadPoolExecutor(32) as pool:
        replies = list(pool.map(lambda each: exchange(server, each), messages))
    for message, reply in zip(messages, replies, strict=True):
        assert all(status < 500 for status in statuses(reply)), (message, reply)
    assert any(200 in statuses(reply) for reply in replies)
    assert any(400 in statuses(reply) for reply in replies)
    assert not [record for record in caplog.records if record.exc_info]
    lifecycle = server.server.config.app.state.context.lifecycle
    deadline = time.monotonic() + 20
    with httpx.Client(base_url=server.url) as http:
        while "maskdial_connections 1.0" not in http.get("/metrics").text or lifecycle.num_requests:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert http.post("/classify", json={"inputs": "good"}).status_code == 200


@pytest.mark.parametrize("path", [b"/", b"/docs", b"/page/app.js", b"/health", b"/nowhere"])
@pytest.mark.parametrize(
    "rest",
    [
        b"content-length: 5\r\n\r\nab",
        b"transfer-encoding: chunked\r\n\r\n5\r\nab",
        b"transfer-encoding: chunked\r\n\r\n" + (b"ffff\r\n" + bytes(0xFFFF) + b"\r\n") * 40,
        b"content-length: 99999999\r\n\r\n" + bytes(10_000),
    ],
)
def test_a_body_that_breaks_off_behind_a_page_is_no_failure_of_ours(
    server: Any, caplog: pytest.LogCaptureFixture, path: bytes, rest: bytes
) -> None:
    port = int(server.url.rsplit(":", 1)[1])
    for _ in range(5):
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection(("127.0.0.1", port), timeout=60) as client,
        ):
            client.sendall(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\n" + rest)
    deadline = time.monotonic() + 20
    with httpx.Client(base_url=server.url) as http:
        while "maskdial_connections 1.0" not in http.get("/metrics").text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert not [record for record in caplog.records if record.exc_info]
