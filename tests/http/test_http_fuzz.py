"""Raw HTTP that no client library would send: requests that two readers could read differently,
and random bytes around valid ones. ``MASKDIAL_FUZZ_EXAMPLES`` says how many of those.
"""

import contextlib
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from maskdial.models.catalog import STARTER_FOLDER

NUM_EXAMPLES = 50 * int(os.environ.get("MASKDIAL_FUZZ_EXAMPLES", "4"))
SEED = os.environ.get("GITHUB_RUN_ID", "7")
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = b'{"inputs": "good"}'
POST = b"POST /classify HTTP/1.1\r\nhost: x\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"


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


def exchange(server: Any, content: bytes) -> bytes:
    """What the server replies to some bytes until it closes the connection."""
    port = int(server.url.rsplit(":", 1)[1])
    reply = b""
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection(("127.0.0.1", port), timeout=10) as client,
    ):
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


VALID = [
    LENGTH + b"\r\n" + BODY,
    CHUNKED + b"\r\n12\r\n" + BODY + b"\r\n0\r\n\r\n",
    CHUNKED + b'\r\n9;x="y"\r\n' + BODY[:9] + b"\r\n9\r\n" + BODY[9:] + b"\r\n00\r\nx: y\r\n\r\n",
    b"CoNtEnT-lEnGtH:18 \t\r\n\r\n" + BODY,
    b"expect: 100-continue\r\n" + LENGTH + b"\r\n" + BODY,
]


@pytest.mark.parametrize("rest", VALID)
def test_what_can_be_read_in_one_way_only_is_answered(server: Any, rest: bytes) -> None:
    reply = exchange(server, POST + b"connection: close\r\n" * (b"connection" not in rest) + rest)
    assert statuses(reply)[-1] == 200


def test_nothing_after_an_upgrade_is_read(server: Any) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        client.sendall(head + SMUGGLED)
        client.sendall(SMUGGLED)
        with contextlib.suppress(ConnectionError):
            assert statuses(client.recv(65536)) == [200]
            assert client.recv(65536) == b""


METHODS = [b"GET", b"POST", b"HEAD", b"PUT", b"CONNECT", b"OPTIONS", b"get", b"PRI", b"G\x00T", b""]
TARGETS = [
    *(b"/classify", b"/health", b"/", b"*", b"http://h/classify", b"http://h", b"h:80", b"//x/y"),
    *(b"/%00", b"/%ff", b"/%zz", b"/\xff", b"/a b", b"/../x", b"/models/a%0d%0ab", b"?", b"#", b""),
]
VERSIONS = [b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.1 x", b"http/1.1", b""]
PIECES = [
    *(LENGTH, CHUNKED, b"host: y\r\n", b"content-length: 5\r\n", b"connection: close\r\n"),
    *(b"expect: 100-continue\r\n", b"upgrade: h2c\r\nconnection: upgrade\r\n", b"x: y\r\n" * 50),
    *(b"x-request-id: a\x7fb\r\n", b"x: " + b"y" * 70_000 + b"\r\n", b"\x00\r\n", b" x\r\n", b"\n"),
    *(b"authorization: Bearer \xff\r\n", b"content-type: \r\n", b"trailer: x\r\n", b"te: x\r\n"),
]
BODIES = [
    *(b"", BODY, b"12\r\n" + BODY + b"\r\n0\r\n\r\n", b"0\r\n\r\n", b"ffffffff\r\n", b"zz\r\n"),
    *(BODY * 3, SMUGGLED, b"5;" + b"x" * 5000 + b"\r\n", b"\x16\x03\x01\x02\x00", b"\r\n" * 10),
]


def _message(source: random.Random) -> bytes:
    if source.random() < 0.2:
        return POST + source.choice(VALID)
    line = b" ".join(source.choice(each) for each in (METHODS, TARGETS, VERSIONS))
    usual = source.random() < 0.5
    headers = [b"host: x\r\n", *source.choices(PIECES, k=source.randrange(4))]
    content = (POST if usual else line + b"\r\n") + b"".join(headers) + b"\r\n"
    content += source.choice(BODIES)
    for _ in range(source.choice((0, 0, 1, 3))):
        place = source.randrange(len(content) + 1)
        content = _changed(content, place, source)
    return content


def _changed(content: bytes, place: int, source: random.Random) -> bytes:
    """With a byte more, less, or other, or cut off."""
    other = bytes([source.choice((0, 10, 13, 32, 58, 127, 255, source.randrange(256)))])
    endings: Sequence[bytes] = (
        other + content[place:],
        content[place + 1 :],
        other + content[place + 1 :],
        b"",
    )
    return content[:place] + source.choice(endings)


@pytest.mark.slow
def test_random_messages_are_answered_or_refused_in_time(
    server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """No 5xx, no traceback; afterwards nothing is held, and the server answers as before."""
    source = random.Random(SEED)
    messages = [
        b"".join(_message(source) for _ in range(source.choice((1, 1, 2))))
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
