"""Memory that a request causes ends with the request: 200 more of each kind leave nothing behind.

The resident memory of a server process, from a collection of its garbage to the moment before the
next one, with free memory given back both times: reference cycles count as kept. Most kinds keep
0 to 0.1 MB, none more than 1.1 MB, an arena of Python's allocator. Some keep 5 MB
once, when an arena of a session grows, so the best of several rounds counts: what each request
keeps is kept in every round. 20 KB a request are 4 MB.
"""

import asyncio
import contextlib
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from loadtests.kinds import (
    ADMIN_KEY,
    KEY,
    KINDS,
    SETTINGS,
    Kind,
    ask_kind,
    chatting_starters,
    inputs,
    text,
    word,
)
from loadtests.server import ServerProcess, running_server
from maskdial.bundle.bundle import read_manifests, write_manifest
from maskdial.bundle.manifest import Embedding, MultiVector
from maskdial.registry.catalog import STARTER_FOLDER
from tests.page import bundles

pytestmark = pytest.mark.slow

_REQUESTS = 200
_LOADS = 20
_ROUNDS = 4
_MAX_BYTES = 2_000_000
_SETTLE_SECONDS = 0.05
BEARER = {"Authorization": f"Bearer {KEY}"}
NEED_TORCH = {"/summarize", "/translate"}
"""Routes of models that only an export makes."""


def _texts(number: int) -> list[str]:
    return [text(number), word(number)]


_LOADED = {"model": "spare"}
_ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
TASKS = (
    Kind("token-classify", "/token-classify", inputs("tagger")),
    Kind(
        "question-answering",
        "/question-answering",
        lambda n: {"inputs": {"context": text(n), "question": "Who lived?"}},
    ),
    Kind(
        "zero-shot-classify",
        "/zero-shot-classify",
        lambda n: {"inputs": text(n), "parameters": {"candidate_labels": [word(n), "sea"]}},
    ),
    Kind("rerank", "/rerank", lambda n: {"model": "ranker", "query": word(n), "texts": _texts(n)}),
    Kind(
        "rerank documents",
        "/rerank",
        lambda n: {"model": "ranker", "query": word(n), "documents": _texts(n)},
    ),
    Kind(
        "v1 rerank",
        "/v1/rerank",
        lambda n: {"model": "ranker", "query": word(n), "documents": _texts(n)},
    ),
    Kind(
        "v2 rerank",
        "/v2/rerank",
        lambda n: {"model": "ranker", "query": word(n), "documents": _texts(n)},
    ),
    Kind("embed", "/embed", lambda n: {"inputs": _texts(n), "model": "embedder"}),
    Kind("embed-sparse", "/embed-sparse", inputs("sparse")),
    Kind("embed-all", "/embed-all", inputs("late")),
    Kind(
        "similarity",
        "/similarity",
        lambda n: {"inputs": {"source_sentence": word(n), "sentences": _texts(n)}},
    ),
    Kind("embeddings", "/v1/embeddings", lambda n: {"input": _texts(n), "model": "embedder"}),
    Kind("503", "/classify", inputs("spare"), 503),
    Kind(
        "load and unload",
        "/models/load",
        lambda _: _LOADED,
        headers=_ADMIN,
        num_clients=1,
        then=Kind("unload", "/models/unload", lambda _: _LOADED, headers=_ADMIN),
    ),
    Kind(
        "v2 load and unload",
        "/v2/repository/models/{name}/load",
        lambda _: {},
        headers=_ADMIN,
        target="/v2/repository/models/spare/load",
        num_clients=1,
        then=Kind(
            "v2 unload",
            "/v2/repository/models/{name}/unload",
            lambda _: {},
            headers=_ADMIN,
            target="/v2/repository/models/spare/unload",
        ),
    ),
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A process with a model for each route, and one to load."""
    folder = tmp_path_factory.mktemp("models")
    models = chatting_starters(folder) | {
        "tagger": bundles.make_tagger(folder / "tagger"),
        "reader": bundles.make_reader(folder / "reader"),
        "nli": bundles.make_nli(folder / "nli"),
        "ranker": bundles.make_ranker(folder / "ranker"),
        "embedder": bundles.make_embedder(folder / "embedder"),
    }
    vector = Embedding(dimension=192, pooling="max", normalized=False)
    models["sparse"] = _other_task(models["embedder"], folder / "sparse", "embed-sparse", vector)
    vectors = Embedding(dimension=4, pooling="", normalized=True, multi_vector=MultiVector())
    models["late"] = _other_task(models["tagger"], folder / "late", "embed-all", vectors)
    shelf = folder / "shelf"
    shutil.copytree(STARTER_FOLDER / "sentiment", shelf / "spare")
    with running_server(
        models, collecting=True, threads=1, model_dir=shelf, models_autoload="off", **SETTINGS
    ) as process:
        yield process


def _other_task(bundle: Path, folder: Path, task: str, embedding: Embedding) -> Path:
    shutil.copytree(bundle, folder)
    (manifest,) = read_manifests(bundle.name, folder)
    changes = {"task": task, "embedding": embedding, "labels": ()}
    write_manifest(folder, manifest.model_copy(update=changes))
    return folder


@pytest.mark.parametrize("kind", [*KINDS, *TASKS], ids=lambda kind: kind.name.replace("/", " "))
def test_memory_ends_with_the_request(server: ServerProcess, kind: Kind) -> None:
    assert _kept(server, kind) <= _MAX_BYTES


def test_every_route_is_asked(server: ServerProcess) -> None:
    steps = [*KINDS, *TASKS, *(kind.then for kind in TASKS if kind.then is not None)]
    document = httpx.get(f"{server.url}/openapi.json", headers=BEARER).json()
    assert set(document["paths"]) - {step.path for step in steps} == NEED_TORCH


def test_requests_that_keep_20_kb_each_are_found(server: ServerProcess) -> None:
    """Those whose headers are not complete: the server keeps what has come of them."""
    head = "GET /info HTTP/1.1\r\n" + "".join(f"x-{n}: {'x' * 1000}\r\n" for n in range(20))
    with contextlib.ExitStack() as stack:

        def ask(numbers: range) -> None:
            for _ in numbers:
                client = socket.create_connection(("127.0.0.1", server.port))
                stack.enter_context(client).sendall(head.encode())

        assert _kept_of(server, ask, _REQUESTS) > _MAX_BYTES


def _kept(server: ServerProcess, kind: Kind) -> int:
    """See `_kept_of`."""
    # Loading a model takes as long as a hundred requests to it.
    number = _LOADS if kind.then is not None else _REQUESTS
    return _kept_of(
        server, lambda numbers: asyncio.run(ask_kind(server.port, kind, numbers)), number
    )


def _kept_of(server: ServerProcess, ask: Callable[[range], None], num_requests: int) -> int:
    """The bytes that so many requests leave, garbage included, in the best of several rounds."""
    ask(range(num_requests // 4))
    _, held = _collect(server)
    kept: list[int] = []
    while len(kept) < _ROUNDS and min(kept, default=_MAX_BYTES + 1) > _MAX_BYTES:
        ask(range(num_requests * (1 + len(kept)), num_requests * (2 + len(kept))))
        with_garbage, now = _collect(server)
        kept.append(with_garbage - held)
        held = now
    return min(kept)


def _collect(server: ServerProcess) -> tuple[int, int]:
    time.sleep(_SETTLE_SECONDS)  # the last reply was read before its request ended
    return server.collect()
