"""Cohere's `/v2/embed` and `/v1/embed`. `tests/clients/sdks/use_cohere.py` uses its client."""

import base64
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from maskdial.bundle.bundle import read_manifests, write_manifest
from maskdial.masked.tasks.quantized import OutputDtype, quantized
from tests.page import bundles

TEXTS = ["The ship left at dawn.", "She baked bread."]
PROMPTS = {"query": "query: ", "passage": "passage: ", "song": "la la: "}
LONG = " ".join(["good"] * 400 + ["bad"] * 300)


@pytest.fixture(scope="module")
def http(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = bundles.make_embedder(tmp_path_factory.mktemp("bundles") / "embedder")
    (manifest,) = read_manifests("embedder", folder)
    assert manifest.embedding is not None
    embedding = manifest.embedding.model_copy(update={"prompts": PROMPTS})
    write_manifest(folder, manifest.model_copy(update={"embedding": embedding}))
    server = start_server(models={"embedder": folder})
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.stop()


def ask(http: httpx.Client, path: str, **body: Any) -> Any:
    reply = http.post(path, json={"model": "embedder", **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_vectors_of_every_type(http: httpx.Client) -> None:
    floats = ask(http, "/embed", inputs=TEXTS, normalize=True, dimensions=24)
    types: list[OutputDtype] = ["float", "int8", "uint8", "binary", "ubinary"]
    vectors = np.array(floats, np.float32)
    expected: dict[str, Any] = {each: quantized(vectors, each).tolist() for each in types}
    expected["base64"] = [base64.b64encode(each.tobytes()).decode() for each in vectors]
    for path in ("/v2/embed", "/v1/embed"):
        reply = ask(http, path, texts=TEXTS, embedding_types=[*expected], output_dimension=24)
        assert reply["response_type"] == "embeddings_by_type"
        assert reply["embeddings"] == expected
        assert reply["texts"] == TEXTS
        assert reply["meta"]["api_version"] == {"version": path[2]}
        assert reply["meta"]["billed_units"]["input_tokens"] > 8


def test_floats_without_types(http: httpx.Client) -> None:
    """The older route has them as a list, the newer one by type; the model's own length."""
    floats = ask(http, "/embed", inputs=TEXTS)
    newer, older = (ask(http, path, texts=TEXTS) for path in ("/v2/embed", "/v1/embed"))
    assert newer["embeddings"] == {"float": floats}
    assert older["response_type"] == "embeddings_floats"
    assert older["embeddings"] == floats


@pytest.mark.parametrize(
    ("input_type", "prompt"),
    [
        ("search_query", "query: "),
        ("search_document", "passage: "),
        ("classification", ""),
        ("clustering", ""),
        ("song", "la la: "),
    ],
)
def test_an_input_type_is_a_prompt_of_the_model(
    http: httpx.Client, input_type: str, prompt: str
) -> None:
    expected = ask(http, "/embed", inputs=[prompt + text for text in TEXTS])
    parts = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    for texts in ({"texts": TEXTS}, {"inputs": parts}):
        reply = ask(http, "/v2/embed", input_type=input_type, **texts)
        assert reply["embeddings"]["float"] == expected


def test_long_texts_are_cut_unless_refused(http: httpx.Client) -> None:
    for truncate, side in (({}, "right"), ({"truncate": "START"}, "left")):
        reply = http.post("/v2/embed", json={"model": "embedder", "texts": [LONG], **truncate})
        assert int(reply.headers["x-truncated-tokens"]) > 0
        cut = ask(http, "/embed", inputs=LONG, truncate=True, truncation_direction=side)
        assert reply.json()["embeddings"]["float"] == cut
    body = {"model": "embedder", "texts": ["a", LONG], "truncate": "NONE"}
    refused = http.post("/v2/embed", json=body)
    assert refused.status_code == 400
    assert refused.json()["message"].startswith("texts[1]: the text has 702 tokens")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "texts: give texts or inputs, one of them"),
        ({"texts": []}, "texts: must be a list of at least one text"),
        ({"texts": ["a", " "]}, "texts: item 1 must not be empty"),
        ({"texts": ["a"], "input_type": "poem"}, "input_type: must be one of 'search_query', "),
        (
            {"texts": ["a"], "embedding_types": []},
            "embedding_types: must have between 1 and 6",
        ),
        ({"texts": ["a"], "output_dimension": 193}, "output_dimension: must be between 1 and 192"),
        ({"images": ["data:image/png;base64,AA"]}, "images are not supported; send texts"),
        ({"texts": ["a"], "max_tokens": 9}, "max_tokens: not supported"),
        (
            {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "inputs[0].content[0]: images are not supported; send texts",
        ),
        ({"inputs": [{"content": [{"type": "text", "text": " "}]}]}, "inputs[0]: must not be "),
        ({"texts": ["a"], "model": "nobody"}, "no model 'nobody'"),
    ],
)
def test_errors_are_coheres(http: httpx.Client, body: dict[str, Any], words: str) -> None:
    for path in ("/v2/embed", "/v1/embed"):
        reply = http.post(path, json={"model": "embedder", **body})
        assert reply.status_code == (404 if "nobody" in words else 400)
        assert reply.json().keys() == {"id", "message"}
        assert reply.json()["message"].startswith(words)


def test_nothing_is_sent_for_habits(http: httpx.Client) -> None:
    body = {"texts": TEXTS, "images": [], "inputs": None, "priority": 3}
    assert ask(http, "/v2/embed", **body)["texts"] == TEXTS


def test_texts_of_one_request_may_be_many(http: httpx.Client) -> None:
    reply = ask(http, "/v2/embed", texts=["a"] * 300, embedding_types=["ubinary"])
    assert len(reply["embeddings"]["ubinary"]) == 300


def test_a_model_without_tasks_refuses_one(http: httpx.Client) -> None:
    body = {"model": "embedder", "inputs": "a", "task": "retrieval.query"}
    reply = http.post("/embed", json=body)
    assert reply.status_code == 422
    assert reply.json()["error"] == "task: model 'embedder' has no tasks; leave it out"
