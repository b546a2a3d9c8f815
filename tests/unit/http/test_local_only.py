"""Web pages of elsewhere, and a server without keys that is for its own machine."""

from typing import Any

import pytest

from maskdial.config import Config
from maskdial.errors import ForbiddenError
from maskdial.http.local_only import LocalOnly


def check(called: str | None, origin: str | None = None, /, **settings: Any) -> None:
    local = LocalOnly.of(Config(**settings))
    assert local is not None
    headers = [(b"accept", b"*/*")]
    headers += [(b"host", called.encode("latin-1"))] if called is not None else []
    headers += [(b"origin", origin.encode("latin-1"))] if origin is not None else []
    local.check({"type": "http", "headers": headers})


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LOCALHOST.", "127.0.0.1:8000", "[::1]:8000", "[::1]"),
        *("192.168.1.7", "0.0.0.0:1", "my-laptop", "a.localhost:3", "host.docker.internal:8000"),
        None,  # in HTTP/1.0
    ],
)
def test_names_that_no_web_page_has(host: str | None) -> None:
    check(host)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"),
        *(
            "evil.example.",
            "localhost@evil.example",
            "internal.evil",
            "a.local",
            "[",
            "[::1",
            ":80",
        ),
        *("evil.example#localhost", "evil.example/localhost", "127.0.0.1:8000@evil.example", " "),
    ],
)
def test_other_names_are_refused(host: str) -> None:
    with pytest.raises(ForbiddenError, match="is no name of this server"):
        check(host)


@pytest.mark.parametrize(
    "origin",
    [
        *("http://localhost:3000", "https://127.0.0.1", "http://[::1]:8000", "http://x.localhost"),
        *("app://obsidian.md", "tauri://localhost", "vscode-webview://x", "chrome-extension://x"),
    ],
)
def test_pages_of_this_machine_and_applications(origin: str) -> None:
    check("localhost:8000", origin)


@pytest.mark.parametrize(
    "origin",
    [
        *("https://evil.example", "http://localhost.evil.example", "http://evil.example:8000"),
        *(
            "null",
            "http://evil.example@localhost.evil.example",
            "http://192.168.1.66",
            "//evil.example",
        ),
        *("http://evil", "evil.example", "http://[", "http://", "HTTP://EVIL.EXAMPLE"),
    ],
)
def test_pages_of_elsewhere_are_refused(origin: str) -> None:
    with pytest.raises(ForbiddenError, match="may not use this server, which has no keys; allow"):
        check("localhost:8000", origin)


def test_who_is_allowed() -> None:
    check("llm.example.org:80", allowed_hosts=["LLM.example.org"])
    check("llm.example.org", "https://llm.example.org", allowed_hosts=["llm.example.org"])
    check("evil.example", allowed_hosts=["*"])
    check("localhost", "https://example.org", cors_allow_origins=["https://example.org"])
    check("localhost", "null", cors_allow_origins=["*"])
    check("evil.example:80", "https://evil.example:80", allowed_hosts=["*"])
    with pytest.raises(ForbiddenError):
        check("www.llm.example.org", allowed_hosts=["llm.example.org"])
    with pytest.raises(ForbiddenError):
        check("localhost", "http://evil.example", allowed_hosts=["*"])


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("my-laptop:8000", "http://my-laptop:8000"),
        ("192.168.1.7:8000", "http://192.168.1.7:8000"),
        ("My-Laptop", "https://my-laptop"),
        ("host.docker.internal:8000", "http://host.docker.internal:8000"),
    ],
)
def test_the_servers_own_page_may_ask_it(host: str, origin: str) -> None:
    check(host, origin)
    for other in (f"{origin}1", origin.replace("://", "://x.")):
        with pytest.raises(ForbiddenError, match="may not use"):
            check(host, other)


def test_a_server_that_others_reach_may_say_its_names() -> None:
    settings: dict[str, Any] = {"host": "0.0.0.0", "allowed_hosts": ["llm.example.org"]}
    check("llm.example.org", "https://llm.example.org", **settings)
    check("192.168.1.7:8000", **settings)
    with pytest.raises(ForbiddenError, match="is no name of this server"):
        check("evil.example", **settings)
    with pytest.raises(ForbiddenError, match="may not use this server"):
        check("llm.example.org", "https://evil.example", **settings)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "127.0.0.9", "LocalHost", "::1"])
def test_addresses_of_this_machine_alone(host: str) -> None:
    with pytest.raises(ForbiddenError):
        check("evil.example", host=host)


def test_sentences_are_short() -> None:
    for host, origin in (("x." * 5000, None), ("localhost", "http://" + "x." * 5000)):
        with pytest.raises(ForbiddenError) as caught:
            check(host, origin)
        assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "settings",
    [
        {"host": "0.0.0.0"},
        {"host": "::"},
        {"host": "192.168.1.7"},
        {"uds": "/tmp/s"},
        {"api_keys": ["secret"]},
        {"api_key_file": "/tmp/keys"},
    ],
)
def test_servers_that_others_reach_or_that_have_keys(settings: dict[str, Any]) -> None:
    """There, an address protects nothing, and pages have no key."""
    assert LocalOnly.of(Config(**settings)) is None
