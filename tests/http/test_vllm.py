"""vLLM's routes for models that do not generate: `/v1/score`, its body on `/score`, `/pooling`."""

import base64
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from maskdial.bundle.bundle import read_manifests, write_manifest
from maskdial.bundle.manifest import Embedding, MultiVector
from maskdial.registry.catalog import STARTER_FOLDER
from tests.page import bundles

QUERY = "A good film."
TEXTS = ["The ship left at dawn.", "She baked bread.", "A bad film."]
LONG = "good " * 700


def make_late(tagger: Path, folder: Path) -> Path:
    """A model of late interaction, of a tagger's graph."""
    shutil.copytree(tagger, folder)
    (manifest,) = read_manifests("late", folder)
    vectors = Embedding(dimension=4, pooling="", normalized=True, multi_vector=MultiVector())
    changes = {"task": "embed-all", "embedding": vectors, "labels": ()}
    write_manifest(folder, manifest.model_copy(update=changes))
    return folder


@pytest.fixture(scope="module")
def http(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("bundles")
    tagger = bundles.make_tagger(folder / "tagger")
    models = {
        "sentiment": STARTER_FOLDER / "sentiment",
        "embedder": bundles.make_embedder(folder / "embedder"),
        "ranker": bundles.make_ranker(folder / "ranker"),
        "tagger": tagger,
        "late": make_late(tagger, folder / "late"),
    }
    server = start_server(models=models)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.stop()


def ask(http: httpx.Client, path: str, **body: Any) -> Any:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def pair_scores(http: httpx.Client, path: str = "/v1/score", **body: Any) -> list[float]:
    reply = ask(http, path, **body)
    assert [each["index"] for each in reply["data"]] == [*range(len(reply["data"]))]
    assert {each["object"] for each in reply["data"]} == {"score"}
    return [each["score"] for each in reply["data"]]


def ranked(http: httpx.Client, model: str, query: str, **body: Any) -> list[float]:
    """What `/rerank` gives each of the texts."""
    ranks = ask(http, "/rerank", model=model, query=query, texts=TEXTS, **body)
    return [each["score"] for each in sorted(ranks, key=lambda rank: int(rank["index"]))]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("model", ["ranker", "late"])
def test_one_text_with_many_has_the_scores_of_rerank(
    http: httpx.Client, path: str, model: str
) -> None:
    expected = ranked(http, model, QUERY)
    for names in (
        ("text_1", "text_2"),
        ("queries", "documents"),
        ("queries", "items"),
        ("data_1", "data_2"),
    ):
        sides = dict(zip(names, (QUERY, TEXTS), strict=True))
        assert pair_scores(http, path, model=model, **sides) == expected
    raw = ranked(http, model, QUERY, raw_scores=True)
    body = {"text_1": [QUERY], "text_2": TEXTS, "use_activation": False, "model": model}
    assert pair_scores(http, path, **body) == raw


@pytest.mark.parametrize("model", ["ranker", "embedder"])
def test_as_many_of_both_are_paired(http: httpx.Client, model: str) -> None:
    queries = [QUERY, *TEXTS[:2]]
    expected = [
        pair_scores(http, model=model, text_1=query, text_2=text)
        for query, text in zip(queries, TEXTS, strict=True)
    ]
    found = pair_scores(http, model=model, text_1=queries, text_2=TEXTS)
    assert [[each] for each in found] == expected


def test_embeddings_are_compared_by_cosines(http: httpx.Client) -> None:
    vectors = np.array(ask(http, "/embed", model="embedder", inputs=[QUERY, *TEXTS]))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = pair_scores(http, model="embedder", text_1=QUERY, text_2=TEXTS)
    np.testing.assert_allclose(found, vectors[1:] @ vectors[0], rtol=1e-5)


def test_the_reply_is_vllms(http: httpx.Client) -> None:
    reply = http.post("/v1/score", json={"model": "ranker", "text_1": "a", "text_2": "b", "x": 1})
    content = reply.json()
    assert content["id"].startswith("score-")
    assert (content["object"], content["model"]) == ("list", "ranker")
    assert content["created"] > 1e9
    assert content["usage"]["prompt_tokens"] == content["usage"]["total_tokens"] > 3
    assert reply.headers["x-ignored-fields"] == "x"


def test_long_pairs_are_cut_if_that_is_asked_for(http: httpx.Client) -> None:
    for wanted in ({"truncate_prompt_tokens": -1}, {"truncate": True}):
        body = {"model": "ranker", "text_1": "a", "text_2": ["b", LONG], **wanted}
        reply = http.post("/v1/score", json=body)
        assert reply.status_code == 200, reply.text
        assert int(reply.headers["x-truncated-tokens"]) > 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "text_1: give both sides of the pairs, by one of text_1 and text_2, queries and "),
        ({"text_1": "a", "documents": "b"}, "text_1: give both sides of the pairs"),
        ({"text_1": "a", "text_2": []}, "text_2: must hold at least one text"),
        ({"text_1": "a", "text_2": ["b", " "]}, "text_2: item 1 must not be empty"),
        ({"text_1": 7, "text_2": "b"}, "text_1: must be a string"),
        ({"queries": ["a", "b"], "items": "c"}, "queries: has 2 texts for 1; send one, or as many"),
        ({"text_1": "a", "text_2": ["b", LONG]}, "text_2[1]: the query and the text take "),
        ({"text_1": ["a", "b"], "text_2": ["c", LONG]}, "text_2[1]: the query and the text take "),
        ({"model": "embedder", "text_1": LONG, "text_2": ["b"]}, "text_1: the text has "),
        ({"model": "embedder", "text_1": ["a", LONG], "text_2": ["b", "c"]}, "text_1[1]: the text"),
        ({"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 9}, "truncate_prompt_tokens: "),
        ({"model": "sentiment", "text_1": "a", "text_2": "b"}, "model 'sentiment' cannot do "),
    ],
)
def test_what_is_wrong_with_pairs_is_said(
    http: httpx.Client, body: dict[str, Any], words: str
) -> None:
    reply = http.post("/v1/score", json={"model": "ranker", **body})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(words)
    if body:
        native = http.post("/score", json={"model": "ranker", **body})
        assert (native.status_code, native.json()["error_type"]) == (422, "validation")
        assert native.json()["error"] == reply.json()["error"]["message"]


def pooled(http: httpx.Client, **body: Any) -> list[Any]:
    reply = ask(http, "/pooling", **body)
    assert reply["id"].startswith("pool-")
    assert [each["index"] for each in reply["data"]] == [*range(len(reply["data"]))]
    assert {each["object"] for each in reply["data"]} == {"pooling"}
    assert reply["usage"]["total_tokens"] > 0
    return [each["data"] for each in reply["data"]]


def test_pooling_embeds(http: httpx.Client) -> None:
    vectors = ask(http, "/embed", model="embedder", inputs=TEXTS)
    assert pooled(http, model="embedder", input=TEXTS) == vectors
    assert pooled(http, model="embedder", input=TEXTS, task="embed") == vectors
    ids = ask(http, "/tokenize", model="embedder", prompt=TEXTS[0])["tokens"]
    assert pooled(http, model="embedder", input=ids) == vectors[:1]
    short = ask(http, "/embed", model="embedder", inputs=TEXTS[0], dimensions=24)
    assert pooled(http, model="embedder", input=TEXTS[0], dimensions=24) == short
    unit = ask(http, "/embed", model="embedder", inputs=TEXTS, normalize=True)
    assert pooled(http, model="embedder", input=TEXTS, use_activation=True) == unit


def test_pooling_scores_labels_in_their_order(http: httpx.Client) -> None:
    (manifest,) = read_manifests("sentiment", STARTER_FOLDER / "sentiment")
    for body, function in (({}, "softmax"), ({"use_activation": False}, "none")):
        answers = ask(
            http,
            "/classify",
            model="sentiment",
            inputs=TEXTS,
            parameters={"function_to_apply": function},
        )
        by_label = [{each["label"]: each["score"] for each in text} for text in answers]
        expected = [[text[label] for label in manifest.labels] for text in by_label]
        assert pooled(http, model="sentiment", input=TEXTS, **body) == expected


def test_pooling_has_a_row_for_each_token(http: httpx.Client) -> None:
    rows = pooled(http, model="late", input=TEXTS[0])
    assert rows == ask(http, "/embed-all", model="late", inputs=TEXTS[:1])
    (tags,) = pooled(http, model="tagger", input=TEXTS[0])
    np.testing.assert_allclose(np.sum(tags, axis=1), 1)
    parameters = {"aggregation_strategy": "none", "ignore_labels": []}
    tokens = ask(http, "/token-classify", model="tagger", inputs=TEXTS[0], parameters=parameters)
    best = np.max(tags, axis=1)[[token["index"] for token in tokens]]
    np.testing.assert_allclose(best, [token["score"] for token in tokens])


def test_pooling_in_base64(http: httpx.Client) -> None:
    for model in ("embedder", "tagger"):
        (numbers,) = pooled(http, model=model, input=TEXTS[0])
        (text,) = pooled(http, model=model, input=TEXTS[0], encoding_format="base64")
        decoded = np.frombuffer(base64.b64decode(text), "<f4")
        np.testing.assert_array_equal(decoded, np.array(numbers, np.float32).ravel())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": "a", "task": "embed"}, "task: model 'sentiment' does 'classify', not 'embed'"),
        ({"input": [5, 6]}, "input: this model takes no token ids; send texts"),
        ({"input": ["a", LONG]}, "input[1]: the text has 702 tokens"),
        ({"input": "a", "dimensions": 3}, "dimensions: classify has none; leave it out"),
        ({"input": "a", "embed_dtype": "float16"}, 'embed_dtype: only "float32" is supported'),
        ({"messages": []}, "messages: conversations are not supported here; send their text"),
        ({"model": "ranker2", "input": "a"}, "no model 'ranker2'"),
    ],
)
def test_what_pooling_refuses(http: httpx.Client, body: dict[str, Any], words: str) -> None:
    reply = http.post("/pooling", json={"model": "sentiment", **body})
    assert reply.status_code == (404 if "no model" in words else 400)
    assert reply.json()["error"]["message"].startswith(words)
