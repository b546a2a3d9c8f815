"""Where the server listens and whom it believes: TLS, Unix sockets, proxies, other origins."""

import errno
import os
import ssl
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.config import Config, load_config
from maskdial.errors import ConfigError
from maskdial.http.tls import Certificate
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.server import Server

DATA = Path(__file__).parents[1] / "data" / "tls"
MODELS = {"sentiment": STARTER_FOLDER / "sentiment"}


@pytest.fixture
def started(start_server: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Starts a server that is stopped after the test."""
    running = []

    def start(**settings: Any) -> Any:
        running.append(start_server(models=MODELS, **settings))
        return running[-1]

    yield start
    for server in running:
        server.stop()


def trusting(name: str) -> httpx.Client:
    context = ssl.create_default_context(cafile=DATA / f"{name}.crt")
    return httpx.Client(verify=context, timeout=30)


def copy(name: str, folder: Path) -> None:
    for ending in "crt", "key":
        (folder / f"server.{ending}").write_bytes((DATA / f"{name}.{ending}").read_bytes())


def test_https_and_a_renewed_certificate(started: Callable[..., Any], tmp_path: Path) -> None:
    copy("first", tmp_path)
    files = {"ssl_certfile": tmp_path / "server.crt", "ssl_keyfile": tmp_path / "server.key"}
    server = started(**files)
    assert server.url.startswith("https://")
    with trusting("first") as http:
        reply = http.post(f"{server.url}/classify", json={"inputs": "good"})
        assert reply.status_code == 200
    # The certificate without its key, as if the renewal were not finished: nothing changes.
    (tmp_path / "server.crt").write_bytes((DATA / "second.crt").read_bytes())
    server.server.reload()
    with trusting("first") as http:
        assert http.get(f"{server.url}/health").status_code == 200
    copy("second", tmp_path)
    server.server.reload()
    with trusting("second") as http:
        assert http.get(f"{server.url}/health").status_code == 200
    with trusting("first") as http, pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
        http.get(f"{server.url}/health")


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        ("missing.crt", None, "no such file"),
        ("first.crt", None, "cannot be used"),
        ("first.crt", "second.key", "(?i)mismatch"),
        ("first.crt", "encrypted.key", "without a password"),
    ],
)
def test_a_certificate_that_cannot_be_used(certificate: str, key: str | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Certificate(DATA / certificate, None if key is None else DATA / key)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ssl_keyfile": "x"}, "ssl_certfile"),
        ({"cors_allow_origin": ["example.org"]}, "cors_allow_origin"),
        ({"cors_allow_origin": ["https://example.org/path"]}, "cors_allow_origin"),
        ({"root_path": "llm"}, "root_path"),
        ({"root_path": "/llm/"}, "root_path"),
        ({"root_path": "/ü"}, "%C3%BC"),
        ({"root_path": "/a b"}, "no prefix of a path"),
        ({"root_path": "/a?b"}, "no prefix of a path"),
        ({"forwarded_allow_ips": "garbage"}, "'garbage' is not an address"),
        ({"forwarded_allow_ips": "127.0.0.1,10.0.0.1/8"}, "host bits"),
        ({"forwarded_allow_ips": "127.0.0.1,*"}, "is not an address"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(settings)


def test_a_unix_socket(started: Callable[..., Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are too long for a socket
        path = Path(folder) / "s"
        server = started(uds=path)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as http:
            assert http.post("http://x/classify", json={"inputs": "good"}).status_code == 200
        server.stop()
        assert not path.exists()


def test_a_prefix_that_a_proxy_takes_off(started: Callable[..., Any]) -> None:
    """The limits, the keys and the metrics are those of the routes."""
    server = started(root_path="/llm", api_keys=["one"], max_body_bytes=1024)
    key = {"x-api-key": "one"}
    with httpx.Client(base_url=server.url, timeout=30) as http:
        assert http.get("/health").status_code == 200
        assert http.post("/classify", json={"inputs": "good"}).status_code == 401
        assert http.post("/classify", json={"inputs": "good"}, headers=key).status_code == 200
        assert http.post("/classify", content=b"x" * 2000, headers=key).status_code == 413
        text = http.get("/metrics").text
        for outcome in "ok", "unauthorized", "too_large":
            assert f'outcome="{outcome}",route="/classify"}} 1.0' in text


ORIGIN = {"origin": "https://example.org"}
PREFLIGHT = ORIGIN | {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}


def test_other_origins_are_refused_by_default(started: Callable[..., Any]) -> None:
    url = started().url
    assert httpx.options(f"{url}/classify", headers=PREFLIGHT).status_code == 403
    reply = httpx.post(f"{url}/classify", json={"inputs": "good"}, headers=ORIGIN)
    assert reply.status_code == 403
    assert reply.json() == {
        "error": "web pages of 'https://example.org' may not use this server, which has no keys; "
        "allow them with --cors-allow-origin, or set keys",
        "error_type": "forbidden",
    }
    assert "access-control-allow-origin" not in reply.headers
    own = httpx.post(f"{url}/classify", json={"inputs": "good"}, headers={"origin": url})
    assert own.status_code == 200
    # A name of the page's that leads here by now: its replies could be read
    for path in ("/models", "/v1/models", "/"):
        reply = httpx.get(f"{url}{path}", headers={"host": "rebound.example.org:8000"})
        assert reply.status_code == 403
        assert "'rebound.example.org:8000' is no name of this server" in reply.text
    allowed = started(allowed_hosts=["llm.example.org"]).url
    headers = {"host": "llm.example.org", "origin": "https://llm.example.org"}
    assert httpx.get(f"{allowed}/models", headers=headers).status_code == 200


def test_origins_that_may_use_the_api(started: Callable[..., Any]) -> None:
    """A preflight has no key; errors can be read, too."""
    url = started(cors_allow_origins=["https://example.org"], api_keys=["one"]).url
    reply = httpx.options(f"{url}/classify", headers=PREFLIGHT)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://example.org"
    assert "authorization" in reply.headers["access-control-allow-headers"]
    refused = httpx.post(f"{url}/classify", json={}, headers=ORIGIN)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://example.org"
    other = PREFLIGHT | {"origin": "https://evil.example"}
    reply = httpx.options(f"{url}/classify", headers=other)
    assert reply.status_code == 400
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    ("trusted", "client"), [("127.0.0.1", "192.0.2.7"), ("192.0.2.0/24", "127.0.0.1")]
)
def test_proxies_are_believed_if_they_are_trusted(
    started: Callable[..., Any],
    trusted: str,
    client: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = started(forwarded_allow_ips=trusted).url
    headers = {"x-forwarded-for": "192.0.2.7"}
    with (
        caplog.at_level("INFO", "maskdial.access"),
        httpx.Client(base_url=url, headers=headers) as http,
    ):
        http.get("/info")
        http.get("/info")  # the record of the first one is written by now
    records = (getattr(each, "access", {}) for each in caplog.records)
    assert {each["client"] for each in records if each.get("route") == "/info"} == {client}


def test_few_files_are_said_to_be_few(caplog: pytest.LogCaptureFixture) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    Server(Config(max_connections=10**9))
    assert "too few for --max-connections 1000000000" in caplog.text
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0], resource.getrlimit(7)[1]))


def test_exhausted_descriptors_are_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    server = Server(Config())
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse)
            for _ in range(3):
                server._look_for_descriptors()
        server._look_for_descriptors()
    told = [each.getMessage() for each in caplog.records if "no file can be opened" in each.message]
    assert len(told) == 2
    assert "Too many open files" in told[0]
