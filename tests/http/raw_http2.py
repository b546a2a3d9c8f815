"""HTTP/2 as no client library would send it: frames by hand, over a socket."""

import socket
import ssl
from collections.abc import Iterable, Iterator
from typing import Any

from maskdial.rpc.frames import PREFACE, Frame, FrameReader, Kind, frame
from maskdial.rpc.hpack import Decoder, Header, encode
from maskdial.rpc.messages import SERVICE, message

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
        self._decoder = Decoder(100_000)

    def send(self, content: bytes) -> None:
        """Bytes as they are."""
        self.socket.sendall(content)

    def begin(self, stream_id: int, headers: Iterable[Header], flags: int = HEADERS_ONLY) -> None:
        """Headers of a call."""
        self.send(frame(Kind.HEADERS, stream_id, encode(headers), flags))

    def call(self, stream_id: int, method: str, content: bytes = b"", **options: Any) -> None:
        """A whole call with one message."""
        self.begin(stream_id, call_headers(method, **options))
        self.send(frame(Kind.DATA, stream_id, content or live(), 1))

    def frames(self) -> Iterator[Frame]:
        """What the server sends until it closes the connection."""
        reader = FrameReader()
        list(reader.feed(PREFACE))
        while True:
            try:
                data = self.socket.recv(65_536)
            except ConnectionError:
                return
            if not data:
                return
            yield from reader.feed(data)

    def status(self, stream_id: int) -> tuple[str, str]:
        """The status and sentence of a call; "RST" and a code if it was reset, "" at the end."""
        for each in self.frames():
            if each.kind == Kind.RST_STREAM and each.stream_id == stream_id:
                return "RST", str(each.number())
            if each.kind != Kind.HEADERS:
                continue
            headers = dict(self._decoder.decode(each.payload))
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
