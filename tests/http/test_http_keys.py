"""Keys: without one, only what is meant to be open answers; names are counted, keys never shown."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import BaseRoute

from maskdial.app import create_app
from maskdial.config import Config
from maskdial.errors import ConfigError
from maskdial.http.keys import Keys, _network, address_of, key_name
from maskdial.registry.catalog import STARTER_FOLDER

OPEN = ("/", "/docs", "/health", "/health/live", "/health/ready", "/ping", "/metrics")
SECRET = key_name("secret")
KEYS: dict[str, Any] = {"api_keys": ["key of bob", "key,2"], "admin_key": "root"}
METRICS_KEY: dict[str, Any] = {"metrics_key": "scraper"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("# a comment\n\nalice:one\nalice:two:2\n")
    return file


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any], key_file: Path) -> Iterator[Any]:
    models = {"sentiment": STARTER_FOLDER / "sentiment"}
    running = start_server(models=models, api_key_file=key_file, **KEYS, **METRICS_KEY)
    yield running
    running.stop()


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def leaves(routes: list[BaseRoute], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every method and path of a routing table."""
    for route in routes:
        path = prefix + str(getattr(route, "path", ""))
        yield from leaves(getattr(route, "routes", None) or [], path)
        for method in getattr(route, "methods", None) or {"GET"}:
            yield method, path.replace("{name:path}", "m").replace("{name}", "m")


def test_every_route_asks_for_a_key_unless_it_is_meant_to_be_open() -> None:
    app = create_app(Config(**KEYS))
    found = [
        *leaves(app.routes),
        *((method, "/nowhere") for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS")),
    ]
    assert len(found) > 40

    async def status(client: httpx.AsyncClient, method: str, path: str) -> int:
        return (await client.request(method, path, content=b"{}")).status_code

    async def scenario() -> dict[str, int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return {
                f"{method} {path}": await status(client, method, path) for method, path in found
            }

    for request, status_code in asyncio.run(scenario()).items():
        method, path = request.split()
        is_open = (path in OPEN or path.startswith("/page/")) and method != "POST"
        assert (status_code != 401) == is_open, request


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/classify", {"error_type": "unauthorized"}),
        ("/nowhere", {"error_type": "unauthorized"}),
        ("/v1/chat/completions", {"error": {"code": "invalid_api_key"}}),
        ("/v1/nowhere", {"error": {"type": "invalid_request_error"}}),
        ("/v1/messages", {"type": "error", "error": {"type": "authentication_error"}}),
    ],
)
def test_a_401_has_the_form_of_the_routes_dialect(
    http: httpx.Client, path: str, content: dict[str, Any]
) -> None:
    for headers, word in ({}, "missing"), (bearer("wrong"), "wrong"):
        reply = http.post(path, json={}, headers=headers)
        assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
        body = reply.json()
        for key, value in content.items():
            assert body[key] == value or value.items() <= body[key].items()
        assert word in reply.text
        assert "wrong;" not in reply.text or "alice" not in reply.text


@pytest.mark.parametrize(
    "headers",
    [
        bearer("one"),
        bearer("two:2"),
        bearer("key of bob"),
        bearer("key,2"),
        bearer("root"),
        {"x-api-key": "one"},
        {"x-api-key": "one", "authorization": "Bearer of another service"},
        {"Authorization": "bEARER one"},
    ],
)
def test_a_key_opens_them(http: httpx.Client, headers: dict[str, str]) -> None:
    assert http.post("/classify", json={"inputs": "good"}, headers=headers).status_code == 200


@pytest.mark.parametrize("key", ["on", "onee", "alice:one", "alice", "ONE", "\xe9"])
def test_others_do_not(http: httpx.Client, key: str) -> None:
    raw = b"Bearer " + key.encode("latin-1")
    reply = http.post("/classify", json={"inputs": "x"}, headers={b"authorization": raw})
    assert reply.status_code == 401


def test_requests_are_counted_by_the_names_of_keys(http: httpx.Client) -> None:
    http.post("/classify", json={"inputs": "good"}, headers=bearer("two:2"))
    http.post("/classify", json={"input": "good"}, headers=bearer("key,2"))
    text = http.get("/metrics", headers=bearer("scraper")).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if "key_requests_total{" in line)
    name = "maskdial_key_requests_total"
    assert float(lines[f'{name}{{key="alice",outcome="ok"}}']) >= 1
    assert float(lines[f'{name}{{key="{key_name("key,2")}",outcome="validation"}}']) >= 1
    assert "two:2" not in text
    refused = 'maskdial_requests_total{model="",outcome="unauthorized",route="/classify"}'
    assert refused in text


def test_only_the_admin_key_changes_the_server(http: httpx.Client) -> None:
    for key, status in ("one", 401), ("root", 404):
        reply = http.post("/models/unload", json={"model": "none"}, headers=bearer(key))
        assert reply.status_code == status


def test_metrics_have_a_key_of_their_own(start_server: Callable[..., Any]) -> None:
    running = start_server(
        models={"sentiment": STARTER_FOLDER / "sentiment"}, metrics_key="scraper"
    )
    try:
        assert httpx.get(f"{running.url}/metrics").status_code == 401
        assert httpx.get(f"{running.url}/metrics", headers=bearer("scraper")).status_code == 200
        assert httpx.get(f"{running.url}/models").status_code == 200
    finally:
        running.stop()


def test_the_file_is_read_again(server: Any, http: httpx.Client, key_file: Path) -> None:
    def status(key: str) -> int:
        return http.get("/models", headers=bearer(key)).status_code

    before = key_file.read_text()
    key_file.write_text("carol:three\n")
    server.server.reload()
    assert [status(key) for key in ("one", "three", "key,2")] == [401, 200, 200]
    metrics = http.get("/metrics", headers=bearer("scraper")).text
    assert 'key="carol"' in metrics
    assert 'key="alice"' not in metrics
    for bad in ("", "carol\n", "carol:\n", "admin:x\n", "a b:x\n", "x:\x01\n"):
        key_file.write_text(bad)
        server.server.reload()
        assert status("three") == 200
    key_file.write_text(before)
    server.server.reload()
    assert [status(key) for key in ("one", "three")] == [200, 401]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("", "has no keys"),
        ("secret", "line 1"),
        ("a:b\nc d:secret", "line 2"),
        ("admin:secret", "reserved"),
        ("metrics:secret", "reserved"),
        (f"{key_name('mine')}:secret", f"'{key_name('mine')}' is a reserved name"),
        ("a:none", "anybody would guess"),
        ("a:secret\nb:secret", "'a' and 'b' have the same key"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        Keys(Config(api_key_file=file))
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("name", ["key-1", "key-12", "key-abc", f"{key_name('mine')}0"])
def test_names_that_only_look_like_generated_ones_are_free(name: str, tmp_path: Path) -> None:
    """What key-1 owned, when keys were named by their places, is reached by its name."""
    file = tmp_path / "keys"
    file.write_text(f"{name}:secret\n")
    assert Keys(Config(api_key_file=file, api_keys=["mine"])).names == (name, key_name("mine"))


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"api_keys": ["secret"], "admin_key": "secret"}, f"'{SECRET}' and 'admin'"),
        ({"api_keys": ["a", "secret"], "metrics_key": "secret"}, f"'{SECRET}' and 'metrics'"),
        ({"admin_key": "secret", "metrics_key": "secret"}, "'admin' and 'metrics'"),
        ({"file": "alice:secret", "admin_key": "secret"}, "'alice' and 'admin'"),
        ({"file": "alice:secret", "metrics_key": "secret"}, "'alice' and 'metrics'"),
        ({"file": "alice:secret", "api_keys": ["secret"]}, f"'alice' and '{SECRET}'"),
    ],
)
def test_a_key_has_one_owner(settings: dict[str, Any], names: str, tmp_path: Path) -> None:
    """A client with the admin's key would be the admin, and two with one key one client."""
    if (content := settings.pop("file", None)) is not None:
        (tmp_path / "keys").write_text(content)
        settings["api_key_file"] = tmp_path / "keys"
    with pytest.raises(ConfigError, match=f"{names} have the same key") as caught:
        Keys(Config(**settings))
    assert "secret" not in caught.value.message


def test_a_file_that_takes_the_admins_key_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:one\nalice:two\nalice:two\n")
    keys = Keys(Config(api_key_file=file, admin_key="root"))
    file.write_text("alice:one\nbob:root\n")
    with pytest.raises(ConfigError, match="'bob' and 'admin' have the same key"):
        keys.reload()
    assert keys.names == ("alice", "admin")


@pytest.mark.parametrize(
    ("address", "client"),
    [
        (("192.0.2.1", 1), "192.0.2.1"),
        (("2001:db8:1:2:3::4", 1), "2001:db8:1:2::/64"),
        (("2001:db8:1:2:ffff::", 1), "2001:db8:1:2::/64"),
        (("::ffff:192.0.2.1", 1), "192.0.2.1"),
        (None, "local"),
        (("", 1), "local"),
        (("evil\r\nname", 1), "local"),
    ],
)
def test_clients_without_keys_are_their_addresses(
    address: tuple[str, int] | None, client: str
) -> None:
    assert address_of({"type": "http", "client": address}) == client


@pytest.mark.parametrize("length", [65, 65_000])
def test_what_a_proxy_passes_on_is_not_kept(length: int) -> None:
    """Only addresses are cached, however many clients there seem to be."""
    before = _network.cache_info().currsize
    for number in range(100):
        host = f"{number}.".ljust(length, "x")
        assert address_of({"type": "http", "client": (host, 0)}) == "local"
    assert _network.cache_info().currsize == before
