"""A scripted application behind the server's connections, plain or under TLS."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from maskdial.http.connection import Connection
from maskdial.http.connections import ConnectionLimits, Connections
from maskdial.http.handshake import Handshake
from maskdial.metrics import Metrics

TLS = Path(__file__).parents[1] / "data" / "tls"

LIMITS: dict[str, Any] = {
    "max_connections": 4,
    "max_header_bytes": 4096,
    "max_unsent_bytes": 60_000_000,
    "header_timeout": 0.2,
    "body_timeout": 0.2,
    "write_timeout": 0.3,
}
GET = b"GET /echo HTTP/1.1\r\nhost: x\r\n"


class Scripted:
    """An application that says what came, waits, or sends without end."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.num_waiting = 0
        self.began: list[str] = []
        self.ended: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        request = Request(scope, receive)
        path = scope["path"]
        self.began.append(path)
        if path == "/wait":
            self.num_waiting += 1
            while not self.release.is_set():  # noqa: ASYNC110 - the test is another thread
                await asyncio.sleep(0.01)
        elif path.startswith("/size/"):
            await Response(b"x" * int(path.removeprefix("/size/")))(scope, receive, send)
            return
        elif path == "/endless":
            await StreamingResponse(self._endless())(scope, receive, send)
            return
        elif path == "/big":
            await Response(b"x" * 40_000_000)(scope, receive, send)
            return
        names = ",".join(name for name in scope["headers"] and request.headers)
        body = b"" if path == "/unread" else await request.body()
        await Response(f"{len(body)} {names}")(scope, receive, send)

    async def _endless(self) -> Any:
        try:
            while True:
                yield b"x" * 65536
                await asyncio.sleep(0)
        finally:
            self.ended.append("endless")


class Server:
    """The application behind connections with these limits, in a thread."""

    def __init__(self, *, tls: bool = False, **limits: Any) -> None:
        self.app = Scripted()
        self._clients: list[socket.socket] = []
        self.metrics = Metrics()
        self.connections = Connections(ConnectionLimits(**LIMITS | limits), self.metrics)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if tls else None
        if self._context is not None:
            self._context.load_cert_chain(TLS / "first.crt", TLS / "first.key")
        accept: Any = self._accept
        self._server = uvicorn.Server(
            uvicorn.Config(
                self.app,
                port=0,
                http=accept,
                ws="none",
                lifespan="off",
                log_config=None,
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def _accept(self, **arguments: Any) -> asyncio.Protocol:
        connection = partial(Connection, self.connections, **arguments)
        if self._context is None:
            return connection()
        siblings = self._server.server_state.connections
        return Handshake(self.connections, self._context, connection, siblings)

    def connect_raw(self) -> socket.socket:
        """A connection without its handshake."""
        client = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        self._clients.append(client)
        return client

    def connect(self, first: bytes = b"") -> socket.socket:
        client = self.connect_raw()
        if self._context is not None:
            client = ssl.create_default_context(cafile=TLS / "first.crt").wrap_socket(
                client, server_hostname="localhost"
            )
            self._clients.append(client)
        client.sendall(first)
        return client

    def num_open(self) -> float:
        return self.metrics.registry.get_sample_value("maskdial_connections") or 0.0

    def ended(self, why: str) -> float:
        name = "maskdial_connections_ended_total"
        return self.metrics.registry.get_sample_value(name, {"reason": why}) or 0.0

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        self.app.release.set()
        self._server.should_exit = True
        self._thread.join(20)


def read_all(client: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    content = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(1 << 20):
            content += piece
    client.close()
    return content


def post(path: str = "/echo") -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nok" % path.encode()


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
