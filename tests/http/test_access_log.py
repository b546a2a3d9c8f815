"""The access log: who was answered by what, never what was said."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from maskdial.http.keys import key_name
from maskdial.logs import JsonFormatter
from maskdial.registry.catalog import STARTER_FOLDER

Lines = Callable[[int], list[dict[str, Any]]]
SECRET = "a rather private sentence"


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Any]) -> Iterator[Any]:
    models = {"sentiment": STARTER_FOLDER / "sentiment", "hybrid": STARTER_FOLDER / "hybrid"}
    running = start_server(models=models, api_keys=["top secret"], log_format="json")
    yield running
    running.stop()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    """Waits for so many lines, as they are written; a request's may come after its reply."""
    formatter = JsonFormatter()

    def wait(count: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + 30
        while True:
            records = [each for each in caplog.records if each.name == "maskdial.access"]
            found = [json.loads(formatter.format(each)) for each in records]
            # The polls of a server that starts may be logged after it has been found ready.
            found = [each for each in found if each["route"] != "/health/ready"]
            if len(found) >= count:
                assert len(found) == count, found
                return found
            assert time.monotonic() < deadline
            time.sleep(0.01)

    with caplog.at_level("INFO", "maskdial.access"):
        yield wait


KEY = {"authorization": "Bearer top secret"}


def test_what_a_line_says(server: Any, lines: Lines) -> None:
    headers = KEY | {"x-request-id": "r-1"}
    httpx.post(f"{server.url}/classify", json={"inputs": SECRET}, headers=headers)
    (line,) = lines(1)
    assert line.pop("total_ms") >= line.pop("inference_ms") > 0
    assert line.pop("queue_ms") >= 0
    assert line.pop("compute_tokens") > 3
    assert line.pop("time")
    assert line == {
        "level": "info",
        "logger": "maskdial.access",
        "request_id": "r-1",
        "method": "POST",
        "route": "/classify",
        "model": "sentiment",
        "client": "127.0.0.1",
        "key": key_name("top secret"),
        "status": 200,
        "outcome": "ok",
    }


def test_nothing_that_was_sent_gets_in(server: Any, lines: Lines) -> None:
    evil = "evil%00FAKE"
    requests = [
        ("POST", "/classify", {"inputs": SECRET, "model": SECRET}, "/classify"),
        ("POST", f"/models/{evil}", {"inputs": SECRET}, "/models/{name}"),
        ("GET", f"/v1/models/{evil}", None, "/v1/models/{name}"),
        ("GET", f"/{evil}%0d%0a?q={evil}", None, None),
    ]
    for method, path, body, _ in requests:
        headers = KEY | {"x-request-id": SECRET, "user-agent": SECRET}
        reply = httpx.request(method, server.url + path, json=body, headers=headers)
        assert reply.status_code == 404
    httpx.post(f"{server.url}/classify", json={"inputs": SECRET})
    found = lines(len(requests) + 1)
    assert [line["route"] for line in found[:-1]] == [route for *_, route in requests]
    assert found[-1]["outcome"] == "unauthorized"
    assert found[-1]["key"] is None
    text = json.dumps(found)
    for word in SECRET, "private", "evil", "FAKE", "top secret":
        assert word not in text


def test_a_stream_is_logged_when_it_ends(server: Any, lines: Lines) -> None:
    body = {"inputs": "Once", "parameters": {"max_new_tokens": 3}, "stream": True}
    httpx.post(f"{server.url}/generate", json=body, headers=KEY)
    (line,) = lines(1)
    assert (line["route"], line["model"], line["outcome"]) == ("/generate", "hybrid", "ok")


@pytest.mark.parametrize("path", ["/info", "/health", "/health/live", "/v2/health/ready"])
def test_every_path_is_logged_as_itself(server: Any, lines: Lines, path: str) -> None:
    """Also one whose endpoint answers at another path, too."""
    httpx.get(server.url + path, headers=KEY)
    (line,) = lines(1)
    assert line["route"] == path


HOSTILE = 'a\r\nb\x00\x1b[31m\x7f\x85\u2028{"route": "/fake"}é'


@pytest.fixture(scope="module")
def telling(start_server: Callable[..., Any]) -> Iterator[Any]:
    running = start_server(log_format="json-texts", api_keys=["top secret"])
    yield running
    running.stop()


def test_texts_are_logged_if_asked_for(
    telling: Any, lines: Lines, caplog: pytest.LogCaptureFixture
) -> None:
    """Of requests to models; on one line of printable characters, and never more than a part."""
    body = json.dumps({"inputs": [HOSTILE] * 3}, ensure_ascii=False)
    reply = httpx.post(f"{telling.url}/classify", content=body, headers=KEY)
    refused = httpx.post(f"{telling.url}/classify", content=b"\xff\n" * 100_000, headers=KEY)
    httpx.post(f"{telling.url}/classify", content=body)
    httpx.get(f"{telling.url}/info", headers=KEY)
    good, bad, unknown, other = lines(4)
    assert (good["request"], good["reply"]) == (body, reply.text)
    assert bad["reply"] == refused.text
    assert bad["request"] == "\ufffd\n" * 32768
    assert unknown["request"] == ""
    assert SECRET not in str(other)
    assert not {"request", "reply"} & other.keys()
    formatter = JsonFormatter()
    written = [formatter.format(each) for each in caplog.records if each.name == "maskdial.access"]
    assert all(line.isascii() and line.isprintable() for line in written)


def test_a_streams_events_are_logged_if_asked_for(telling: Any, lines: Lines) -> None:
    body = {"inputs": "Once", "parameters": {"max_new_tokens": 3}, "stream": True}
    reply = httpx.post(f"{telling.url}/generate", json=body, headers=KEY)
    (line,) = lines(1)
    assert line["reply"] == reply.text
    assert line["reply"].count("data:") == 3
