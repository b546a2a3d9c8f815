"""What strangers do to a port for gRPC: it has the limits of HTTP's, and both go on."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest

from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.rpc.frames import FIRST_WINDOW, Code
from maskdial.rpc.messages import SERVICE
from tests.http.raw_http2 import (
    KEY,
    Kind,
    RawClient,
    call_headers,
    frame,
    number_frame,
    packed_message,
)
from tests.http.test_grpc import METADATA, Client, request
from tests.servers import wait_for

MAX = 20


@pytest.fixture(scope="module")
def start(start_server: Callable[..., Any]) -> Callable[..., Any]:
    def starter(**settings: Any) -> Any:
        common: dict[str, Any] = {
            "models": {"sentiment": STARTER_FOLDER / "sentiment"},
            "api_keys": [KEY],
            "grpc_port": 0,
            "max_connections": MAX,
            "header_timeout": 60,
            "body_timeout": 60,
            "write_timeout": 60,
            "keep_alive_timeout": 60,
        }
        return start_server(**common | settings)

    return starter


@pytest.fixture(scope="module")
def patient(start: Callable[..., Any]) -> Iterator[Any]:
    """A server that waits for a minute for whatever a client has to send."""
    running = start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def roomy(start: Callable[..., Any]) -> Iterator[Any]:
    """A server with room for as many calls as a test can make."""
    running = start(max_connections=1000)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def hasty(start: Callable[..., Any]) -> Iterator[Any]:
    """A server that waits for a moment only."""
    running = start(header_timeout=0.3, body_timeout=0.3, write_timeout=0.3, keep_alive_timeout=1)
    yield running
    running.stop()


def assert_answers(server: Any) -> None:
    """Both ports answer new clients."""
    with httpx.Client(base_url=server.url, timeout=20) as http:
        assert http.get("/health").status_code == 200
    client = Client(server.server.rpc.port)
    try:
        assert client.call("ServerLive", timeout=20).live
    finally:
        client.channel.close()


def refusal_of_live(server: Any) -> Any:
    client = Client(server.server.rpc.port)
    try:
        client.call("ServerLive", timeout=20)
    except grpc.RpcError as error:
        return error.code(), error.details()
    finally:
        client.channel.close()
    return None


def connect(server: Any, window: int | None = None) -> RawClient:
    return RawClient(server.server.rpc.port, window=window)


def silent(server: Any) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server.rpc.port), timeout=20)


def num_open(server: Any) -> int:
    with httpx.Client(base_url=server.url, headers=dict(METADATA)) as http:
        lines = http.get("/metrics").text.splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith("maskdial_connections "))
    return int(float(value)) - 1  # without the one that asks


FLOODS: dict[str, Callable[[Any], Any]] = {
    "silent": silent,
    "settings only": connect,
    "half of the headers": lambda server: begun(server, flags=0),
    "half of a frame": lambda server: sent(connect(server), b"\x00\x10\x00\x00"),
    "refused for their keys": lambda server: refused(server),
}


def begun(server: Any, flags: int = 4, key: str | None = KEY) -> RawClient:
    client = connect(server)
    client.begin(1, call_headers("ModelInfer", key=key), flags)
    return client


def refused(server: Any) -> RawClient:
    client = begun(server, key=None)
    client.status(1)
    return client


def sent(client: RawClient, content: bytes) -> RawClient:
    client.send(content)
    return client


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_floods_of_connections_that_do_nothing_keep_nobody_out(patient: Any, flood: Any) -> None:
    """HTTP's connections and gRPC's have one limit together, and the idlest make room."""
    held = []
    for number in range(3 * MAX):
        with contextlib.suppress(OSError):  # some were closed already to make room
            held.append(flood(patient))
        if number % MAX == MAX - 1:
            assert_answers(patient)
    assert num_open(patient) <= MAX
    for client in held:
        client.close()
    wait_for(lambda: num_open(patient) == 0)


def test_calls_that_send_no_message_make_room(patient: Any) -> None:
    """Beyond the limit of calls, one of those takes the place that sent nothing for a second."""
    client = connect(patient)
    for number in range(MAX):
        client.begin(2 * number + 1, call_headers("ModelStreamInfer"))
    deadline = time.monotonic() + 20
    while (refusal := refusal_of_live(patient)) is not None:
        assert refusal == (grpc.StatusCode.UNAVAILABLE, "too many calls; try again later")
        assert time.monotonic() < deadline
        time.sleep(0.1)
    code, words = client.status(1)
    assert (code, words) == ("14", "another call needed the place of this one, which sent nothing")
    client.close()


def test_a_connection_has_so_many_calls(roomy: Any) -> None:
    client = connect(roomy)
    for number in range(101):
        client.begin(2 * number + 1, call_headers("ModelStreamInfer"))
    refused = {}
    for each in client.frames():
        if each.kind == Kind.RST_STREAM:
            refused[each.stream_id] = each.number()
            if each.stream_id == 201:
                break
    assert refused[201] == Code.REFUSED_STREAM
    client.close()


def test_keys_are_asked_for_before_a_message_is_taken(patient: Any) -> None:
    client = begun(patient, key=None)
    code, words = client.status(1)
    assert code == "16"
    assert words.startswith("the key is missing; send it as")
    client.begin(3, call_headers("Nothing", key="no"))
    assert client.status(3)[0] == "16"
    client.begin(5, call_headers("Nothing"))
    assert client.status(5) == ("12", f"there is no method /{SERVICE}/Nothing")
    # What is still on its way is dropped, and does not end the connection.
    client.send(frame(Kind.DATA, 1, bytes(10_000)))
    client.call(7, "ServerLive")
    assert client.status(7) == ("0", "")
    client.close()


def test_half_a_message_is_given_up_in_time(hasty: Any) -> None:
    infer = packed_message(bytes(1_000_000))
    client = begun(hasty)
    client.send(frame(Kind.DATA, 1, infer[:10_000]))
    assert client.status(1) == ("4", "no message has arrived within 0.3 seconds (--body-timeout)")
    wait_for(lambda: num_open(hasty) == 0)
    client.close()


def test_a_stream_is_given_up_between_its_messages(hasty: Any) -> None:
    client = begun(hasty)
    client.begin(3, call_headers("ModelStreamInfer"))
    infer = request("sentiment", "good").SerializeToString()
    client.send(frame(Kind.DATA, 3, packed_message(infer)))
    assert client.status(3)[0] == "4"
    client.close()


@pytest.mark.parametrize("flood", ["silent", "settings only", "half of the headers"])
def test_idle_connections_are_closed(hasty: Any, flood: str) -> None:
    client = FLOODS[flood](hasty)
    wait_for(lambda: num_open(hasty) == 0)
    client.close()


def test_a_reply_that_nobody_reads_is_dropped(hasty: Any) -> None:
    """With a window of nothing, and with one that is widened by a byte at a time."""
    for widened in (False, True):
        client = connect(hasty, window=0)
        client.call(1, "ModelInfer", packed_message(request("sentiment", "a").SerializeToString()))
        if widened:
            for _ in range(5):
                client.send(number_frame(Kind.WINDOW_UPDATE, 1, 1))
        assert client.status(1) == ("RST", str(int(Code.CANCEL)))
        client.call(3, "ModelMetadata", b"\x00" + bytes(4))
        client.close()


def test_large_messages_come_through_small_windows(start: Callable[..., Any]) -> None:
    running = start(max_body_bytes=1_000_000)
    texts = ["a " * 100_000] * 4
    client = Client(running.server.rpc.port)
    found = client.call("ModelInfer", request("sentiment", *texts, truncate=True))
    assert list(found.outputs[0].shape) == [4, 2]
    client.channel.close()
    running.stop()


@pytest.mark.parametrize(
    "path",
    [b"/s/\xff\xfe", b"", b"*", b"/" * 3000, b"/inference.GRPCInferenceService/\xe2\x82", b"\x00"],
)
def test_no_path_ends_the_port(patient: Any, path: bytes) -> None:
    """grpcio's own server ends for good with one that is not UTF-8."""
    client = connect(patient)
    headers = dict(call_headers("ServerLive")) | {b":path": path}
    client.begin(1, list(headers.items()))
    assert client.status(1)[0] == "12"
    assert_answers(patient)
    client.close()


@pytest.mark.parametrize("key", [None, KEY])
def test_rapid_reset_harms_nobody_else(patient: Any, roomy: Any, key: str | None) -> None:
    """Calls that are cancelled as soon as they have begun, on many connections."""
    running = patient if key is None else roomy
    ends = threading.Event()
    calm = []

    def reset() -> None:
        while not ends.is_set():
            client = connect(running)
            with contextlib.suppress(OSError):
                for number in range(0, 5000, 50):
                    block = b""
                    for each in range(number, number + 50):
                        stream = 2 * each + 1
                        client.begin(stream, call_headers("ModelInfer", key=key))
                        block += number_frame(Kind.RST_STREAM, stream, Code.CANCEL)
                    client.send(block)
            with contextlib.suppress(OSError):
                calm.append(client.goaway())
            client.close()

    threads = [threading.Thread(target=reset) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: len(calm) > 3)
        for _ in range(10):
            assert_answers(running)
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    assert set(calm) <= {Code.ENHANCE_YOUR_CALM, -1}
    assert Code.ENHANCE_YOUR_CALM in calm
    wait_for(lambda: num_open(running) == 0)


IDLE_FRAMES = {
    "pings": frame(Kind.PING, 0, bytes(8)),
    "settings": frame(Kind.SETTINGS, 0),
    "priorities": frame(Kind.PRIORITY, 1, bytes(5)),
    "windows": number_frame(Kind.WINDOW_UPDATE, 0, 1),
    "empty data": frame(Kind.DATA, 1),
    "small data": frame(Kind.DATA, 1, b"\x00"),
    "unknown": frame(99, 0),
}


@pytest.mark.parametrize("content", IDLE_FRAMES.values(), ids=IDLE_FRAMES)
def test_frames_that_move_nothing_are_counted(patient: Any, content: bytes) -> None:
    client = begun(patient)
    with contextlib.suppress(OSError):
        client.send(content * 5000)
    assert client.goaway() in (Code.ENHANCE_YOUR_CALM, -1)  # -1: the rest met a closed socket
    client.close()
    assert_answers(patient)


WRONG = {
    "HTTP/1.1": b"GET / HTTP/1.1\r\n\r\n",
    "a large frame": b"\x00\x40\x01\x00\x00\x00\x00\x00\x01",
    "data of no stream": frame(Kind.DATA, 1, b"x"),
    "data of the connection": frame(Kind.DATA, 0, b"x"),
    "an even stream": frame(Kind.HEADERS, 2, b"\x82", 5),
    "the end of no headers": frame(Kind.CONTINUATION, 1, b"\x82", 4),
    "headers interrupted": frame(Kind.HEADERS, 1, b"\x82", 0) + frame(Kind.PING, 0, bytes(8)),
    "a push": frame(Kind.PUSH_PROMISE, 1, bytes(8), 4),
    "a window of nothing": number_frame(Kind.WINDOW_UPDATE, 0, 0),
    "a window too large": number_frame(Kind.WINDOW_UPDATE, 0, 2**31 - 1),
    "a first window too large": frame(Kind.SETTINGS, 0, b"\x00\x04\xff\xff\xff\xff"),
    "a part of settings": frame(Kind.SETTINGS, 0, b"\x00\x04\xff"),
    "settings of a stream": frame(Kind.SETTINGS, 1),
    "a short ping": frame(Kind.PING, 0, b"x"),
    "a long reset": frame(Kind.RST_STREAM, 1, bytes(5)),
    "no index": frame(Kind.HEADERS, 1, b"\xff\xff\xff\xff\x0f", 5),
    "padding beyond the frame": frame(Kind.HEADERS, 1, b"\xff\x82", 5 | 8),
    "large headers": frame(Kind.HEADERS, 1, b"\x00\x01a\x7f\x81\x7f" + bytes(16_000), 4)
    + frame(Kind.CONTINUATION, 1, bytes(1000), 4),
    "a large table": frame(Kind.HEADERS, 1, b"\x00\x01a\x7f\xe1\x1e" + bytes(4064), 0)
    + frame(Kind.CONTINUATION, 1, b"\x40\x01a\x7f\xd0\x1e" + bytes(4000) + b"\xbe" * 30, 4),
}


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG)
def test_what_is_not_http2_ends_its_connection(patient: Any, content: bytes) -> None:
    client = connect(patient)
    if content.startswith(b"GET"):
        client.close()
        client.socket = silent(patient)
    client.send(content)
    assert client.goaway() > 0
    client.close()
    assert_answers(patient)


def test_more_data_than_allowed_ends_the_connection(patient: Any) -> None:
    client = begun(patient, key=None)
    assert client.status(1)[0] == "16"
    client.begin(3, call_headers("ModelInfer"))
    client.send(frame(Kind.DATA, 3, b"\x00\x00\x0f\x00\x00" + bytes(10_000)))
    with contextlib.suppress(OSError):
        for _ in range(8 * FIRST_WINDOW // 10_000 + 200):
            client.send(frame(Kind.DATA, 3, bytes(10_000)))
    assert client.goaway() in (Code.FLOW_CONTROL_ERROR, -1)
    client.close()
    assert_answers(patient)


def test_compressed_messages_and_other_requests_are_refused(patient: Any) -> None:
    client = connect(patient)
    client.call(1, "ServerLive", b"\x01" + packed_message(b"")[1:])
    assert client.status(1) == ("12", "messages must not be compressed")
    client.call(3, "ModelInfer", packed_message(b"\xff\xff"))
    assert client.status(3)[0] == "3"
    client.begin(5, call_headers("ServerLive"), 5)
    assert client.status(5) == ("3", "the call has no message")
    client.call(7, "ServerLive", b"\x00\x00\x00\x00\x09x")
    assert client.status(7) == ("3", "the call ends within a message")
    headers = dict(call_headers("ServerLive")) | {b"content-type": b"application/json"}
    client.begin(9, list(headers.items()), 5)
    assert client.status(9) == ("415", "")
    client.begin(11, call_headers("ModelInfer"))
    client.send(frame(Kind.DATA, 11, b"\x00\xff\xff\xff\xff"))
    code, words = client.status(11)
    assert code == "8"
    assert words.startswith("the message has 4,294,967,295 bytes; this server accepts at most")
    client.close()


def test_a_fifo_as_certificate_changes_nothing(start: Callable[..., Any], tmp_path: Any) -> None:
    """The files are read again while the server runs; neither port may wait for them."""
    import os
    import shutil

    from tests.http.process import TLS

    certificate, key = tmp_path / "a.crt", tmp_path / "a.key"
    shutil.copy(TLS / "first.crt", certificate)
    shutil.copy(TLS / "first.key", key)
    running = start(ssl_certfile=certificate, ssl_keyfile=key, header_timeout=20)
    context = ssl.create_default_context(cafile=TLS / "first.crt")
    context.set_alpn_protocols(["h2"])
    try:
        for file in (certificate, key):
            file.unlink()
            os.mkfifo(file)
            running.server._loop.call_soon_threadsafe(running.server.reload)
            for _ in range(3):
                client = RawClient(running.server.rpc.port, context)
                client.call(1, "ServerLive")
                assert client.status(1) == ("0", "")
                client.close()
    finally:
        running.stop()
