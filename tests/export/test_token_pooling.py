"""Vectors of tokens pooled as sentence-transformers pools them: by modules, and by request."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

from maskdial.bundle.manifest import TokenPooling
from maskdial.masked.tasks.token_pooling import pool_tokens
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from tests.export.test_multi_vector import DOCUMENTS, QUERIES, make_saved

TOLERANCE = 1e-5
LONG = "the ship left as it did before, at noon"
TEXTS = [*DOCUMENTS, LONG]


def unit(rng: np.random.Generator, count: int, size: int) -> NDArray[np.float32]:
    vectors = rng.standard_normal((count, size)).astype(np.float32)
    made: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return made


def test_clusters_are_scipys() -> None:
    """Also their order, for any number of vectors; but where distances are equal to the last bit,
    as fastcluster's do not agree with SciPy's either.
    """
    rng = np.random.default_rng(0)
    for _ in range(400):
        vectors = unit(rng, int(rng.integers(0, 60)), int(rng.integers(2, 24)))
        factor = float(rng.choice([1, 1.5, 2, 3, 4.7, 100]))
        protected, normalizes = int(rng.integers(0, 4)), bool(rng.integers(0, 2))
        pooling = HierarchicalTokenPooling(
            factor, num_protected_tokens=protected, normalize_embeddings=normalizes
        )
        (expected,) = pooling.pool([torch.tensor(vectors)])
        found = pool_tokens(
            vectors, TokenPooling(factor=factor, protected=protected, normalizes=normalizes)
        )
        assert found.dtype == np.float32
        assert found.shape == tuple(expected.shape)
        np.testing.assert_allclose(found, expected.numpy(), atol=TOLERANCE)


def test_equal_vectors_become_one() -> None:
    vectors = np.repeat(np.eye(4, dtype=np.float32), 5, axis=0)
    found = pool_tokens(vectors, TokenPooling(factor=5, protected=0))
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, np.eye(4).tolist()))


@pytest.fixture(scope="module")
def source(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that pools documents by 2, all but their first two tokens."""
    folder = tmp_path_factory.mktemp("pooled") / "saved"
    make_saved(checkpoint, folder)
    model = MultiVectorEncoder(str(folder), device="cpu")
    model.append(HierarchicalTokenPooling(2.0, num_protected_tokens=2))
    pooled = folder.with_name("pooled")
    model.save(str(pooled))
    return pooled


@pytest.fixture(scope="module")
def url(source: Path, serve: Callable[..., str]) -> str:
    bundles = {"pooled": source.with_name("bundle"), "plain": source.with_name("plain-bundle")}
    export(str(source), bundles["pooled"])
    export(str(source.with_name("saved")), bundles["plain"])
    return serve(**bundles)


def asked(url: str, **body: Any) -> list[NDArray[np.float32]]:
    reply = httpx.post(f"{url}/embed-all", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return [np.array(each, np.float32) for each in reply.json()]


def test_modules_pool_documents(source: Path, url: str) -> None:
    """Not queries, of vectors that are those of sentence-transformers, alone and with others."""
    reference = MultiVectorEncoder(str(source), device="cpu")
    for role, texts in (("document", TEXTS), ("query", QUERIES)):
        encode = reference.encode_query if role == "query" else reference.encode_document
        expected = encode(texts, convert_to_numpy=True)
        found = asked(url, model="pooled", inputs=texts, prompt_name=role)
        for text, each, of in zip(texts, found, expected, strict=True):
            assert each.shape == of.shape
            np.testing.assert_allclose(each, of, atol=TOLERANCE)
            (alone,) = asked(url, model="pooled", inputs=text, prompt_name=role)
            np.testing.assert_array_equal(alone, each)
    whole = asked(url, model="plain", inputs=TEXTS)
    assert sum(map(len, whole)) > sum(map(len, asked(url, model="pooled", inputs=TEXTS)))


def test_a_request_pools_as_it_says(source: Path, url: str) -> None:
    """In place of what the modules say."""
    plain = MultiVectorEncoder(str(source.with_name("saved")), device="cpu")
    pooling = HierarchicalTokenPooling(3.0)
    expected = plain.encode_document(TEXTS, convert_to_numpy=True, token_pooling=pooling)
    found = asked(url, model="plain", inputs=TEXTS, pool_factor=3)
    for each, of in zip(found, expected, strict=True):
        np.testing.assert_allclose(each, of, atol=TOLERANCE)
    whole = asked(url, model="plain", inputs=TEXTS, pool_factor=1)
    for each, of in zip(
        asked(url, model="pooled", inputs=TEXTS, pool_factor=1), whole, strict=True
    ):
        np.testing.assert_allclose(each, of, atol=TOLERANCE)


def test_documents_are_compared_as_they_are_pooled(source: Path, url: str) -> None:
    reference = MultiVectorEncoder(str(source), device="cpu")
    expected = reference.similarity(
        reference.encode_query(QUERIES[:1]), reference.encode_document(TEXTS)
    )[0]
    body = {"model": "pooled", "query": QUERIES[0], "texts": TEXTS}
    found: Any = httpx.post(f"{url}/rerank", json=body, timeout=60).json()
    for each in found:
        assert each["score"] == pytest.approx(float(expected[each["index"]]), abs=1e-4)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"pool_factor": 2, "prompt_name": "query"}, "pool_factor: model 'plain' pools the tokens"),
        ({"pool_factor": 0.5}, "pool_factor: must be"),
        ({"pool_factor": "two"}, "pool_factor: Input should be a valid number"),
    ],
)
def test_requests_that_cannot_be_pooled(url: str, body: dict[str, Any], told: str) -> None:
    reply = httpx.post(f"{url}/embed-all", json={"model": "plain", "inputs": "x"} | body)
    assert reply.status_code == 422
    assert told in reply.json()["error"]


def test_modules_that_are_refused(source: Path, tmp_path: Path) -> None:
    def refused(change: Callable[[Path], object]) -> str:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        change(folder)
        with pytest.raises(ExportError) as caught:
            export(str(folder), tmp_path / "bundle")
        return caught.value.message

    def last(folder: Path, **entries: Any) -> None:
        path = folder / "modules.json"
        modules = json.loads(path.read_text())
        modules.append(modules[-1] | {"idx": len(modules), "name": "last"} | entries)
        path.write_text(json.dumps(modules))

    def settings(folder: Path, **entries: Any) -> None:
        (path,) = folder.glob("*_HierarchicalTokenPooling/config.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    lambdas = "sentence_transformers.multi_vector_encoder.modules.LambdaTokenPooling"
    assert "behind HierarchicalTokenPooling" in refused(lambda folder: last(folder, type=lambdas))
    assert "'linkage' of its Hier" in refused(lambda folder: settings(folder, linkage="ward"))
    assert "factor: Input should be" in refused(lambda folder: settings(folder, pool_factor=0))
