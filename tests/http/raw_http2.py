"""HTTP/2 as no client library would send it: frames by hand, over a socket."""

import socket
import ssl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import hpack

from maskdial.rpc.frames import PREFACE, Header
from maskdial.rpc.messages import SERVICE, message


class Kind(IntEnum):
    """The types of frames."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


@dataclass(frozen=True)
class RawFrame:
    """A frame as it is on the wire."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes

    def number(self) -> int:
        """The payload as one number."""
        return int.from_bytes(self.payload, "big")


def frame(kind: int, stream_id: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """A frame on the wire, well formed or not."""
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big")
    return head + payload


def number_frame(kind: int, stream_id: int, number: int) -> bytes:
    """A frame that is one number."""
    return frame(kind, stream_id, number.to_bytes(4, "big"))


ALL = 4 | 1  # the flags END_HEADERS and END_STREAM
HEADERS_ONLY = 4
KEY = "sesame"
GOAWAY, RST_STREAM = Kind.GOAWAY, Kind.RST_STREAM


def call_headers(method: str, *more: Header, key: str | None = KEY) -> list[Header]:
    """Those of a call of the service's method, or of a path."""
    path = method if method.startswith("/") else f"/{SERVICE}/{method}"
    headers = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", path.encode("latin-1")),
        (b":authority", b"local"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    return [*headers, *more]


def packed_message(content: bytes) -> bytes:
    """A message as gRPC frames it."""
    return b"\x00" + len(content).to_bytes(4, "big") + content


def live() -> bytes:
    """The message of the simplest call."""
    return packed_message(message("ServerLiveRequest")().SerializeToString())


class RawClient:
    """A connection to a port for gRPC; its preface and settings are sent."""

    def __init__(
        self, port: int, context: ssl.SSLContext | None = None, window: int | None = None
    ) -> None:
        self.socket: Any = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_hostname="localhost")
        pair = b"" if window is None else b"\x00\x04" + window.to_bytes(4, "big")
        self.send(PREFACE + frame(Kind.SETTINGS, 0, pair))
        self._decoder = hpack.Decoder(100_000)
        self._encoder = hpack.Encoder()

    def send(self, content: bytes) -> None:
        """Bytes as they are."""
        self.socket.sendall(content)

    def begin(self, stream_id: int, headers: Iterable[Header], flags: int = HEADERS_ONLY) -> None:
        """Headers of a call."""
        self.send(frame(Kind.HEADERS, stream_id, self._encoder.encode(headers), flags))

    def call(self, stream_id: int, method: str, content: bytes = b"", **options: Any) -> None:
        """A whole call with one message."""
        self.begin(stream_id, call_headers(method, **options))
        self.send(frame(Kind.DATA, stream_id, content or live(), 1))

    def frames(self) -> Iterator[RawFrame]:
        """What the server sends until it closes the connection."""
        while len(head := self._receive(9)) == 9:
            payload = self._receive(int.from_bytes(head[:3], "big"))
            yield RawFrame(head[3], head[4], int.from_bytes(head[5:], "big"), payload)

    def _receive(self, size: int) -> bytes:
        content = b""
        while len(content) < size:
            try:
                data = self.socket.recv(size - len(content))
            except ConnectionError:
                return b""
            if not data:
                return b""
            content += data
        return content

    def status(self, stream_id: int) -> tuple[str, str]:
        """The status and sentence of a call; "RST" and a code if it was reset, "" at the end."""
        for each in self.frames():
            if each.kind == Kind.RST_STREAM and each.stream_id == stream_id:
                return "RST", str(each.number())
            if each.kind != Kind.HEADERS:
                continue
            headers: dict[bytes, bytes] = dict(self._decoder.decode(each.payload, raw=True))
            if each.stream_id == stream_id and each.flags & 1:
                status = headers.get(b"grpc-status", headers.get(b":status", b""))
                return status.decode(), headers.get(b"grpc-message", b"").decode()
        return "", ""

    def goaway(self) -> int:
        """The code with which the server ends the connection; -1: it gives none."""
        code = -1
        for each in self.frames():
            if each.kind == Kind.GOAWAY:
                code = int.from_bytes(each.payload[4:8], "big")
        return code

    def close(self) -> None:
        """The client leaves."""
        self.socket.close()
