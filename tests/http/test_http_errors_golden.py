"""All error replies are as recorded in ``error_replies.txt``: every route, every kind of bad input.

After a change that is meant, ``TESTS_RECORD=1`` writes the file anew, and its difference is to be
read.
"""

import difflib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from maskdial.app import create_app
from maskdial.bundle.bundle import hash_files, read_manifests, write_manifest
from maskdial.bundle.manifest import Embedding
from maskdial.config import Config
from maskdial.registry.catalog import STARTER_FOLDER
from tests.http.error_cases import ADMIN, BODIES, NAMES, REFUSED, Case, cases

RECORD = Path(__file__).parents[1] / "data" / "error_replies.txt"
KEY, ADMIN_KEY = "sesame", "root"
ELSEWHERE = [
    ("POST", "/nowhere"),
    ("POST", "/v1/nowhere"),
    ("POST", "/v1/messages/nowhere"),
    ("POST", "/models/nobody"),
    ("POST", "/models/nobody/v1/chat/completions"),
    ("GET", "/v1/models/nobody"),
    ("GET", "/v1/responses/resp_1"),
    ("GET", "/v2/models/nobody"),
    ("GET", "/v2/models/nobody/ready"),
    ("GET", "/v2/models/hybrid/versions/2"),
    ("GET", "/v2/models/hybrid/versions/2/ready"),
    ("POST", "/v2/models/hybrid/versions/2/infer"),
    ("GET", "/tokenizer_info?model=nobody"),
    ("GET", "/tokenizer_info?model=hybrid&surprise=1"),
    ("POST", "/v2/repository/models/nobody/load"),
    ("DELETE", "/v1/models/hybrid"),
    ("POST", "/api/nowhere"),
    ("DELETE", "/api/delete"),
]
# The graph has one row of two numbers for a text: enough for what is refused before it runs.
HEADS: dict[str, dict[str, Any]] = {
    "embed": {"task": "embed"},
    "embed-sparse": {"task": "embed-sparse"},
    "embed-all": {"task": "embed-all"},
    "rerank": {"task": "rerank"},
    "tags": {"task": "token-classify"},
    "answers": {"task": "question-answering"},
    "zero-shot": {"labels": ("entailment", "contradiction")},
}


def make_head(folder: Path, changes: dict[str, Any]) -> Path:
    """The sentiment starter, said to have another head."""
    shutil.copytree(STARTER_FOLDER / "sentiment", folder)
    (manifest,) = read_manifests("head", folder)
    if changes.get("task", "").startswith("embed"):
        pooled = Embedding(dimension=2, pooling="mean", normalized=False)
        changes = {**changes, "embedding": pooled}
    files = hash_files(folder, manifest.files)
    write_manifest(folder, manifest.model_copy(update={"files": files} | changes))
    return folder


@pytest.fixture(scope="module")
def http(
    start_server: Callable[..., Any],
    chat_bundle: Path,
    masked_starter: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[httpx.Client]:
    """A client, with its key, of a server that has a model for all tasks but a source text's."""
    folder = tmp_path_factory.mktemp("heads")
    heads = {name: make_head(folder / name, each) for name, each in HEADS.items()}
    starters = {name: STARTER_FOLDER / name for name in ("hybrid", "sentiment")}
    server = start_server(
        models={**starters, "chat": chat_bundle, "masked": masked_starter, **heads},
        api_keys=[KEY],
        admin_key=ADMIN_KEY,
        batch_dir=folder / "batches",
        max_body_bytes=250_000,
        max_queue=256,
        slots=2,
    )
    headers = {"x-api-key": KEY, "content-type": "application/json"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield client
    server.stop()


def written(reply: httpx.Response) -> str:
    """An error in full; that there was none, otherwise."""
    if reply.status_code < 400:
        return f"{reply.status_code}, answered"
    body = reply.json() if "json" in reply.headers.get("content-type", "") else reply.text
    text = f"{reply.status_code} {json.dumps(body, ensure_ascii=False)}"
    return re.sub(r"\b[0-9a-f]{32}\b|req_\w+", "(id)", text)


def replies(http: httpx.Client, path: str, document: Any) -> Iterator[tuple[str, str]]:
    """What is sent to a path, and what comes back."""
    url = path.replace("{name}", NAMES.get(path, "")).replace("{version}", "1")
    key = {"x-api-key": ADMIN_KEY} if path.startswith(ADMIN) else {}
    body = Case().body(path)
    if path not in REFUSED:
        reply = http.post(url, content=body, headers=key)
        assert reply.status_code == 200, (path, reply.text)
    for name, headers in (("no key", {"x-api-key": ""}), ("wrong key", {"x-api-key": "no"})):
        yield name, written(http.post(url, content=body, headers=headers))
    if key:
        yield "not the admin's key", written(http.post(url, content=body))
    yield "PUT", written(http.put(url, content=body))
    for case in cases(path, document):
        reply = http.post(url, content=case.body(path), headers=key)
        assert reply.status_code != 500, (path, str(case), reply.text)
        yield str(case), written(reply)


def record(http: httpx.Client) -> Iterator[str]:
    document = http.get("/openapi.json").json()
    for path in BODIES:
        yield f"== POST {path}"
        for sent, reply in replies(http, path, document):
            yield sent
            yield f"    {reply}"
    yield "== elsewhere"
    for method, path in ELSEWHERE:
        yield f"{method} {path}"
        yield f"    {written(http.request(method, path, content=b'{}'))}"


def test_every_post_route_has_its_cases() -> None:
    routes = [each for each in create_app(Config()).routes if isinstance(each, Route)]
    assert {each.path_format for each in routes if "POST" in (each.methods or ())} == set(BODIES)


@pytest.mark.slow
def test_error_replies_are_as_recorded(http: httpx.Client) -> None:
    found = list(record(http))
    if "TESTS_RECORD" in os.environ:
        RECORD.write_text("\n".join(found) + "\n", encoding="utf-8")
    expected = RECORD.read_text(encoding="utf-8").splitlines()
    difference = difflib.unified_diff(expected, found, "recorded", "replied", lineterm="")
    assert found == expected, "\n".join(difference)
