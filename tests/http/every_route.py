"""Requests to the routes that the starters do not serve, and models that do."""

import shutil
from pathlib import Path

from loadtests.kinds import ADMIN_KEY, Kind, chatting_starters, inputs, text, word
from maskdial.bundle.bundle import read_manifests, write_manifest
from maskdial.bundle.manifest import Embedding, MultiVector
from tests.page import bundles

NEED_TORCH = {"/embed-hybrid", "/extract", "/summarize", "/translate"}
"""Routes of models that only an export makes."""


def _texts(number: int) -> list[str]:
    return [text(number), word(number)]


_LOADED = {"model": "spare"}
_ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
TASKS = (
    Kind("token-classify", "/token-classify", inputs("tagger")),
    Kind("redact", "/redact", inputs("tagger")),
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
    Kind(
        "v1 score",
        "/v1/score",
        lambda n: {"model": "ranker", "text_1": word(n), "text_2": _texts(n)},
    ),
    Kind(
        "score pairs",
        "/score",
        lambda n: {"model": "embedder", "text_1": _texts(n), "text_2": _texts(n + 1)},
    ),
    Kind("embed", "/embed", lambda n: {"inputs": _texts(n), "model": "embedder"}),
    Kind(
        "predict",
        "/predict",
        lambda n: {"inputs": [[text(n)], [word(n), "sea"]], "model": "sentiment"},
    ),
    Kind("decode", "/decode", lambda n: {"ids": [n % 100], "model": "hybrid"}),
    Kind("tei embeddings", "/embeddings", lambda n: {"input": text(n), "model": "embedder"}),
    Kind(
        "vertex",
        "/vertex",
        lambda n: {"instances": [{"inputs": text(n)}, {"inputs": word(n)}], "model": "embedder"},
    ),
    Kind("invocations", "/invocations", inputs("embedder")),
    Kind("root", "/", inputs("embedder")),
    Kind("embed-sparse", "/embed-sparse", inputs("sparse")),
    Kind("embed-all", "/embed-all", inputs("late")),
    Kind("embed-chunks", "/embed-chunks", inputs("late", chunks=[[0, 12], [8, 30]])),
    Kind(
        "similarity",
        "/similarity",
        lambda n: {"inputs": {"source_sentence": word(n), "sentences": _texts(n)}},
    ),
    Kind("embeddings", "/v1/embeddings", lambda n: {"input": _texts(n), "model": "embedder"}),
    Kind("cohere embed", "/v2/embed", lambda n: {"texts": _texts(n), "model": "embedder"}),
    Kind("cohere embed v1", "/v1/embed", lambda n: {"texts": _texts(n), "model": "embedder"}),
    Kind("ollama embed", "/api/embed", lambda n: {"input": _texts(n), "model": "embedder"}),
    Kind("ollama vector", "/api/embeddings", lambda n: {"prompt": text(n), "model": "embedder"}),
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


def make_models(folder: Path) -> dict[str, Path]:
    """A bundle for each route that can be served without torch, by its name."""
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
    return models


def _other_task(bundle: Path, folder: Path, task: str, embedding: Embedding) -> Path:
    shutil.copytree(bundle, folder)
    (manifest,) = read_manifests(bundle.name, folder)
    changes = {"task": task, "embedding": embedding, "labels": ()}
    write_manifest(folder, manifest.model_copy(update=changes))
    return folder
