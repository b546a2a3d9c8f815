"""Sparse models whose queries need no inference: sentence-transformers' Router, by request."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules.router import Router
from sentence_transformers.sparse_encoder.modules import (
    MLMTransformer,
    SparseStaticEmbedding,
    SpladePooling,
)

from maskdial.bundle.bundle import load_bundle
from maskdial.bundle.manifest import QUERY_WEIGHTS
from maskdial.errors import BundleError
from maskdial_export.checkpoint.router import find_router
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from tests.export.conftest import VOCABULARY, add_json

New = Callable[[str], Path]
TEXTS = ["the baker repaired the old bridge", "a", "nobody here, at all.", "x" * 30, ""]


def save_router(folder: Path, backbone: Path, default: str | None = None) -> Path:
    """As opensearch-neural-sparse-encoding-doc-v3, with random weights."""
    model = MLMTransformer(str(backbone))
    words = len(VOCABULARY)
    weights = torch.rand(words, generator=torch.manual_seed(3))
    weights[::5] = 0
    queries = SparseStaticEmbedding(model.tokenizer, weight=weights, frozen=True)
    documents = [model, SpladePooling(activation_function="log1p_relu")]
    router = Router.for_query_document([queries], documents, default_route=default)
    SparseEncoder(modules=[router], device="cpu").save(str(folder))
    return folder


@pytest.fixture(scope="module")
def saved(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_router(tmp_path_factory.mktemp("router") / "saved", backbone)


def test_a_request_takes_the_route_that_it_names(
    saved: Path, tmp_path: Path, start_server: Callable[..., Any]
) -> None:
    bundle = tmp_path / "bundle"
    manifest = export(str(saved), bundle)
    assert manifest.task == "embed-sparse"
    assert manifest.source == "saved"
    assert QUERY_WEIGHTS in manifest.files
    url = start_server(models={"router": bundle}).url
    reference = SparseEncoder(str(saved), device="cpu")

    def ask(**asked: Any) -> Any:
        reply = httpx.post(f"{url}/embed-sparse", json={"inputs": TEXTS[:4], **asked})
        assert reply.status_code == 200, reply.text
        return reply

    for name, encode in (
        ("query", reference.encode_query),
        ("document", reference.encode_document),
    ):
        expected = encode(TEXTS[:4], convert_to_sparse_tensor=False).numpy()
        reply = ask(prompt_name=name)
        for vector, weights in zip(expected, reply.json(), strict=True):
            found = np.zeros_like(vector)
            found[[each["index"] for each in weights]] = [each["value"] for each in weights]
            np.testing.assert_allclose(found, vector, rtol=0, atol=2e-5)
    # No route is named: that of sentence-transformers, the first one
    default = reference.encode(TEXTS[:4], convert_to_sparse_tensor=False).numpy()
    assert [len(each) for each in ask().json()] == [int((each != 0).sum()) for each in default]
    for asked, why in (
        ({"inputs": ["x y " * 400], "prompt_name": "query"}, "takes at most"),
        ({"inputs": ["a"], "prompt_name": "queries"}, "no prompt 'queries'"),
    ):
        refused = httpx.post(f"{url}/embed-sparse", json=asked)
        assert refused.status_code == 422
        assert why in refused.text


def test_a_bundle_whose_weights_are_others_is_not_served(saved: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    export(str(saved), bundle)
    opened = load_bundle("router", bundle)
    for wrong in (np.zeros(3, np.float32), np.full(len(VOCABULARY), np.nan, np.float32)):
        np.save(bundle / QUERY_WEIGHTS, wrong)
        with pytest.raises(BundleError, match=r"is not a list of \d+ finite weights"):
            opened.query_weights()
    for damaged in (b"", b"PK\x05\x06" + bytes(18), b"\x93NUMPY"):
        (bundle / QUERY_WEIGHTS).write_bytes(damaged)
        with pytest.raises(BundleError, match=f"{QUERY_WEIGHTS}: "):
            opened.query_weights()


@pytest.mark.parametrize(
    ("route", "prompt", "default"),
    [
        ("document", None, "query"),
        ("query", None, "document"),
        ("query", "other", None),
        ("query", "other", "other"),
        (None, "other", None),
        ("document", "other", "other"),
    ],
)
def test_prompts_of_another_route_than_the_default_one(
    route: str | None,
    prompt: str | None,
    default: str | None,
    backbone: Path,
    tmp_path: Path,
) -> None:
    """In sentence-transformers a text takes the default route under any prompt but the routes'."""
    source = save_router(tmp_path / "source", backbone, route)
    prompts = {} if prompt is None else {prompt: "the "}
    add_json(
        source / "config_sentence_transformers.json", prompts=prompts, default_prompt_name=default
    )
    router = find_router("source", source)
    assert router is not None
    (tmp_path / "restored").mkdir()
    if route == "document" and default != "query":
        router.restore(source, tmp_path / "restored")
        return
    with pytest.raises(ExportError, match="by default, and has the prompt"):
        router.restore(source, tmp_path / "restored")


def test_routes_that_are_refused(saved: Path, backbone: Path, tmp_path: Path) -> None:
    def refused(why: str, change: Callable[[Path], object]) -> None:
        source = tmp_path / "changed"
        shutil.copytree(saved, source)
        change(source)
        with pytest.raises(ExportError, match=why):
            export(str(source), tmp_path / "bundle")
        assert not (tmp_path / "bundle").exists()
        shutil.rmtree(source)

    def settings(**entries: Any) -> Callable[[Path], object]:
        return lambda source: add_json(source / "router_config.json", **entries)

    told = json.loads((saved / "router_config.json").read_text())
    query = told["structure"]["query"][0]
    document = told["structure"]["document"]
    refused("routes document: MLMTransformer", settings(structure={"document": document}))
    refused("routes query", settings(structure={"query": document, "document": document}))
    refused("without router_config.json", settings(structure=None))

    for place in ("../outside", "..", "/etc", "a/b", ""):
        structure = {"query": [query], "document": [*document, place]}
        types = told["types"] | {place: "sentence_transformers.models.Dropout"}
        refused("which is no folder", settings(structure=structure, types=types))

    def weights(values: torch.Tensor) -> Callable[[Path], object]:
        return lambda source: save_file({"weight": values}, source / query / "model.safetensors")

    refused("must have a finite weight", weights(torch.full((5,), torch.nan)))
    refused("must have a finite weight", weights(torch.ones(5000)))
    refused(
        "has no .*model.safetensors, of its queries",
        lambda source: (source / query / "model.safetensors").unlink(),
    )

    def split_otherwise(source: Path) -> None:
        file = source / query / "tokenizer.json"
        told = json.loads(file.read_text())
        file.write_text(json.dumps(told | {"normalizer": None}))

    refused("splits queries into other tokens", split_otherwise)
