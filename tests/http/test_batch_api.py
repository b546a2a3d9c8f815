"""OpenAI's Batch API, as the unmodified SDK drives it, and as nobody should."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from maskdial import cli
from maskdial.batches.output import Journal, journal_path
from maskdial.registry.catalog import STARTER_FOLDER
from tests.held import held
from tests.http.process import Process
from tests.servers import PATIENCE, engine_of, metric, wait_for

MODELS = {name: STARTER_FOLDER / name for name in ("hybrid", "sentiment")}
KEYS = "alice:one\nalice:another\nbob:two\n"
MISSING = {"type": "invalid_request_error", "param": "id", "code": None}
Connect = Callable[[str], openai.OpenAI]


def classify(number: int, **fields: Any) -> dict[str, Any]:
    """A line that asks the sentiment starter."""
    body = {"model": "sentiment", "inputs": f"A film about {number} ships."}
    line = {"custom_id": f"line {number}", "method": "POST", "url": "/classify", "body": body}
    return line | fields


def encode(*lines: Any) -> bytes:
    return "".join(
        f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines
    ).encode()


@pytest.fixture(scope="module")
def server(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("batches")
    (folder / "keys").write_text(KEYS)
    running = start_server(
        models=MODELS,
        batch_dir=folder / "batches",
        batch_max_file_bytes=100_000,
        max_body_bytes=20_000,
        api_key_file=folder / "keys",
        metrics_key="meter",
        request_timeout=30,
    )
    yield running
    running.stop()


@pytest.fixture(scope="module")
def connect(server: Any) -> Iterator[Connect]:
    """A client with a key."""
    with contextlib.ExitStack() as stack:

        def connect(key: str) -> openai.OpenAI:
            return stack.enter_context(
                openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)
            )

        yield connect


@pytest.fixture(scope="module")
def alice(connect: Connect) -> openai.OpenAI:
    return connect("one")


@pytest.fixture
def clock(server: Any) -> Iterator[Callable[[float], None]]:
    """Lets seconds pass in the server's eyes."""
    service = server.server.config.app.state.batches
    ahead = 0.0
    parts = (service, service.files, service.jobs, service.worker)

    def pass_(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds
        service.worker.notice()

    with pytest.MonkeyPatch.context() as patch:
        for part in parts:
            patch.setattr(part, "_clock", lambda: time.time() + ahead)
        yield pass_


def finish(client: openai.OpenAI, batch: Batch) -> Batch:
    """A batch when nothing happens to it any more. It may take long, but not stand still."""
    until, before = time.monotonic() + PATIENCE, batch
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        if batch != before:
            until, before = time.monotonic() + PATIENCE, batch
        assert time.monotonic() < until, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def begin(client: openai.OpenAI, content: bytes, endpoint: str = "/classify", **more: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,  # type: ignore[arg-type]
        **{"completion_window": "24h", **more},
    )


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[Any]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "Once upon", "max_tokens": 6, "seed": 3}),
        ("/v1/completions", {"prompt": "A", "max_tokens": 4, "n": 3, "seed": 5}),
        ("/generate", {"inputs": "Once", "parameters": {"max_new_tokens": 3}, "timeout": 0.001}),
        ("/fill-mask", {"inputs": ["A [MASK] ship.", "The [MASK]."]}),
    ],
)
def test_answers_are_those_of_the_routes(
    alice: openai.OpenAI, server: Any, endpoint: str, body: dict[str, Any]
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    batch = finish(alice, begin(alice, encode(line), endpoint))
    assert (batch.status, batch.error_file_id) == ("completed", None)
    (result,) = lines_of(alice, batch.output_file_id)
    assert result["custom_id"] == "a"
    assert result["error"] is None
    assert result["response"]["status_code"] == 200
    body.pop("timeout", None)  # a batch has none
    online = httpx.post(
        f"{server.url}{endpoint}", json=body, headers={"authorization": "Bearer one"}, timeout=60
    )
    assert online.headers["x-request-id"] != result["response"]["request_id"]

    def plain(reply: Any) -> Any:
        ignored = ("id", "created", "usage")
        return (
            {name: value for name, value in reply.items() if name not in ignored}
            if isinstance(reply, dict)
            else reply
        )

    assert plain(result["response"]["body"]) == plain(online.json())


def test_a_batch_from_upload_to_deletion(
    alice: openai.OpenAI, connect: Connect, server: Any
) -> None:
    lines = [classify(number) for number in range(600)]
    lines[7]["body"] = {"model": "sentiment", "inputs": ""}
    content = encode(*lines[:300], "", *lines[300:])
    file = alice.files.create(
        file=("in.jsonl", content),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert (file.filename, file.bytes, file.purpose) == ("in.jsonl", len(content), "batch")
    assert file.expires_at == file.created_at + 7200
    assert alice.files.content(file.id).content == content
    batch = alice.batches.create(
        input_file_id=file.id,
        endpoint="/classify",  # type: ignore[arg-type]
        completion_window="24h",
        metadata={"night": "one"},
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (batch.status, batch.metadata, batch.endpoint) == (
        "validating",
        {"night": "one"},
        "/classify",
    )
    assert batch.expires_at == batch.created_at + 86_400
    batch = finish(alice, batch)
    assert batch.status == "completed"
    assert batch.model == "sentiment"
    assert batch.request_counts is not None
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (600, 599, 1)
    times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert list(times) == sorted(times, key=lambda time: time or 0)
    results = lines_of(alice, batch.output_file_id)
    order = [line["custom_id"] for number, line in enumerate(lines) if number != 7]
    assert [each["custom_id"] for each in results] == order
    (failure,) = lines_of(alice, batch.error_file_id)
    assert failure["custom_id"] == "line 7"
    assert failure["response"]["status_code"] == 422
    assert failure["response"]["body"]["error"] == "inputs: must not be empty"
    output = alice.files.retrieve(str(batch.output_file_id))
    assert (output.purpose, output.expires_at) == ("batch_output", output.created_at + 3600)

    other = connect("another")  # of the same name
    assert other.batches.list(limit=1).data[0].id == batch.id
    assert other.files.retrieve(file.id) == file
    assert other.files.list(purpose="batch").data[0] == file
    assert alice.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file with this id"):
        alice.files.content(file.id)
    meter = httpx.Client(base_url=server.url, headers={"authorization": "Bearer meter"})
    with meter:
        counted = metric(meter, "maskdial_batch_requests_total", model="sentiment", outcome="ok")
        assert counted >= 599
        assert metric(meter, "maskdial_requests_total", route="/classify") == 0
        assert metric(meter, "maskdial_requests_total", route="/v1/batches", outcome="ok") >= 1


def test_lists_come_in_pages(alice: openai.OpenAI) -> None:
    batches = [begin(alice, encode(classify(1))) for _ in range(3)]
    page = alice.batches.list(limit=2)
    assert page.has_more
    assert [each.id for each in page.data] == [batches[2].id, batches[1].id]
    assert alice.batches.list(limit=1, after=batches[1].id).data[0].id == batches[0].id
    assert {each.id for each in batches} <= {each.id for each in alice.batches.list(limit=2)}
    oldest = alice.files.list(order="asc", limit=3)
    assert [each.created_at for each in oldest.data] == sorted(
        each.created_at for each in oldest.data
    )
    for batch in batches:
        assert finish(alice, batch).status == "completed"


def test_one_key_does_not_see_what_another_has(alice: openai.OpenAI, connect: Connect) -> None:
    bob = connect("two")
    batch = finish(alice, begin(alice, encode(classify(1))))
    file_id = str(batch.output_file_id)
    assert list(bob.files.list()) == []
    assert list(bob.batches.list()) == []
    for ask in (
        lambda: bob.files.retrieve(file_id),
        lambda: bob.files.content(file_id),
        lambda: bob.files.delete(file_id),
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.batches.cancel(batch.id),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            ask()
        what = "batch" if "batch" in str(caught.value.request.url.path) else "file"
        assert caught.value.body == {"message": f"there is no {what} with this id", **MISSING}
    with pytest.raises(openai.NotFoundError) as caught:
        bob.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/embeddings", completion_window="24h"
        )
    assert caught.value.param == "input_file_id"
    with pytest.raises(openai.NotFoundError):
        bob.batches.list(after=batch.id)
    assert alice.files.retrieve(file_id).id == file_id


def test_a_file_that_is_no_batch_fails_with_the_numbers_of_its_lines(alice: openai.OpenAI) -> None:
    bodies = [classify(number) for number in range(9)]
    bodies[2]["custom_id"] = "line 1"
    bodies[3]["url"] = "/score"
    bodies[4]["body"] = {"model": "hybrid", "inputs": "x"}
    bodies[5]["method"] = "GET"
    bodies[6]["body"]["stream"] = True
    bodies[7]["body"]["inputs"] = "x" * 20_000
    batch = finish(alice, begin(alice, encode("{broken", {"inputs": "x"}, *bodies)))
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    first, *others = batch.errors.data
    assert (first.line, first.code) == (1, "invalid_json_line")
    assert str(first.message).startswith("the line is not valid JSON: ")
    assert [(each.line, each.code) for each in others] == [
        (2, "missing_required_parameter"),
        (5, "duplicate_custom_id"),
        (6, "mismatched_endpoint"),
        (7, "mismatched_model"),
        (8, "invalid_request"),
        (9, "invalid_request"),
        (10, "invalid_json_line"),
    ]
    too_long = str(others[-1].message)
    assert "bytes; one may have at most 20,000" in too_long
    for content, code in (
        (b"", "empty_file"),
        (b"\n \n", "empty_file"),
        (b"\xff\xfe\n", "invalid_json_line"),
        (encode(classify(1, body={"model": "gpt-4o", "inputs": "x"})), "model_not_found"),
    ):
        batch = finish(alice, begin(alice, content))
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [each.code for each in batch.errors.data] == [code]


def test_bad_requests_are_one_sentence(alice: openai.OpenAI, server: Any) -> None:
    file = alice.files.create(file=("in.jsonl", encode(classify(1))), purpose="batch")
    good = {"input_file_id": file.id, "endpoint": "/classify", "completion_window": "24h"}
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer one"}) as http:

        def refused(status: int, reply: httpx.Response) -> tuple[str, str | None]:
            assert reply.status_code == status, reply.text
            error = reply.json()["error"]
            assert "\n" not in error["message"]
            return error["message"], error["param"]

        def batch(**fields: Any) -> tuple[str, str | None]:
            return refused(400, http.post("/v1/batches", json=good | fields))

        assert batch(endpoint="/v1/files")[1] == "endpoint"
        assert batch(endpoint="/models/load")[0].startswith("endpoint: must be the path of a task")
        assert batch(completion_window="8d")[1] == "completion_window"
        assert batch(completion_window="0h")[1] == "completion_window"
        assert batch(metadata={str(n): "x" for n in range(17)})[0] == (
            "metadata: must have at most 16 pairs, not 17"
        )
        assert batch(metadata={"a": "x" * 513})[1] == "metadata.a"
        assert batch(output_expires_after={"anchor": "created_at", "seconds": 1})[1] == (
            "output_expires_after.seconds"
        )
        assert batch(surprise=1) == ("surprise: unknown field", "surprise")
        assert refused(400, http.get("/v1/batches?limit=101"))[1] == "limit"
        assert refused(400, http.get("/v1/files?limit=x"))[1] == "limit"
        assert refused(400, http.get("/v1/files?order=up"))[1] == "order"
        assert refused(404, http.get("/v1/batches/batch_1"))[1] == "id"
        assert refused(404, http.get("/v1/files/..%2F..%2Fkeys/content"))

        def upload(**options: Any) -> tuple[str, str | None]:
            return refused(400, http.post("/v1/files", **options))

        form = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", b"x")}}
        assert upload(json={})[0].startswith("the body is no form; send multipart/form-data")
        assert upload(**form | {"data": {"purpose": "fine-tune"}})[1] == "purpose"
        assert upload(**form | {"data": {"purpose": "batch", "size": "1"}})[1] == "size"
        assert upload(**form | {"data": {"purpose": "x" * 2000}})[1] == "purpose"
        expiry = {"purpose": "batch", "expires_after[anchor]": "created_at"}
        assert upload(**form | {"data": expiry})[1] == "expires_after[seconds]"
        assert upload(data={"purpose": "batch"}, files={"other": ("a", b"")})[1] == "file"
        kind = {"content-type": "multipart/form-data; boundary=x"}
        for content in (
            b"",
            b"--x\r\n",
            b"--y--\r\n",
            b"--x\r\nContent-Disposition: form-data\r\n",
        ):
            assert "; send multipart/form-data with" in upload(content=content, headers=kind)[0]
        assert refused(413, http.post("/v1/files", data={}, files={"file": b"x" * 100_001}))
        large: dict[str, Any] = {
            "data": {"purpose": "batch"},
            "files": {"file": ("a", b"x" * 120_000)},
        }
        assert refused(413, http.post("/v1/files", **large))[0].endswith(
            "accepts at most 100,000 (--batch-max-file-bytes)"
        )
        assert http.post("/v1/files", headers={"authorization": "Bearer x"}).status_code == 401
        assert http.get("/v1/files", headers={"authorization": "Bearer x"}).status_code == 401
    folder = server.server.config.app.state.batches.storage.files
    assert not list(folder.glob("*.partial"))


def test_a_server_without_a_folder_refuses(openai_client: openai.OpenAI) -> None:
    for ask in (
        lambda: openai_client.files.list(),
        lambda: openai_client.batches.list(),
        lambda: openai_client.files.create(file=b"x", purpose="batch"),
        lambda: openai_client.batches.cancel("batch_1"),
    ):
        with pytest.raises(openai.PermissionDeniedError, match="--batch-dir"):
            ask()


def test_a_batch_can_be_cancelled_while_it_is_answered(alice: openai.OpenAI, server: Any) -> None:
    content = encode(*(classify(number) for number in range(300)))
    with held(engine_of(server, "sentiment")):
        batch = begin(alice, content)
        wait_for(lambda: alice.batches.retrieve(batch.id).status == "in_progress")
        waiting = begin(alice, encode(classify(1)))
        wait_for(lambda: alice.batches.retrieve(waiting.id).status == "in_progress")
        with pytest.raises(openai.BadRequestError, match="cancel that first"):
            alice.files.delete(waiting.input_file_id)
        assert alice.batches.cancel(batch.id).status == "cancelling"
    batch = finish(alice, batch)
    assert batch.status == "cancelled"
    assert None not in (batch.cancelling_at, batch.cancelled_at)
    assert batch.request_counts is not None
    assert batch.request_counts.total == 300
    done = 0 if batch.output_file_id is None else len(lines_of(alice, batch.output_file_id))
    assert done == batch.request_counts.completed < 300
    assert alice.batches.cancel(batch.id).status == "cancelled"
    waiting = finish(alice, waiting)
    assert waiting.status == "completed"
    with pytest.raises(openai.BadRequestError, match="any more: it is completed"):
        alice.batches.cancel(waiting.id)


def test_a_batch_that_had_to_make_way_has_the_same_answers(
    alice: openai.OpenAI, server: Any
) -> None:
    """Others come while it generates, in more than all slots: it pauses, gives up, begins anew."""
    bodies = [
        {"model": "hybrid", "prompt": f"The {word} ship", "max_tokens": 40, "seed": seed}
        for seed, word in enumerate(("old", "red", "lost", "new", "last", "first"))
    ]
    lines = [
        {"custom_id": f"{body['seed']}", "method": "POST", "url": "/v1/completions", "body": body}
        for body in bodies
    ]

    def ask(body: dict[str, Any]) -> str:
        text: str = alice.completions.create(**body).choices[0].text
        return text

    with ThreadPoolExecutor(9) as pool:
        with held(engine_of(server, "hybrid"), num_steps=4) as go_on:
            batch = begin(alice, encode(*lines), "/v1/completions")
            scheduler = engine_of(server, "hybrid")._scheduler
            wait_for(lambda: any(each.num_generated > 1 for each in scheduler.running))
            online = [pool.submit(ask, bodies[0] | {"max_tokens": 8}) for _ in range(9)]
            wait_for(lambda: scheduler.num_waiting + len(scheduler.running) > 9)
            go_on()
            others = [each.result() for each in online]
        batch = finish(alice, batch)
        found = [
            each["response"]["body"]["choices"][0]["text"]
            for each in lines_of(alice, batch.output_file_id)
        ]
        assert found == list(pool.map(ask, bodies))
    assert len(set(others)) == 1
    assert found[0].startswith(others[0])


def test_what_has_no_time_left_expires(
    alice: openai.OpenAI, server: Any, clock: Callable[[float], None]
) -> None:
    file = alice.files.create(
        file=("a", encode(classify(1))),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    with held(engine_of(server, "sentiment")):
        batch = begin(
            alice, encode(*(classify(number) for number in range(5))), completion_window="1h"
        )
        wait_for(lambda: alice.batches.retrieve(batch.id).status == "in_progress")
        clock(3601)
        batch = finish(alice, batch)
    assert batch.status == "expired"
    assert batch.expired_at is not None
    assert batch.output_file_id is None
    errors = lines_of(alice, batch.error_file_id)
    assert [each["custom_id"] for each in errors] == [f"line {number}" for number in range(5)]
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    with pytest.raises(openai.NotFoundError):
        alice.files.retrieve(file.id)
    files = server.server.config.app.state.batches.files
    wait_for(lambda: not files.path(file.id).exists())
    clock(31 * 86_400)  # then nobody knows of it
    wait_for(lambda: batch.id not in [each.id for each in alice.batches.list()])
    assert list(alice.files.list()) == []


def test_a_full_disk_is_waited_for(
    alice: openai.OpenAI, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maskdial.batches.worker._RETRY_SECONDS", 0.05)
    real, is_full = os.write, True

    def write(file: int, content: bytes) -> int:
        if is_full:
            raise OSError(28, "No space left on device")
        return real(file, content)

    monkeypatch.setattr("maskdial.batches.output.os.write", write)
    batch = begin(alice, encode(classify(1)))
    wait_for(lambda: alice.batches.retrieve(batch.id).status == "in_progress")
    time.sleep(0.2)
    assert alice.batches.retrieve(batch.id).status == "in_progress"
    is_full = False
    batch = finish(alice, batch)
    assert batch.status == "completed"
    assert len(lines_of(alice, batch.output_file_id)) == 1

    def refuse(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("maskdial.batches.output.sync_folder", refuse)
    with pytest.raises(openai.InternalServerError, match="the disk for the server's files is full"):
        begin(alice, encode(classify(1)))


def test_a_folder_belongs_to_one_server(
    server: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = server.server.config.app.state.batches.storage.work.parent
    arguments = ["serve", "--port", "0", "--batch-dir"]
    assert cli.main([*arguments, str(folder)]) == 1
    assert "another server has the folder" in capsys.readouterr().err
    (tmp_path / "file").write_bytes(b"")
    assert cli.main([*arguments, str(tmp_path / "file" / "batches")]) == 1
    assert "--batch-dir cannot be written or locked: Not a directory" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_that_is_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    """However it is; the results are those of a batch that nobody disturbed."""
    lines = [classify(number) for number in range(5000)]
    lines[700]["body"] = {"model": "sentiment", "inputs": ""}
    num_done, batch_id = [0], ""
    for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, None):
        process = Process("--batch-dir", str(tmp_path / "batches"))
        with (
            contextlib.closing(process),
            openai.OpenAI(base_url=f"{process.url}/v1", api_key="none") as client,
        ):
            process.wait_until_ready()
            batch_id = batch_id or begin(client, encode(*lines)).id
            if how is None:
                batch = finish(client, client.batches.retrieve(batch_id))
                results = lines_of(client, batch.output_file_id)
                errors = lines_of(client, batch.error_file_id)
                assert len(client.files.list().data) == 3
                break
            path = journal_path(tmp_path / "batches" / "work" / batch_id / "results.jsonl")
            while (journal := Journal.read(path)) is None or journal.number <= num_done[-1]:
                assert client.batches.retrieve(batch_id).status in ("validating", "in_progress")
            num_done.append(journal.number)
            process.process.send_signal(how)
            assert process.process.wait(60) == (0 if how == signal.SIGTERM else -signal.SIGKILL)
    assert num_done[-1] < len(lines)
    order = [line["custom_id"] for number, line in enumerate(lines) if number != 700]
    assert [each["custom_id"] for each in results] == order
    assert [each["custom_id"] for each in errors] == ["line 700"]
    assert not list((tmp_path / "batches" / "work").iterdir())
    source = tmp_path / "in.jsonl"
    source.write_bytes(encode(*lines))
    once = tmp_path / "once.jsonl"
    assert cli.main(["batch", str(source), str(once), "--bundle", str(MODELS["sentiment"])]) == 1
    assert [json.loads(line)["response"]["body"] for line in once.read_text().splitlines()] == [
        each["response"]["body"] for each in results
    ]
