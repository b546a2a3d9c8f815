"""The guard: one routing table, whatever the prefix; admin routes and dialects' errors count."""

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute

from maskdial.config import Config
from maskdial.dialects import ROUTES as ROUTES_OF_ALL_DIALECTS
from maskdial.errors import MaskdialError, NotFoundError, OverloadedError
from maskdial.http.guard import Guard
from maskdial.http.keys import Keys
from maskdial.http.lifecycle import Lifecycle
from maskdial.http.replies import json_reply
from maskdial.http.route import TaskRoute
from maskdial.metrics import Metrics

MAX_BODY_BYTES = 2000


async def echo(request: Request) -> Response:
    """Says what came."""
    content = await request.body()
    return json_reply({"bytes": len(content), "name": request.path_params.get("name")})


async def fail(_: Request) -> Response:
    raise NotFoundError("nothing here")


async def break_down(_: Request) -> Response:
    raise RuntimeError("scripted")


async def start_a_thread(_: Request) -> Response:
    raise RuntimeError("can't start new thread")


async def allocate(_: Request) -> Response:
    raise MemoryError


async def busy(_: Request) -> Response:
    raise OverloadedError("come back later")


def shout(error: MaskdialError) -> Response:
    return json_reply({"message": error.message.upper()}, status=400)


ROUTES = [
    TaskRoute("/echo", echo),
    TaskRoute("/fail", fail),
    TaskRoute("/break", break_down),
    TaskRoute("/thread", start_a_thread),
    TaskRoute("/memory", allocate),
    TaskRoute("/shout", fail, error_reply=shout),
    TaskRoute("/models/{name}", echo),
    TaskRoute("/private", echo, admin=True),
    TaskRoute("/busy", busy),
]


PAGE = APIRoute("/page", break_down, methods=["GET"])


class Server:
    """The guard before an application of a few routes, without a socket."""

    def __init__(self, root_path: str, **settings: Any) -> None:
        self.lifecycle = Lifecycle()
        self.metrics = Metrics()
        config = Config(max_body_bytes=MAX_BODY_BYTES, **settings)
        app = FastAPI(redirect_slashes=False)
        app.router.routes.extend([*ROUTES, PAGE])
        app.add_middleware(
            Guard,
            routes=app.routes,
            metrics=self.metrics,
            lifecycle=self.lifecycle,
            config=config,
            keys=Keys(config),
        )
        self.lifecycle.serve()
        self._prefix = root_path
        self._transport = httpx.ASGITransport(app, root_path=root_path)

    def request(self, path: str, method: str = "POST", **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            async with httpx.AsyncClient(
                transport=self._transport, base_url="http://test"
            ) as client:
                return await client.request(method, self._prefix + path, **options)

        return asyncio.run(send())

    def leave_while_sending(self, path: str) -> list[str]:
        """A client that closes its connection within its body; returns the types of the replies."""
        parts = iter(
            [
                {"type": "http.request", "body": b"{", "more_body": True},
                {"type": "http.disconnect"},
            ]
        )
        sent: list[str] = []

        async def receive() -> Any:
            return next(parts)

        async def send(message: Any) -> None:
            sent.append(message["type"])

        path = self._prefix + path
        headers = [(b"authorization", b"Bearer alice")]
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path}
        scope |= {"root_path": self._prefix, "query_string": b"", "headers": headers}
        asyncio.run(self._transport.app(scope, receive, send))  # type: ignore[arg-type]
        return sent

    def count(self, route: str, outcome: str) -> float:
        labels = {"route": route, "model": "", "outcome": outcome}
        return self.metrics.registry.get_sample_value("maskdial_requests_total", labels) or 0.0


@pytest.fixture(params=["", "/prefix"])
def server(request: pytest.FixtureRequest) -> Server:
    """Also behind a proxy that serves it below a prefix."""
    return Server(request.param)


def test_a_request_is_named_timed_and_counted(server: Server) -> None:
    reply = server.request("/echo", content=b"12345", headers={"x-request-id": "mine"})
    assert reply.json() == {"bytes": 5, "name": None}
    assert reply.headers["x-request-id"] == "mine"
    assert float(reply.headers["x-total-time"]) > 0
    assert server.count("/echo", "ok") == 1
    assert server.request("/models/a", content=b"").json() == {"bytes": 0, "name": "a"}
    assert server.count("/models/{name}", "ok") == 1


def test_who_leaves_while_sending_is_no_failure_of_ours(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.leave_while_sending("/echo")
    assert server.count("/echo", "cancelled") == 1
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


def test_large_bodies_are_refused(server: Server) -> None:
    reply = server.request("/echo", content=b"x" * (MAX_BODY_BYTES + 1))
    assert (reply.status_code, reply.headers["connection"]) == (413, "close")
    assert server.count("/echo", "too_large") == 1


class Upload:
    """A client that has sent some of its body, as the guard meets it without a port."""

    def __init__(self, server: Server, num_bytes: int, *, first: bytes = b"{") -> None:
        self.sent: list[Any] = []
        self.num_received = 0
        self.is_waiting = asyncio.Event()
        self._server = server
        self._first = first
        self._scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/echo"}
        self._scope |= {"root_path": "", "query_string": b""}
        self._scope["headers"] = [(b"content-length", str(num_bytes).encode())]

    async def run(self) -> None:
        app: Any = self._server._transport.app
        await app(self._scope, self._receive, self._send)

    async def _receive(self) -> Any:
        self.num_received += 1
        if self.num_received > 1:
            self.is_waiting.set()
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": self._first, "more_body": True}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def reply(self) -> tuple[int, dict[str, Any], str]:
        """Status, content, and the header ``connection``."""
        start, *parts = self.sent
        content = b"".join(part["body"] for part in parts)
        assert [part["more_body"] for part in parts] == [True, False]
        headers = dict(start["headers"])
        return start["status"], json.loads(content), headers[b"connection"].decode()


def test_a_body_has_to_arrive_in_time() -> None:
    server = Server("", body_timeout=0.01)
    upload = Upload(server, 10)
    asyncio.run(upload.run())
    status, content, connection = upload.reply
    assert (status, content["error_type"], connection) == (408, "request_timeout", "close")
    assert "0.01 seconds (--body-timeout)" in content["error"]
    assert server.count("/echo", "request_timeout") == 1


def test_a_shutdown_does_not_wait_for_half_a_body() -> None:
    """But for a second: nothing runs for it yet, and another instance can take all of it."""
    server = Server("")
    upload = Upload(server, 10)

    async def scenario() -> int:
        sending = asyncio.create_task(upload.run())
        await upload.is_waiting.wait()
        num_left = await server.lifecycle.drain(3600)
        await sending
        return num_left

    assert asyncio.run(scenario()) == 0
    status, content, connection = upload.reply
    assert (status, content["error_type"], connection) == (503, "unavailable", "close")


def test_the_sender_of_a_large_body_gets_to_read_why_it_is_refused(server: Server) -> None:
    """Some of the rest is read after the reply: closing at once would reset the connection."""
    upload = Upload(server, 10**9, first=b"x" * 20_000_000)
    parts = iter([b"x" * 20_000_000] * 3)

    async def receive() -> Any:
        upload.num_received += 1
        return {"type": "http.request", "body": next(parts), "more_body": True}

    upload._receive = receive  # type: ignore[method-assign]
    asyncio.run(upload.run())
    assert upload.reply[0] == 413
    assert upload.num_received == 2  # of the endless one, 32 MB


def test_head_is_get(server: Server) -> None:
    assert server.request("/nowhere", "HEAD").status_code == 404
    assert server.request("/echo", "HEAD").status_code == 405


def test_draining_refuses_task_routes(server: Server) -> None:
    asyncio.run(server.lifecycle.drain(1))
    reply = server.request("/echo", content=b"{}")
    assert reply.status_code == 503
    assert reply.json()["error_type"] == "unavailable"
    assert server.count("/echo", "unavailable") == 1


@pytest.mark.parametrize("path", ["/models/a/b", "/nowhere", "/models/", "/echo/"])
def test_a_path_of_no_route_is_a_404_that_no_route_counts(server: Server, path: str) -> None:
    reply = server.request(path, content=b"{}")
    assert reply.status_code == 404
    assert "x-request-id" in reply.headers
    assert all(server.count(route.path, "ok") == 0 for route in ROUTES)


def test_another_method_is_a_405(server: Server) -> None:
    assert server.request("/echo", "GET").status_code == 405


def test_errors_are_replies_in_the_dialects_form(server: Server) -> None:
    reply = server.request("/fail", content=b"{}")
    assert reply.status_code == 404
    assert reply.json() == {"error": "nothing here", "error_type": "not_found"}
    assert server.count("/fail", "not_found") == 1
    reply = server.request("/shout", content=b"{}")
    assert (reply.status_code, reply.json()) == (400, {"message": "NOTHING HERE"})


def test_a_bug_is_an_internal_error_and_names_the_request(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    reply = server.request("/break", content=b"{}", headers={"x-request-id": "r-17"})
    assert reply.status_code == 500
    assert reply.json() == {
        "error": "internal error; search the server log for request r-17",
        "error_type": "internal",
    }
    assert server.count("/break", "internal") == 1
    assert "scripted" in caplog.text


@pytest.mark.parametrize(
    ("path", "words"),
    [("/thread", "can start no more threads"), ("/memory", "gets no more memory")],
)
def test_a_request_that_the_system_refuses_threads_or_memory_is_a_503(
    server: Server, caplog: pytest.LogCaptureFixture, path: str, words: str
) -> None:
    reply = server.request(path, content=b"{}", headers={"x-request-id": "r-17"})
    assert reply.status_code == 503
    assert reply.json() == {
        "error": f"the process {words}; try again later",
        "error_type": "unavailable",
    }
    assert server.count(path, "unavailable") == 1
    assert caplog.messages == [f"request r-17 failed: the process {words}"]
    assert "Traceback" not in caplog.text


def test_an_admin_route_asks_for_the_admin_key() -> None:
    server = Server("", admin_key="alice")
    refused = server.request("/private", content=b"{}")
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert server.count("/private", "unauthorized") == 1
    headers = {"authorization": "Bearer alice"}
    taken = server.request("/private", content=b"{}", headers=headers)
    assert (taken.status_code, taken.json()["bytes"]) == (200, 2)
    assert server.count("/private", "ok") == 1
    large = json.dumps("x" * MAX_BODY_BYTES).encode()
    assert server.request("/private", content=large, headers=headers).status_code == 413
    assert Server("").request("/private", content=b"{}").status_code == 403


def test_a_route_with_dependencies_is_refused() -> None:
    """The guard calls endpoints itself: authentication by a dependency would be skipped."""
    with pytest.raises(TypeError, match="resolves no dependencies"):
        TaskRoute("/private", echo, dependencies=[Depends(busy)])


def test_a_route_may_refuse_for_a_while(server: Server) -> None:
    assert server.request("/busy", content=b"{}").status_code == 429
    assert server.count("/busy", "overloaded") == 1


def test_every_route_that_reads_a_body_is_guarded() -> None:
    """The limits of bodies are the guard's; it passes other routes' bodies on as they come."""
    for route in ROUTES_OF_ALL_DIALECTS:
        if "POST" in (getattr(route, "methods", None) or ()):
            assert isinstance(route, TaskRoute), route


@pytest.mark.parametrize(
    ("digits", "status"), [("0" * 5000 + "2", 200), ("9" * 5000, 413), ("1" + "0" * 30, 413)]
)
def test_a_content_length_of_thousands_of_digits(server: Server, digits: str, status: int) -> None:
    """Of another server: our own refuses it as malformed."""
    headers = {"content-length": digits}
    assert server.request("/echo", content=b"ok", headers=headers).status_code == status


def test_a_fault_of_another_route_is_an_internal_error_as_well(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    reply = server.request("/page", "GET")
    assert reply.status_code == 500
    assert reply.json()["error_type"] == "internal"
    assert reply.headers["x-request-id"] in reply.json()["error"]
    assert "scripted" in caplog.text
