"""The doors of a server, and its routes, each with the kind that says what it must hold.

A new listener needs a `Door`, a new route a place in `ROUTES`: `test_doors.py` fails for those that
are in no table, and tries every requirement on the others.
"""

import contextlib
import socket
from collections.abc import Mapping
from typing import Any, Protocol

from tests.http.raw_http2 import KEY, Kind, RawClient, call_headers, frame, packed_message
from tests.http.test_grpc import request

LISTENERS = {"port": "http", "uds": "http", "grpc_port": "grpc"}
"""The settings that open a door, and which one."""

ROUTES: Mapping[str, tuple[str, ...]] = {
    # For people and orchestrators: GET, without a key
    "open": ("/", "/docs", "/health", "/health/live", "/health/ready", "/ping"),
    "page": ("/page", "/page/swagger"),
    # GET, with a key of its own or none
    "metrics": ("/metrics",),
    # GET
    "read": (
        *("/openapi.json", "/models", "/info", "/tokenizer_info", "/version", "/props", "/slots"),
        *("/api/v0/models", "/api/v0/models/{name:path}"),
        *("/v1/models", "/v1/models/{name:path}", "/v1/responses/{id}"),
        *("/v1/files", "/v1/files/{id}", "/v1/files/{id}/content"),
        *("/v1/messages/batches", "/v1/messages/batches/{id}", "/v1/messages/batches/{id}/results"),
        *("/v1/batches", "/v1/batches/{id}", "/api/version", "/api/tags", "/api/ps"),
        *("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/stats"),
        *("/v2/models/{name:path}", "/v2/models/{name:path}/ready"),
        *("/v2/models/{name:path}/config", "/v2/models/{name:path}/stats"),
        *("/v2/models/{name:path}/versions/{version}",),
        *("/v2/models/{name:path}/versions/{version}/ready",),
        *("/v2/models/{name:path}/versions/{version}/config",),
        *("/v2/models/{name:path}/versions/{version}/stats",),
    ),
    # DELETE
    "delete": (
        *("/v1/responses/{id}", "/v1/files/{id}", "/v1/messages/batches/{id}", "/api/delete"),
    ),
    # POST, with a body of JSON
    "task": (
        *("/fill-mask", "/classify", "/token-classify", "/redact", "/extract"),
        *("/question-answering", "/zero-shot-classify", "/rerank", "/similarity", "/score"),
        *("/embed", "/embed-sparse", "/embed_sparse", "/embed-all", "/embed_all"),
        *("/embed-chunks", "/embed-hybrid", "/generate", "/generate_stream", "/infill"),
        *("/summarize", "/translate", "/tokenize", "/detokenize", "/predict", "/decode"),
        *("/embeddings", "/vertex", "/invocations", "/", "/models/{name:path}"),
        *("/v1/completions", "/v1/chat/completions", "/models/{name:path}/v1/chat/completions"),
        *("/chat/completions", "/completion", "/apply-template", "/v1/fim/completions"),
        *("/v1/responses", "/v1/responses/compact", "/v1/responses/{id}/cancel"),
        *("/v1/embeddings", "/v1/rerank"),
        *("/v1/score", "/pooling", "/v1/moderations", "/v2/rerank", "/v2/embed", "/v1/embed"),
        *("/v2/chat", "/v1/decisions", "/v1/systemone"),
        *("/v1/messages", "/v1/messages/count_tokens", "/v1/batches"),
        *("/v1/messages/batches",),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show"),
        *("/api/pull",),
        *("/v2/models/{name:path}/infer", "/v2/models/{name:path}/versions/{version}/infer"),
        *("/v2/models/{name:path}/generate", "/v2/models/{name:path}/generate_stream"),
        *("/v1/models/{name:path}:predict", "/v2/repository/index"),
    ),
    # POST, whose bodies nobody reads
    "bodiless": (
        *("/v1/messages/batches/{id}/cancel",),
        *("/v1/batches/{id}/cancel", "/api/push", "/api/create", "/api/copy"),
        *("/api/blobs/{digest}",),
    ),
    # POST, with the admin key
    "admin": (
        *("/models/load", "/models/unload", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/v1/prefill",),
        *("/v2/repository/models/{name:path}/load", "/v2/repository/models/{name:path}/unload"),
    ),
    # POST, with a file
    "form": ("/v1/files",),
}
METHODS = {"delete": "DELETE"} | dict.fromkeys(("task", "bodiless", "admin", "form"), "POST")
"""Those of the kinds; of others, GET."""


class Door(Protocol):
    """What strangers and clients do at a listener. Verdicts are statuses of HTTP."""

    def silent(self) -> socket.socket:
        """A connection that sends nothing."""

    def ask(self) -> int:
        """The verdict on a good request."""

    def half_a_message(self) -> Any:
        """A client that has sent the half of one; `verdict` waits for what comes of it."""

    def verdict(self, client: Any) -> int:
        """What the server says to a client."""

    def without_a_key(self) -> int:
        """The verdict on a request without a key, whose message has not been sent."""

    def too_large(self) -> int:
        """The verdict on a message of a gigabyte, which has only been announced."""

    def unread(self) -> Any:
        """A client that takes nothing of a large reply."""


class HttpDoor:
    """The port of HTTP."""

    def __init__(self, server: Any) -> None:
        self._port = int(server.url.rsplit(":", 1)[1])

    def silent(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), timeout=20)

    def ask(self) -> int:
        return self._sent(self._head("POST", "/classify", 18) + b'{"inputs": "good"}')

    def half_a_message(self) -> Any:
        client = self.silent()
        client.sendall(self._head("POST", "/classify", 18) + b'{"inputs"')
        return client

    def verdict(self, client: Any) -> int:
        reply = b""
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(65_536):
                reply += piece
        client.close()
        return int(reply[9:12])

    def without_a_key(self) -> int:
        return self._sent(self._head("POST", "/classify", 18, key=""))

    def too_large(self) -> int:
        return self._sent(self._head("POST", "/classify", 10**9))

    def unread(self) -> Any:
        client = self.silent()
        client.sendall(self._head("GET", "/openapi.json", 0, closes=False) * 16)
        return client

    def _sent(self, content: bytes) -> int:
        client = self.silent()
        client.sendall(content)
        return self.verdict(client)

    def _head(
        self, method: str, path: str, length: int, key: str = KEY, *, closes: bool = True
    ) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "host: x", f"x-api-key: {key}"]
        lines += [f"content-length: {length}"] * (method == "POST")
        lines += ["connection: close"] * closes
        return "\r\n".join([*lines, "", ""]).encode()


class RpcDoor:
    """The port for gRPC."""

    STATUSES: Mapping[str, int] = {"0": 200, "4": 408, "8": 413, "14": 503, "16": 401}

    def __init__(self, server: Any) -> None:
        self._port = server.server.rpc.port

    def silent(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), timeout=20)

    def ask(self) -> int:
        client = RawClient(self._port)
        infer = request("sentiment", "good").SerializeToString()
        client.call(1, "ModelInfer", packed_message(infer))
        return self.verdict(client)

    def half_a_message(self) -> Any:
        client = self._begun()
        client.send(frame(Kind.DATA, 1, packed_message(bytes(1000))[:500]))
        return client

    def verdict(self, client: Any) -> int:
        code, words = client.status(1)
        client.close()
        return 429 if "--max-requests-per-client" in words else self.STATUSES.get(code, 500)

    def without_a_key(self) -> int:
        return self.verdict(self._begun(key=None))

    def too_large(self) -> int:
        client = self._begun()
        client.send(frame(Kind.DATA, 1, b"\0" + (10**9).to_bytes(4, "big")))
        return self.verdict(client)

    def unread(self) -> Any:
        client = RawClient(self._port, window=0)
        client.call(1, "ServerMetadata")
        return client

    def _begun(self, key: str | None = KEY) -> RawClient:
        client = RawClient(self._port)
        client.begin(1, call_headers("ModelInfer", key=key))
        return client


DOORS: Mapping[str, type[Any]] = {"http": HttpDoor, "grpc": RpcDoor}
