"""Stored responses: the unmodified SDK retrieves, continues, deletes and cancels them."""

import asyncio
import contextlib
import functools
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from maskdial.errors import ConfigError, UnavailableError
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


def test_a_stored_conversation_is_made_shorter(alice: openai.OpenAI) -> None:
    first = alice.responses.create(model="chat", input="Who?", max_output_tokens=4)
    compacted = alice.responses.compact(
        model="chat", previous_response_id=first.id, extra_body={"max_output_tokens": 4}
    )
    assert [item.type for item in compacted.output] == ["message", "compaction"]
    # It is a conversation like any other, and is stored with what goes on from it.
    # Its messages have parts of input, as OpenAI's have, which the SDK warns of.
    again: list[Any] = [item.model_dump(warnings=False) for item in compacted.output]
    second = alice.responses.create(model="chat", input=[*again], max_output_tokens=4)
    third = alice.responses.create(
        model="chat", input="And?", previous_response_id=second.id, max_output_tokens=4
    )
    assert third.usage is not None
    assert second.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens


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
        ResponseStore(tmp_path / "other.db", 60, 2**20)
    server.stop()
    server = start_server(**settings)
    with client_of(server, "none") as client:
        assert client.responses.retrieve(made.id) == made
        assert client.responses.retrieve(queued.id).status in ("cancelled", "failed", "incomplete")
    server.stop()


def test_responses_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(_expire(tmp_path, monkeypatch))


async def _expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(tmp_path / "a.db", 60, 2**20)
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
    store = ResponseStore(tmp_path / "a.db", 60, 2**20)
    await store.save("k", {"id": "resp_1", "status": "queued", "error": None}, [])
    await store.close()
    store = ResponseStore(tmp_path / "a.db", 60, 2**20)
    found = await store.find("resp_1", "k")
    assert found is not None
    assert found.status == "failed"
    assert "the server ended" in found.response["error"]["message"]
    await store.close()


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database " * 100, encoding="utf-8")
    for path in (tmp_path / "text", tmp_path / "missing" / "a.db", tmp_path):
        with pytest.raises(ConfigError, match="cannot be used"):
            ResponseStore(path, 60, 2**20)


@pytest.mark.parametrize(
    "table",
    [
        "photos (id INTEGER, place TEXT)",
        "responses (id TEXT, answer TEXT)",
        "responses (id TEXT PRIMARY KEY, owner, expires, status, response, items, mine)",
    ],
)
def test_a_database_of_something_else_is_left_as_it_is(tmp_path: Path, table: str) -> None:
    path = tmp_path / "theirs.db"
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute(f"CREATE TABLE {table}")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="it is a database of something else; name a new file"):
        ResponseStore(path, 60, 2**20)
    assert path.read_bytes() == before


def test_the_oldest_of_the_owner_that_has_most_make_room(tmp_path: Path) -> None:
    asyncio.run(_fill(tmp_path / "a.db"))


async def _fill(path: Path) -> None:
    async def save(store: ResponseStore, owner: str, number: int, size: int = 100_000) -> None:
        response = {"id": f"{owner}{number:02}", "status": "completed", "text": "x" * size}
        await store.save(owner, response, [])

    async def kept(store: ResponseStore) -> list[str]:
        names = [f"{owner}{number:02}" for owner in "abc" for number in range(30)]
        return [name for name in names if await store.find(name, name[0])]

    store = ResponseStore(path, 60, 2**20)
    for number in range(30):
        await save(store, "a", number)
    assert await kept(store) == [f"a{number}" for number in range(20, 30)]
    for number in range(7):
        await save(store, "b", number)
    await save(store, "c", 0)
    await save(store, "b", 6)  # again, which takes no more
    found = await kept(store)
    assert [sum(name[0] == owner for name in found) for owner in "abc"] == [4, 5, 1]
    assert "b06" in found
    assert "a29" in found
    with pytest.raises(UnavailableError, match="bytes, and all that are stored may have 1,048,576"):
        await save(store, "c", 1, 2**20)
    assert await kept(store) == found
    sizes = store._sizes
    await store.delete("b06", "b")
    await store.close()
    store = ResponseStore(path, 60, 2**20)
    assert store._sizes["a"] == sizes["a"]
    assert store._sizes["b"] == store._sizes["c"] * 4
    await store.close()


def test_what_is_beyond_the_limit_is_dropped_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after an upgrade, where the file has more than the limit that there is now."""
    monkeypatch.setattr("maskdial.responses_store._BATCH_BYTES", 2_000_000)
    asyncio.run(_shrink(tmp_path / "a.db", caplog))


async def _shrink(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def response(number: int) -> dict[str, Any]:
        return {"id": f"a{number:02}", "status": "completed", "text": "x" * 500_000}

    def told() -> list[str]:
        messages = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        caplog.clear()
        return messages

    store = ResponseStore(path, 60, 2**24)
    for number in range(20):
        await store.save("a", response(number), [])
    total = store._sizes.total()
    await store.close()
    assert told() == []

    store = ResponseStore(path, 60, 2**20)
    (warning,) = told()
    assert f"has {total:,} bytes, and may have 1,048,576 (--responses-max-bytes)" in warning
    nums = []
    for number in range(20, 26):
        await store.save("a", response(number), [])
        nums.append(store._sizes["a"] * 20 // total)
    assert nums == [16, 12, 8, 4, 2, 2]
    assert await store.find("a24", "a") is not None
    assert await store.find("a23", "a") is None
    await store.close()
    first, rest = told()
    assert f"dropped the oldest 5 stored responses ({total // 4:,} bytes)" in first
    assert f"dropped the oldest 19 stored responses ({total * 19 // 20:,} bytes)" in rest

    ResponseStore(path, 60, 2**21)._thread.shutdown()
    assert told() == [], "all of it fits"


def test_what_has_expired_is_no_reason_to_warn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("maskdial.responses_store._BATCH_BYTES", 2_000_000)
    asyncio.run(_expire_much(tmp_path / "a.db", monkeypatch))
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


async def _expire_much(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    response = {"status": "completed", "text": "x" * 500_000}
    store = ResponseStore(path, 60, 2**24)
    for number in range(20):
        await store.save("a", response | {"id": str(number)}, [])
    await store.close()
    now = time.time()
    monkeypatch.setattr("maskdial.responses_store.time.time", lambda: now + 61)
    store = ResponseStore(path, 60, 2**21)
    num_kept = []
    for number in range(20, 24):
        await store.save("b", response | {"id": str(number)}, [])
        num_kept.append(store._sizes["a"] // 500_000)
    assert num_kept == [15, 10, 5, 0], "by each call some"
    assert await store.find("23", "b") is not None
    await store.close()


def test_an_old_sqlite_drops_responses_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.34 knows no RETURNING."""

    class Old(sqlite3.Connection):
        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            if "RETURNING" in statement:
                raise sqlite3.OperationalError('near "RETURNING": syntax error')
            return super().execute(statement, *values)

    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Old))
    asyncio.run(_drop_in_each_way(tmp_path / "a.db"))


async def _drop_in_each_way(path: Path) -> None:
    store = ResponseStore(path, 60, 2**20)
    response = {"id": "a", "status": "completed", "text": "x" * 600_000}
    await store.save("k", response, [])
    await store.save("k", response, [])  # in place of itself
    await store.save("k", response | {"id": "b"}, [])  # in place of the oldest
    assert await store.find("a", "k") is None
    assert await store.delete("b", "k")
    assert not await store.delete("b", "k")
    assert not store._sizes
    await store.close()


def test_a_full_disk_loses_no_text(
    server: Any, alice: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response that cannot be stored is told to its client all the same, and says so."""
    store = server.server.config.app.state.context.responses
    before = alice.responses.create(input=KING, **ASK)
    database, is_full = store._database, True

    class Full:
        def __enter__(self) -> None:
            database.__enter__()

        def __exit__(self, *error: Any) -> Any:
            return database.__exit__(*error)

        def execute(self, statement: str, values: Any) -> Any:
            if is_full and statement.startswith("INSERT"):
                raise sqlite3.OperationalError("database or disk is full")
            return database.execute(statement, values)

        def close(self) -> None:
            database.close()

    monkeypatch.setattr(store, "_database", Full())
    made = alice.responses.create(input=KING, **ASK)
    assert made.output_text == before.output_text
    assert made.model_dump()["store"] is False
    (*_, last) = alice.responses.create(input=KING, stream=True, **ASK)
    assert last.type == "response.incomplete"
    assert last.response.output_text == before.output_text
    assert last.response.model_dump()["store"] is False
    with pytest.raises(openai.InternalServerError) as caught:
        alice.responses.create(input=KING, background=True, **ASK)
    assert caught.value.status_code == 503
    assert 'database or disk is full; try again later, or send "store": false' in str(caught.value)
    assert alice.responses.retrieve(before.id) == before
    for response_id in (made.id, last.response.id):
        with pytest.raises(openai.NotFoundError):
            alice.responses.retrieve(response_id)

    is_full = False
    queued = alice.responses.create(input=KING, background=True, **ASK)
    is_full = True  # before it has ended, or after
    deadline = time.monotonic() + 60
    while queued.id in store.running:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    found = alice.responses.retrieve(queued.id)
    assert found.status in ("failed", "incomplete")
    if found.status == "failed":
        assert found.error is not None
        assert "or could not store it" in found.error.message


def test_metadata_has_bounds(alice: openai.OpenAI) -> None:
    for metadata, words in (
        (
            {str(number): "x" for number in range(17)},
            "metadata: must have at most 16 pairs, not 17",
        ),
        ({"a": "x" * 513}, "must have at most 512 characters, not 513"),
        ({"a" * 65: "x"}, "must have at most 64 characters, not 65"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            alice.responses.create(input=KING, metadata=metadata, **ASK)
    kept = {str(number): "x" * 512 for number in range(16)}
    assert alice.responses.create(input=KING, metadata=kept, **ASK).metadata == kept


def test_only_its_owner_reads_the_file(file: Path, server: Any) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
