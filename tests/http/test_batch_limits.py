"""OpenAI's Batch API at its limits: what a client can take, and what a batch cannot get over."""

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from maskdial.batches.requests import BatchReply, Requests
from maskdial.batches.room import LEAST_BYTES
from maskdial.registry.catalog import STARTER_FOLDER
from tests.held import held
from tests.http.process import Process
from tests.http.test_batch_api import begin, classify, encode, finish, lines_of
from tests.servers import engine_of, wait_for

LIMIT = 64 * LEAST_BYTES
FORM = (
    b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
)


@pytest.fixture(scope="module")
def server(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("batches")
    (folder / "keys").write_text("alice:one\nbob:two\n")
    running = start_server(
        models={"sentiment": STARTER_FOLDER / "sentiment"},
        batch_dir=folder / "batches",
        batch_max_file_bytes=LIMIT,
        batch_max_dir_bytes=LIMIT,
        api_key_file=folder / "keys",
        metrics_key="meter",
    )
    yield running
    running.stop()


@pytest.fixture(scope="module")
def alice(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0) as client:
        yield client


@pytest.fixture
def service(server: Any, alice: openai.OpenAI) -> Iterator[Any]:
    """The server's; what was uploaded is removed."""
    service = server.server.config.app.state.batches
    yield service
    for file in list(alice.files.list()):
        alice.files.delete(file.id)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be tried again after seconds is tried at once."""
    monkeypatch.setattr("maskdial.batches.worker._RETRY_SECONDS", 0.01)
    monkeypatch.setattr("maskdial.batches.requests._LONGEST_PAUSE", 0.001)


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def message(batch: Batch) -> str:
    assert batch.errors is not None
    assert batch.errors.data is not None
    (error,) = batch.errors.data
    return str(error.message)


def test_uploads_that_have_not_ended_count(server: Any, service: Any) -> None:
    """Of a key half of the folder, whether they come to an end or not."""

    def has_taken(num_bytes: int) -> bool:
        return bool(service.room._taken["alice"] == num_bytes)

    host, port = server.url.removeprefix("http://").split(":")
    others = begun = service.room._taken["alice"]
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            client = stack.enter_context(socket.create_connection((host, int(port))))
            head = (
                "POST /v1/files HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer one\r\n"
                "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 2000000\r\n\r\n"
            )
            client.sendall(head.encode() + FORM + b"x" * (2 * LEAST_BYTES))
            if begun + 2 * LEAST_BYTES > LIMIT // 2:
                assert b" 429 " in client.recv(4096)
                break
            begun += 2 * LEAST_BYTES
            wait_for(partial(has_taken, begun))
        # Somebody else has room all the same.
        reply = httpx.post(
            f"{server.url}/v1/files",
            data={"purpose": "batch"},
            files={"file": ("a", b"x")},
            headers={"authorization": "Bearer two"},
        )
        assert reply.status_code == 200, reply.text
        assert used(service.storage.files) <= LIMIT
    wait_for(partial(has_taken, others))
    wait_for(lambda: not list(service.storage.files.glob("*.partial")))
    gone = httpx.delete(
        f"{server.url}/v1/files/{reply.json()['id']}", headers={"authorization": "Bearer two"}
    )
    assert gone.status_code == 200
    assert has_taken(others)
    assert not service.room._taken["bob"]


def test_one_key_does_not_fill_the_folder(alice: openai.OpenAI, service: Any) -> None:
    def upload() -> str:
        return alice.files.create(file=("in.jsonl", b"x"), purpose="batch").id

    files = []
    while service.room._taken["alice"] < LIMIT // 2:
        files.append(upload())
    with pytest.raises(openai.RateLimitError, match="this key's files and batches would have"):
        upload()
    with pytest.raises(openai.RateLimitError, match="delete some, or wait"):
        alice.batches.create(
            input_file_id=files[0],
            endpoint="/classify",  # type: ignore[arg-type]
            completion_window="24h",
        )
    alice.files.delete(files[0])
    upload()


def test_a_key_without_others_may_fill_it(server: Any, alice: openai.OpenAI, service: Any) -> None:
    """Which keys there are is asked each time: the file of keys is read again."""

    def upload() -> str:
        return alice.files.create(file=("in.jsonl", b"x"), purpose="batch").id

    file = server.server.config.app.state.context.config.api_key_file
    both = file.read_text()
    file.write_text("alice:one\n")
    server.server.reload()
    try:
        while service.room._taken["alice"] < LIMIT:
            last = upload()
        with pytest.raises(openai.RateLimitError, match="the server's files have"):
            upload()
    finally:
        file.write_text(both)
        server.server.reload()
    alice.files.delete(last)
    with pytest.raises(openai.RateLimitError, match="this key's files and batches would have"):
        upload()


def test_a_file_is_no_input_any_more_while_it_is_deleted(
    alice: openai.OpenAI, service: Any
) -> None:
    """Or its batch would look for it until its time is over."""
    file = alice.files.create(file=("in.jsonl", encode(classify(1))), purpose="batch")
    go_on = threading.Event()
    service.storage._thread.submit(go_on.wait)
    deleting = threading.Thread(target=alice.files.delete, args=(file.id,))
    deleting.start()
    try:
        wait_for(lambda: file.id not in service.files._files)
        with pytest.raises(openai.NotFoundError, match="there is no file with this id"):
            alice.batches.create(
                input_file_id=file.id,
                endpoint="/classify",  # type: ignore[arg-type]
                completion_window="24h",
            )
    finally:
        go_on.set()
        deleting.join()


def test_a_file_cannot_be_deleted_while_its_batch_is_made(
    alice: openai.OpenAI, service: Any
) -> None:
    file = alice.files.create(file=("in.jsonl", encode(classify(1))), purpose="batch")
    go_on, made = threading.Event(), []
    service.storage._thread.submit(go_on.wait)
    creating = threading.Thread(
        target=lambda: made.append(
            alice.batches.create(
                input_file_id=file.id,
                endpoint="/classify",  # type: ignore[arg-type]
                completion_window="24h",
            )
        )
    )
    creating.start()
    try:
        wait_for(lambda: any(job.input_file_id == file.id for job in service.jobs.unfinished()))
        with pytest.raises(openai.BadRequestError, match="cancel that first"):
            alice.files.delete(file.id)
    finally:
        go_on.set()
        creating.join()
    assert finish(alice, made[0]).status == "completed"


@pytest.mark.usefixtures("impatient")
def test_a_batch_whose_input_is_lost_fails(alice: openai.OpenAI, service: Any) -> None:
    file = alice.files.create(file=("in.jsonl", encode(classify(1))), purpose="batch")
    service.files.path(file.id).unlink()
    batch = alice.batches.create(
        input_file_id=file.id,
        endpoint="/classify",  # type: ignore[arg-type]
        completion_window="24h",
    )
    batch = finish(alice, batch)
    assert batch.status == "failed"
    assert message(batch) == (
        "the batch cannot go on: its files on the server were lost or changed; begin it anew"
    )
    assert str(service.storage.files) not in message(batch)


@pytest.mark.usefixtures("impatient")
def test_a_batch_whose_journal_is_damaged_fails(
    alice: openai.OpenAI, server: Any, service: Any
) -> None:
    with held(engine_of(server, "sentiment")):
        first = begin(alice, encode(classify(1)))
        batch = begin(alice, encode(classify(2)))
        wait_for(lambda: alice.batches.retrieve(batch.id).status == "in_progress")
        folder = service.storage.work / batch.id
        folder.mkdir()
        (folder / "results.jsonl").write_bytes(b"")
        (folder / "results.jsonl.journal").write_bytes(b"{")
    assert finish(alice, first).status == "completed"
    assert "lost or changed" in message(finish(alice, batch))
    wait_for(lambda: not folder.exists())


@pytest.mark.usefixtures("impatient")
def test_a_step_that_fails_again_and_again_ends_its_batch(
    alice: openai.OpenAI, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tries = 0

    def fail(*arguments: Any) -> Any:
        nonlocal num_tries
        num_tries += 1
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr("maskdial.batches.worker.Batch", fail)
    batch = finish(alice, begin(alice, encode(classify(1))))
    assert (batch.status, num_tries) == ("failed", 5)
    assert "internal error; search the server log" in message(batch)


def test_a_status_that_cannot_be_written_is_not_told(
    alice: openai.OpenAI, server: Any, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held(engine_of(server, "sentiment")):
        batch = begin(alice, encode(classify(1)))
        wait_for(lambda: (service.storage.work / batch.id).exists())

        def refuse(path: Path, content: bytes) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as full:
            full.setattr("maskdial.batches.storage.write_whole", refuse)
            with pytest.raises(openai.InternalServerError, match="is full"):
                alice.batches.cancel(batch.id)
        batch = alice.batches.retrieve(batch.id)
        assert (batch.status, batch.cancelling_at) == ("in_progress", None)
    assert finish(alice, batch).status == "completed"


@pytest.mark.usefixtures("service")
def test_a_line_is_not_in_the_background_of_the_background(alice: openai.OpenAI) -> None:
    body = {"model": "sentiment", "input": "x", "background": True}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
    batch = finish(alice, begin(alice, encode(line), "/v1/responses"))
    assert message(batch) == (
        "body.background: all lines of a batch are in the background; leave it out"
    )


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize(
    ("path", "stream", "why"),
    [
        ("/api/generate", None, "body.stream: a batch has whole replies; set it to false"),
        ("/api/chat", True, "body.stream: a batch has whole replies; leave it out"),
        ("/v1/completions", True, "body.stream: a batch has whole replies; leave it out"),
    ],
)
def test_what_streams_by_itself_is_refused(
    alice: openai.OpenAI, path: str, stream: bool | None, why: str
) -> None:
    body = {"model": "sentiment", "prompt": "x"} | ({} if stream is None else {"stream": stream})
    line = {"custom_id": "a", "method": "POST", "url": path, "body": body}
    assert message(finish(alice, begin(alice, encode(line), path))) == why
    with pytest.raises(openai.BadRequestError, match="must be the path of a task"):
        begin(alice, encode(line), "/generate_stream")


@pytest.mark.usefixtures("service")
def test_a_name_of_a_model_that_is_long_is_not_kept(alice: openai.OpenAI) -> None:
    body = {"model": "x" * 100_000, "inputs": "y"}
    batch = finish(alice, begin(alice, encode(classify(1, body=body))))
    assert batch.status == "failed"
    assert len(batch.to_json()) < 2_000


def refusing(
    monkeypatch: pytest.MonkeyPatch, status: int, model: str = "sentiment"
) -> Callable[[], int]:
    """Has a line with the word poison refused; returns how often that was."""
    num_refused, real = 0, Requests.post

    async def post(self: Requests, path: str, body: bytes, *, receipt: bool = False) -> BatchReply:
        nonlocal num_refused
        if b"poison" not in body:
            return await real(self, path, body, receipt=receipt)
        num_refused += 1
        content = json.dumps({"error": "try again", "error_type": "x"}).encode()
        return BatchReply(status, {}, content, model=model, outcome="x", comes_later=status == 503)

    monkeypatch.setattr(Requests, "post", post)
    return lambda: num_refused


POISON = {"model": "sentiment", "inputs": "poison"}


@pytest.mark.usefixtures("impatient", "service")
def test_a_line_that_is_always_unavailable_fails_alone(
    alice: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_refused = refusing(monkeypatch, 503)
    batch = begin(alice, encode(classify(1, body=POISON), classify(2)))
    after = begin(alice, encode(classify(3)))
    batch = finish(alice, batch)
    assert (batch.status, num_refused()) == ("completed", 40)
    (failure,) = lines_of(alice, batch.error_file_id)
    assert (failure["custom_id"], failure["response"]["status_code"]) == ("line 1", 503)
    assert [each["custom_id"] for each in lines_of(alice, batch.output_file_id)] == ["line 2"]
    assert finish(alice, after).status == "completed"


@pytest.mark.usefixtures("impatient", "service")
def test_a_line_waits_for_a_model_that_is_not_there(
    alice: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maskdial.batches.requests._MAX_TRIES", 2)
    num_refused = refusing(monkeypatch, 503, model="")
    batch = begin(alice, encode(classify(1, body=POISON)))
    wait_for(lambda: num_refused() > 4)
    assert alice.batches.retrieve(batch.id).status == "in_progress"
    monkeypatch.undo()
    assert finish(alice, batch).status == "completed"


@pytest.mark.usefixtures("service")
def test_a_line_that_finds_no_room_is_asked_again_after_longer_and_longer(
    alice: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    num_refused = refusing(monkeypatch, 429)
    real = Requests.post

    async def post(self: Requests, path: str, body: bytes, *, receipt: bool = False) -> BatchReply:
        changed = body if num_refused() < 12 else body.replace(b"poison", b"")
        return await real(self, path, changed, receipt=receipt)

    monkeypatch.setattr(Requests, "post", post)
    monkeypatch.setattr("maskdial.batches.requests._pause", sleep)
    batch = finish(alice, begin(alice, encode(classify(1, body=POISON | {"inputs": "poison a"}))))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 1
    assert pauses[:4] == [0.05, 0.1, 0.2, 0.4]
    assert (len(pauses), pauses[-1]) == (12, 15.0)


@pytest.mark.slow
def test_a_download_is_finished_before_a_shutdown(tmp_path: Path) -> None:
    process = Process("--batch-dir", str(tmp_path / "batches"))
    content = b"0123456789abcdef" * 2_500_000
    with contextlib.closing(process):
        process.wait_until_ready()
        file = process.http.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("a", content)}
        ).json()
        with process.http.stream("GET", f"/v1/files/{file['id']}/content") as reply:
            parts = reply.iter_bytes()
            received = [next(parts)]
            process.process.send_signal(signal.SIGTERM)
            time.sleep(3)  # an idle server has ended by then
            received += parts
        assert b"".join(received) == content
        assert process.process.wait(60) == 0
