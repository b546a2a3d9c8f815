"""Anthropic's `/v1/messages/batches`, by what its SDK sends and reads."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.held import held
from tests.servers import PATIENCE, engine_of

PATH = "/v1/messages/batches"
KEYS = "alice:one\nbob:two\n"


@pytest.fixture(scope="module")
def server(
    start_server: Callable[..., Any], chat_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("batches")
    (folder / "keys").write_text(KEYS)
    running = start_server(
        models={"chat": chat_bundle}, batch_dir=folder / "batches", api_key_file=folder / "keys"
    )
    yield running
    running.stop()


@pytest.fixture(scope="module")
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"x-api-key": "one"}, timeout=60) as client:
        yield client


def asked(name: str, **params: Any) -> dict[str, Any]:
    """A request of a batch."""
    messages = [{"role": "user", "content": f"Tell me of {name}."}]
    body = {"model": "chat", "max_tokens": 8, "temperature": 0, "messages": messages}
    return {"custom_id": name, "params": body | params}


def create(http: httpx.Client, *requests: dict[str, Any]) -> Any:
    reply = http.post(PATH, json={"requests": requests})
    assert reply.status_code == 200, reply.text
    return reply.json()


def ended(http: httpx.Client, batch: Any) -> Any:
    """A batch when nothing happens to it any more."""
    until = time.monotonic() + PATIENCE
    while batch["processing_status"] != "ended":
        assert time.monotonic() < until, batch
        time.sleep(0.02)
        batch = http.get(f"{PATH}/{batch['id']}").json()
    return batch


def results(http: httpx.Client, batch: Any) -> dict[str, Any]:
    reply = http.get(batch["results_url"])
    assert reply.status_code == 200, reply.text
    lines = map(json.loads, reply.text.splitlines())
    return {line["custom_id"]: line["result"] for line in lines}


def test_a_batch_is_answered_as_its_requests_alone(http: httpx.Client) -> None:
    requests = [asked("a king"), asked("a queen"), asked("the sea", max_tokens=0)]
    batch = create(http, *requests)
    assert batch["id"].startswith("msgbatch_")
    assert (batch["type"], batch["processing_status"]) == ("message_batch", "in_progress")
    assert batch["results_url"] is batch["ended_at"] is batch["archived_at"] is None
    assert batch["request_counts"]["processing"] == 3
    batch = ended(http, batch)
    counts = {"processing": 0, "succeeded": 2, "errored": 1, "canceled": 0, "expired": 0}
    assert batch["request_counts"] == counts
    assert batch["ended_at"] >= batch["created_at"]
    found = results(http, batch)
    for request in requests[:2]:
        result = found[request["custom_id"]]
        assert result["type"] == "succeeded"
        alone = http.post("/v1/messages", json=request["params"]).json()
        assert result["message"]["content"] == alone["content"]
    failed = found["the sea"]
    assert (failed["type"], failed["error"]["type"]) == ("errored", "error")
    assert failed["error"]["error"]["message"].startswith("max_tokens: must be at least 1")


def test_batches_of_a_model_that_does_not_exist_have_errors_only(http: httpx.Client) -> None:
    batch = ended(http, create(http, asked("a", model="nobody"), asked("b", model="nobody")))
    assert batch["request_counts"]["errored"] == 2
    found = results(http, batch)
    assert found.keys() == {"a", "b"}
    assert {each["type"] for each in found.values()} == {"errored"}
    assert "no model 'nobody'" in found["a"]["error"]["error"]["message"]


def test_the_requests_of_a_batch_may_name_several_models(http: httpx.Client) -> None:
    models = {"a": "chat", "b": "chat:latest", "c": "nobody", "d": "chat"}
    batch = ended(http, create(http, *(asked(name, model=model) for name, model in models.items())))
    counts = batch["request_counts"]
    assert (counts["succeeded"], counts["errored"]) == (3, 1)
    found = results(http, batch)
    assert "no model 'nobody'" in found["c"]["error"]["error"]["message"]
    assert {name for name, each in found.items() if each["type"] == "succeeded"} == {*"abd"}
    # One that is no model's name in the first request is that request's error only.
    batch = ended(http, create(http, asked("a", model="nobody"), asked("b")))
    assert {each["type"] for each in results(http, batch).values()} == {"errored", "succeeded"}


def test_lists_are_of_pages(http: httpx.Client) -> None:
    ids = [create(http, asked("a"))["id"] for _ in range(3)][::-1]
    page = http.get(PATH, params={"limit": 2}).json()
    assert [each["id"] for each in page["data"]] == ids[:2]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (True, ids[0], ids[1])
    page = http.get(PATH, params={"limit": 1, "after_id": ids[1]}).json()
    assert [each["id"] for each in page["data"]] == ids[2:]
    page = http.get(PATH, params={"limit": 1, "before_id": ids[2]}).json()
    assert ([each["id"] for each in page["data"]], page["has_more"]) == (ids[1:2], True)
    page = http.get(PATH, headers={"x-api-key": "two"}).json()
    assert page == {"data": [], "has_more": False, "first_id": None, "last_id": None}
    assert http.get(PATH, params={"limit": 0}).status_code == 400
    assert http.get(PATH, params={"after_id": "msgbatch_1"}).status_code == 404


def test_what_is_canceled_has_a_result_for_each_request(server: Any, http: httpx.Client) -> None:
    with held(engine_of(server, "chat")):
        batch = create(http, *(asked(f"king {number}") for number in range(20)))
        assert http.delete(f"{PATH}/{batch['id']}").status_code == 400
        assert http.get(f"{PATH}/{batch['id']}/results").status_code == 400
        batch = http.post(f"{PATH}/{batch['id']}/cancel").json()
        assert batch["processing_status"] in ("canceling", "ended")
        assert batch["cancel_initiated_at"] is not None
    batch = ended(http, batch)
    kinds = Counter(each["type"] for each in results(http, batch).values())
    counts = batch["request_counts"]
    assert kinds.total() == sum(counts.values()) == 20
    assert kinds["canceled"] == counts["canceled"] > 0


def test_what_is_late_has_expired(server: Any, http: httpx.Client) -> None:
    service = server.server.config.app.state.batches
    with held(engine_of(server, "chat")), pytest.MonkeyPatch.context() as patch:
        batch = create(http, *(asked(f"king {number}") for number in range(20)))
        for part in (service, service.files, service.jobs, service.worker):
            patch.setattr(part, "_clock", lambda: time.time() + 86_401)
        service.worker.notice()
        batch = ended(http, batch)
    kinds = Counter(each["type"] for each in results(http, batch).values())
    counts = batch["request_counts"]
    assert kinds["expired"] == counts["expired"] > 0
    assert kinds.total() == sum(counts.values()) == 20


def test_a_batch_is_deleted_with_its_files(http: httpx.Client) -> None:
    batch = ended(http, create(http, asked("a")))
    files = len(http.get("/v1/files").json()["data"])
    reply = http.delete(f"{PATH}/{batch['id']}")
    assert reply.json() == {"id": batch["id"], "type": "message_batch_deleted"}
    assert http.get(f"{PATH}/{batch['id']}").status_code == 404
    assert len(http.get("/v1/files").json()["data"]) == files - 2


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "requests: must have between 1 and"),
        ([asked("a"), asked("a")], "requests[1].custom_id: 'a' is there twice"),
        ([asked("a", stream=True)], "requests[0].params.stream: a batch has whole replies"),
        ([{"custom_id": "a"}], "requests[0].params: this field is required"),
    ],
)
def test_what_is_refused(http: httpx.Client, requests: list[Any], words: str) -> None:
    reply = http.post(PATH, json={"requests": requests})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert reply.json()["error"]["message"].startswith(words)


def test_batches_of_others_are_not_found(http: httpx.Client) -> None:
    batch = create(http, asked("a"))
    other = {"x-api-key": "two"}
    for method, path in (("GET", ""), ("GET", "/results"), ("DELETE", ""), ("POST", "/cancel")):
        reply = http.request(method, f"{PATH}/{batch['id']}{path}", headers=other)
        assert reply.status_code == 404
        assert reply.json()["error"]["type"] == "not_found_error"
