"""The guard: one routing table, whatever the prefix; dependencies and dialects' errors count."""

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from fastapi import Depends, FastAPI, HTTPException, Request, Response

from maskdial.config import Config
from maskdial.errors import MaskdialError, NotFoundError, OverloadedError
from maskdial.http.guard import Guard, TaskRoute
from maskdial.http.keys import Keys
from maskdial.http.lifecycle import Lifecycle
from maskdial.http.replies import json_reply
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


def only_alice(request: Request) -> None:
    if request.headers.get("authorization") != "Bearer alice":
        raise HTTPException(401, "alice only", {"www-authenticate": "Bearer"})


def busy() -> None:
    raise OverloadedError("come back later")


def shout(error: MaskdialError) -> Response:
    return json_reply({"message": error.message.upper()}, status=400)


ROUTES = [
    TaskRoute("/echo", echo),
    TaskRoute("/fail", fail),
    TaskRoute("/break", break_down),
    TaskRoute("/shout", fail, error_reply=shout),
    TaskRoute("/models/{name}", echo),
    TaskRoute("/private", echo, dependencies=[Depends(only_alice)]),
    TaskRoute("/busy", echo, dependencies=[Depends(busy)]),
]


class Server:
    """The guard before an application of a few routes, without a socket."""

    def __init__(self, root_path: str, **settings: Any) -> None:
        self.lifecycle = Lifecycle()
        self.metrics = Metrics([route.path for route in ROUTES])
        config = Config(max_body_bytes=MAX_BODY_BYTES, **settings)
        app = FastAPI(redirect_slashes=False)
        app.router.routes.extend(ROUTES)
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


@pytest.mark.parametrize("path", ["/echo", "/private"])
def test_who_leaves_while_sending_is_no_failure_of_ours(
    server: Server, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.leave_while_sending(path)
    assert server.count(path, "cancelled") == 1
    assert not [record for record in caplog.records if record.levelno > logging.DEBUG]


def test_large_bodies_are_refused(server: Server) -> None:
    reply = server.request("/echo", content=b"x" * (MAX_BODY_BYTES + 1))
    assert (reply.status_code, reply.headers["connection"]) == (413, "close")
    assert server.count("/echo", "too_large") == 1


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


def test_dependencies_are_resolved(server: Server) -> None:
    """Authentication, say: it must not be skipped because the guard is faster without it."""
    refused = server.request("/private", content=b"{}")
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert server.count("/private", "validation") == 1
    taken = server.request("/private", content=b"{}", headers={"authorization": "Bearer alice"})
    assert (taken.status_code, taken.json()["bytes"]) == (200, 2)
    assert server.count("/private", "ok") == 1
    large = json.dumps("x" * MAX_BODY_BYTES).encode()
    headers = {"authorization": "Bearer alice"}
    assert server.request("/private", content=large, headers=headers).status_code == 413
    assert server.request("/busy", content=b"{}").status_code == 429
    assert server.count("/busy", "overloaded") == 1
