"""Every door and every route has the limits of the others (`tests/http/doors.py` has the tables).

Lines of batches enter by no door: they are requests within the server, with the guard's limits, and
`test_batch_api.py` has what else holds for them. Nor do upgrades: there are no websockets.
"""

import contextlib
import json
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.routing import Mount

from maskdial.app import create_app
from maskdial.config import Config
from maskdial.http.guard import Guard
from maskdial.http.keys import key_name
from maskdial.http.lifecycle import Phase
from maskdial.http.route import TaskRoute
from maskdial.registry.catalog import STARTER_FOLDER
from tests.http.doors import DOORS, LISTENERS, METHODS, ROUTES, Door
from tests.http.raw_http2 import KEY
from tests.servers import wait_for

ADMIN = "root-key"
MAX = 12
BODIES = [(kind, path) for kind in ("task", "admin", "form") for path in ROUTES[kind]]
POSTS = [*BODIES, *(("bodiless", path) for path in ROUTES["bodiless"])]
KEYED = [*POSTS, *((kind, path) for kind in ("read", "delete") for path in ROUTES[kind])]


@pytest.fixture(scope="module")
def server(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """With every route, and little patience."""
    folder = tmp_path_factory.mktemp("doors")
    running = start_server(
        models={"sentiment": STARTER_FOLDER / "sentiment"},
        api_keys=[KEY],
        admin_key=ADMIN,
        metrics_key="metrics-key",
        grpc_port=0,
        batch_dir=folder / "batches",
        responses_store=folder / "responses",
        max_connections=MAX,
        max_requests_per_client=3,
        header_timeout=0.5,
        body_timeout=0.5,
        write_timeout=0.5,
        keep_alive_timeout=1,
    )
    yield running
    running.stop()


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest, server: Any) -> Door:
    found: Door = DOORS[request.param](server)
    return found


def context(server: Any) -> Any:
    return server.server.config.app.state.context


def num_open(server: Any) -> float:
    registry = context(server).metrics.registry
    return registry.get_sample_value("maskdial_connections") or 0.0


def test_every_listener_is_in_the_table() -> None:
    settings = {name for name in Config.model_fields if re.search(r"(^|_)(port|uds|socket)$", name)}
    assert settings == LISTENERS.keys()
    assert set(LISTENERS.values()) == DOORS.keys()


def test_every_route_is_in_the_table() -> None:
    """At the place that its method, its body and its key give it."""
    found = set()
    for route in create_app(Config()).routes:
        if isinstance(route, Mount):
            found.add(("page", route.path))
            continue
        path = route.path  # type: ignore[attr-defined]
        for method in route.methods - {"HEAD"}:  # type: ignore[attr-defined]
            kinds = [kind for kind, paths in ROUTES.items() if path in paths]
            fitting = [kind for kind in kinds if METHODS.get(kind, "GET") == method]
            if isinstance(route, TaskRoute) and "bodiless" not in fitting:
                fitting = ["form" if route.takes_file else "admin" if route.admin else "task"]
            found.add((fitting[0] if fitting else f"missing: {method}", path))
    assert found == {(kind, path) for kind, paths in ROUTES.items() for path in paths}


def test_idle_connections_make_room(door: Door, server: Any) -> None:
    held = []
    for number in range(3 * MAX):
        with contextlib.suppress(OSError):
            held.append(door.silent())
        if number % MAX == 0:
            assert door.ask() == 200
    assert num_open(server) <= MAX
    for client in held:
        client.close()


def test_what_comes_first_has_its_time(door: Door, server: Any) -> None:
    wait_for(lambda: num_open(server) == 0)
    with door.silent() as client:
        assert door.ask() == 200
        with contextlib.suppress(ConnectionError):
            while client.recv(1000):  # gRPC's settings, and the end
                pass
    wait_for(lambda: num_open(server) == 0)


def test_a_message_has_its_time(door: Door) -> None:
    assert door.verdict(door.half_a_message()) == 408


def test_the_key_comes_before_the_message(door: Door) -> None:
    assert door.without_a_key() == 401


def test_the_size_is_refused_before_the_message(door: Door) -> None:
    assert door.too_large() == 413


def test_a_client_has_so_many_requests(door: Door, server: Any) -> None:
    guard = server.server.config.app.middleware_stack
    while not isinstance(guard, Guard):
        guard = getattr(guard, "app", None) or guard._app
    limits = guard._limits
    limits._open[key_name(KEY)] += 3
    try:
        assert door.ask() == 429
    finally:
        limits._open[key_name(KEY)] -= 3
    assert door.ask() == 200


def test_a_reply_that_nobody_reads_is_dropped(door: Door, server: Any) -> None:
    wait_for(lambda: num_open(server) == 0)
    client = door.unread()
    wait_for(lambda: num_open(server) == 1)
    wait_for(lambda: num_open(server) == 0)
    client.close()
    assert door.ask() == 200


def test_the_drain_refuses(door: Door, server: Any) -> None:
    lifecycle = context(server).lifecycle
    lifecycle.phase = Phase.DRAINING
    try:
        assert door.ask() == 503
    finally:
        lifecycle.phase = Phase.SERVING
    assert door.ask() == 200


# Routes of HTTP, to which every call and every line of a batch leads


def target(path: str) -> str:
    """A path with something for its parameters."""
    filled = path.replace("{name:path}", "sentiment").replace("{version}", "1")
    return filled.replace("{id}", "x").replace("{digest}", "sha256:" + "0" * 64)


def key_of(kind: str) -> str:
    return ADMIN if kind == "admin" else KEY


def status(server: Any, kind: str, path: str, content: bytes, length: int, key: str) -> int:
    """The status of a request whose body may not be sent as announced."""
    method = METHODS.get(kind, "GET")
    media = "multipart/form-data; boundary=b" if kind == "form" else "application/json"
    lines = [f"{method} {target(path)} HTTP/1.1", "host: x", "connection: close"]
    lines += [f"x-api-key: {key}"] * bool(key)
    lines += [f"content-type: {media}", f"content-length: {length}"] * (length > 0)
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode() + content)
        reply = b""
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(65_536):
                reply += piece
    return int(reply[9:12])


@pytest.mark.parametrize(("kind", "path"), KEYED)
def test_each_route_asks_for_a_key_before_its_body(server: Any, kind: str, path: str) -> None:
    length = 18 if kind in METHODS else 0
    assert status(server, kind, path, b"", length, "") == 401
    if kind == "admin":
        assert status(server, kind, path, b"", 2, KEY) == 401


def test_open_routes_ask_for_none(server: Any) -> None:
    for path in ROUTES["open"]:
        assert status(server, "open", path, b"", 0, "") == 200, path
    assert status(server, "metrics", "/metrics", b"", 0, KEY) == 401


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "path"), BODIES)
def test_each_body_has_a_size_and_a_time(server: Any, kind: str, path: str) -> None:
    key = key_of(kind)
    assert status(server, kind, path, b"", 10**12, key) == 413
    beginning = b"--b\r\nContent-" if kind == "form" else b'{"a'
    assert status(server, kind, path, beginning, 1000, key) == 408


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "path"), POSTS)
def test_each_body_may_be_anything(server: Any, kind: str, path: str) -> None:
    """Large names are not repeated, and nothing is a failure of the server."""
    form = "multipart/form-data; boundary=b"
    headers = {"x-api-key": key_of(kind)}
    headers["content-type"] = form if kind == "form" else "application/json"
    name = "n" * 60_000
    bodies: list[bytes] = [
        *(b"", b"null", b"[]", b"\xff\xfe", b'{"a":', b"[" * 100_000, b"[[" + b"[],[" * 40_000),
        *(
            json.dumps(each).encode()
            for each in ({name: 1}, {"model": name}, {"inputs": {name: 1}})
        ),
        b"--b\r\nContent-Disposition: form-data; name=%s\r\n\r\n1\r\n" % name.encode() * 20,
        b"--b\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n" * 1000,
    ]
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as http:
        for body in bodies:
            reply = http.post(target(path), content=body)
            assert reply.status_code < 500 or reply.status_code == 501, (body[:50], reply.text)
            assert len(reply.content) < 4000, body[:50]


@pytest.mark.parametrize(("kind", "path"), POSTS)
def test_each_route_is_closed_during_the_drain(server: Any, kind: str, path: str) -> None:
    lifecycle = context(server).lifecycle
    lifecycle.phase = Phase.DRAINING
    try:
        assert status(server, kind, path, b"{}", 2, key_of(kind)) == 503
    finally:
        lifecycle.phase = Phase.SERVING
