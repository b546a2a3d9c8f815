"""Stored responses: the unmodified SDK retrieves, continues, deletes and cancels them."""

import asyncio
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from maskdial.errors import ConfigError
from maskdial.responses_store import ResponseStore

KING = "Tell me of a king."
ASK: dict[str, Any] = {"model": "chat", "max_output_tokens": 8, "temperature": 0}
LONG: dict[str, Any] = ASK | {"max_output_tokens": 400, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "responses.db"


@pytest.fixture(scope="module")
def start(start_server: Callable[..., Any], chat_bundle: Path, file: Path) -> Callable[[], Any]:
    keys = file.parent / "keys"
    keys.write_text("alice:a\nbob:b\n", encoding="utf-8")

    def run() -> Any:
        return start_server(models={"chat": chat_bundle}, responses_store=file, api_key_file=keys)

    return run


@pytest.fixture(scope="module")
def server(start: Callable[[], Any]) -> Iterator[Any]:
    running = start()
    yield running
    running.stop()


def client_of(server: Any, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def alice(server: Any) -> Iterator[openai.OpenAI]:
    with client_of(server, "a") as client:
        yield client


@pytest.fixture(scope="module")
def bob(server: Any) -> Iterator[openai.OpenAI]:
    with client_of(server, "b") as client:
        yield client


def wait_for(client: openai.OpenAI, response_id: str) -> Any:
    deadline = time.monotonic() + 60
    while (found := client.responses.retrieve(response_id)).status == "queued":
        assert time.monotonic() < deadline, "it remains queued"
        time.sleep(0.02)
    return found


def test_a_response_is_stored_for_its_key(alice: openai.OpenAI, bob: openai.OpenAI) -> None:
    made = alice.responses.create(input=KING, **ASK)
    assert made.model_dump()["store"] is True
    assert alice.responses.retrieve(made.id) == made
    for response_id, client in ((made.id, bob), ("resp_1", alice), ("x" * 500, alice)):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            client.responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            client.responses.delete(response_id)
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            client.responses.cancel(response_id)
        with pytest.raises(openai.BadRequestError, match="there is no response"):
            client.responses.create(input="And?", previous_response_id=response_id, **ASK)
    assert alice.responses.retrieve(made.id) == made
    alice.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="was deleted"):
        alice.responses.retrieve(made.id)


def test_a_conversation_goes_on(alice: openai.OpenAI) -> None:
    """As if all of it were sent again; instructions are not carried over."""
    first = alice.responses.create(input=KING, instructions="Be brief.", **ASK)
    second = alice.responses.create(input="And then?", previous_response_id=first.id, **ASK)
    assert second.previous_response_id == first.id
    stream = alice.responses.create(
        input="And at last?", previous_response_id=second.id, stream=True, **ASK
    )
    third = list(stream)[-1].response
    assert alice.responses.retrieve(third.id).output == third.output

    def message(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    told: Any = [
        message("user", KING),
        message("assistant", first.output_text),
        message("user", "And then?"),
    ]
    whole = alice.responses.create(input=told, **ASK)
    assert whole.output_text == second.output_text
    assert whole.usage is not None
    assert second.usage is not None
    assert whole.usage.input_tokens == second.usage.input_tokens
    told += [message("assistant", second.output_text), message("user", "And at last?")]
    whole = alice.responses.create(input=told, **ASK)
    assert whole.output_text == third.output_text
    # A conversation outlives the response that it began with.
    alice.responses.delete(first.id)
    again = alice.responses.create(input="And at last?", previous_response_id=second.id, **ASK)
    assert again.output_text == third.output_text


def test_what_is_not_to_be_stored_is_not(alice: openai.OpenAI) -> None:
    made = alice.responses.create(input=KING, store=False, **ASK)
    assert made.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError):
        alice.responses.retrieve(made.id)


def test_a_response_in_the_background(alice: openai.OpenAI, bob: openai.OpenAI) -> None:
    wanted = alice.responses.create(input=KING, **ASK)
    queued = alice.responses.create(input=KING, background=True, **ASK)
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    found = wait_for(alice, queued.id)
    assert (found.id, found.status, found.background) == (queued.id, wanted.status, True)
    assert found.output_text == wanted.output_text
    assert found.usage == wanted.usage.model_copy(  # the second one finds the prompt in the cache
        update={"input_tokens_details": found.usage.input_tokens_details}
    )
    assert alice.responses.cancel(queued.id) == found, "it had ended"
    with pytest.raises(openai.BadRequestError, match="only a response in the background"):
        alice.responses.cancel(wanted.id)
    with pytest.raises(openai.NotFoundError):
        bob.responses.retrieve(queued.id)


def test_the_background_is_cancelled(server: Any, alice: openai.OpenAI) -> None:
    queued = alice.responses.create(input=KING, background=True, **LONG)
    with pytest.raises(openai.BadRequestError, match="no answer to go on from; it is queued"):
        alice.responses.create(input="And?", previous_response_id=queued.id, **ASK)
    assert alice.responses.cancel(queued.id).status == "cancelled"
    assert alice.responses.retrieve(queued.id).status == "cancelled"
    queued = alice.responses.create(input=KING, background=True, **LONG)
    alice.responses.delete(queued.id)
    with pytest.raises(openai.NotFoundError):
        alice.responses.retrieve(queued.id)
    deadline = time.monotonic() + 30
    context = server.server.config.app.state.context
    while context.lifecycle.num_requests or context.responses.running:
        assert time.monotonic() < deadline, "something still runs"
        time.sleep(0.02)


def test_a_failure_in_the_background_is_told(alice: openai.OpenAI) -> None:
    queued = alice.responses.create(input="word " * 3000, background=True, **ASK)
    found = wait_for(alice, queued.id)
    assert found.status == "failed"
    assert "tokens" in found.error.message
    for options, words in (
        ({"stream": True}, "is not streamed"),
        ({"store": False}, "is stored; leave it out"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            alice.responses.create(input=KING, background=True, **(ASK | options))


def test_the_file_outlives_its_server(
    start: Callable[[], Any], tmp_path: Path, start_server: Callable[..., Any], chat_bundle: Path
) -> None:
    settings = {"models": {"chat": chat_bundle}, "responses_store": tmp_path / "other.db"}
    server = start_server(**settings)
    with client_of(server, "none") as client:
        made = client.responses.create(input=KING, **ASK)
        queued = client.responses.create(input=KING, background=True, **LONG)
    with pytest.raises(ConfigError, match="one server uses it at a time"):
        ResponseStore(tmp_path / "other.db", 60)
    server.stop()
    server = start_server(**settings)
    with client_of(server, "none") as client:
        assert client.responses.retrieve(made.id) == made
        assert client.responses.retrieve(queued.id).status in ("cancelled", "failed", "incomplete")
    server.stop()


def test_responses_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(_expire(tmp_path, monkeypatch))


async def _expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(tmp_path / "a.db", 60)
    response = {"id": "resp_1", "status": "completed"}
    await store.save("", response, [])
    assert await store.find("resp_1", "") is not None
    now = time.time()
    monkeypatch.setattr("maskdial.responses_store.time.time", lambda: now + 61)
    assert await store.find("resp_1", "") is None
    await store.save("", response | {"id": "resp_2"}, [])
    await store.close()
    with sqlite3.connect(tmp_path / "a.db") as database:
        assert database.execute("SELECT id FROM responses").fetchall() == [("resp_2",)]


def test_what_was_unfinished_has_failed(tmp_path: Path) -> None:
    asyncio.run(_leave_unfinished(tmp_path))


async def _leave_unfinished(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "a.db", 60)
    await store.save("k", {"id": "resp_1", "status": "queued", "error": None}, [])
    await store.close()
    store = ResponseStore(tmp_path / "a.db", 60)
    found = await store.find("resp_1", "k")
    assert found is not None
    assert found.status == "failed"
    assert "the server ended" in found.response["error"]["message"]
    await store.close()


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database " * 100, encoding="utf-8")
    for path in (tmp_path / "text", tmp_path / "missing" / "a.db", tmp_path):
        with pytest.raises(ConfigError, match="cannot be used"):
            ResponseStore(path, 60)


def test_only_its_owner_reads_the_file(file: Path, server: Any) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
