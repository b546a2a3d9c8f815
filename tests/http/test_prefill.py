"""`/v1/prefill` and `maskdial prefill`: prompts that are read before anybody asks."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial import cli
from maskdial.registry.catalog import STARTER_FOLDER

KEYS = "alice:one\nbob:two\n"
SYSTEM = {"role": "system", "content": "the king and the queen went to the sea. " * 12}
CONVERSATION = {"model": "chat", "messages": [SYSTEM]}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def server(
    start_server: Callable[..., Any], chat_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEYS)
    models = {"chat": chat_bundle, "sentiment": STARTER_FOLDER / "sentiment"}
    running = start_server(models=models, api_key_file=keys, admin_key="root")
    yield running
    running.stop()


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def first_turn(http: httpx.Client, key: str, system: Any = SYSTEM) -> tuple[Any, int]:
    """The answer to a first question, and how much of the prompt was there already."""
    messages = [system, {"role": "user", "content": "Who is at sea?"}]
    body = {"model": "chat", "messages": messages, "max_tokens": 4, "seed": 1, "logprobs": True}
    reply = http.post("/v1/chat/completions", json=body, headers=bearer(key))
    assert reply.status_code == 200, reply.text
    content = reply.json()
    return content["choices"], content["usage"]["prompt_tokens_details"]["cached_tokens"]


def prefill(
    http: httpx.Client, status: int = 200, *, of: str | None = None, by: str = "root", **fields: Any
) -> Any:
    """Has a conversation read for the key ``of`` a name, ``by`` another key."""
    whose = {} if of is None else {"key": of}
    body = CONVERSATION | whose | fields
    reply = http.post("/v1/prefill", json=body, headers=bearer(by))
    assert reply.status_code == status, reply.text
    return reply.json()


def test_the_first_turn_of_a_key_finds_what_was_read_for_it(http: httpx.Client) -> None:
    read = prefill(http, of="alice", stream=True, n=3)
    assert read["object"] == "prefill"
    assert read["usage"]["prompt_tokens"] > 100
    assert read["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    warm, cached = first_turn(http, "one")
    assert cached >= read["usage"]["prompt_tokens"] // 64 * 64 - 64 > 0
    cold, cached = first_turn(http, "two")
    assert (cold, cached) == (warm, 0)
    again = prefill(http, of="alice")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "each key has prefixes of its own"),
        ({"of": "carol"}, "no key of this name"),
        ({"of": "alice", "model": "sentiment"}, "sentiment"),
        ({"of": "alice", "messages": []}, "messages"),
    ],
)
def test_what_is_refused(http: httpx.Client, fields: dict[str, Any], words: str) -> None:
    error = prefill(http, 400, **fields)["error"]
    assert words in error["message"] + str(error["param"])


def test_only_the_admin_key_opens_it(http: httpx.Client) -> None:
    prefill(http, 401, by="one")


def test_the_command(
    server: Any,
    http: httpx.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "agent.json"
    system = {"role": "system", "content": "It was a dark night at sea. " * 20}
    file.write_text(json.dumps({"messages": [system]}))
    arguments = ["prefill", str(file), "--server", server.url, "--model", "chat", "--key", "bob"]
    assert cli.main(arguments) == 1
    assert "refuses it" in capsys.readouterr().err
    monkeypatch.setenv("MASKDIAL_ADMIN_KEY", "root")
    assert cli.main(arguments) == 0
    assert "of which 0 were in the cache" in capsys.readouterr().out
    assert first_turn(http, "two", system)[1] >= 64
    file.write_text("{")
    assert cli.main(arguments) == 1
    assert "is no JSON" in capsys.readouterr().err


def test_without_keys_it_is_everyones(start_server: Callable[..., Any], chat_bundle: Path) -> None:
    running = start_server(models={"chat": chat_bundle}, admin_key="root")
    with httpx.Client(base_url=running.url, timeout=60) as http:
        prefill(http)
        reply = http.post(
            "/v1/chat/completions",
            json={"model": "chat", "messages": [SYSTEM], "max_tokens": 1},
        )
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
        assert "leave it out" in prefill(http, 400, of="alice")["error"]["message"]
    running.stop()
