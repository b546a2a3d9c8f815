"""Routes of text-embeddings-inference, SageMaker and Vertex AI, by the bodies that they document.

`tests/clients/sdks/use_langchain_huggingface.py` uses a client of them.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import numpy as np
import openai
import pytest

from maskdial.registry.catalog import STARTER_FOLDER
from tests.page import bundles

PAIR = {"text": "A good film.", "text_pair": "A bad film."}
TEXTS = ["The ship left at dawn.", "She baked bread."]
LONG = "good " * 700


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return {
        "sentiment": STARTER_FOLDER / "sentiment",
        "embedder": bundles.make_embedder(folder / "embedder"),
        "ranker": bundles.make_ranker(folder / "ranker"),
    }


def start(
    start_server: Callable[..., Any], models: dict[str, Path], **settings: Any
) -> Iterator[httpx.Client]:
    server = start_server(models=models, **settings)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.stop()


@pytest.fixture(scope="module")
def http(start_server: Callable[..., Any], models: dict[str, Path]) -> Iterator[httpx.Client]:
    yield from start(start_server, models)


@pytest.fixture(scope="module")
def alone(start_server: Callable[..., Any], models: dict[str, Path]) -> Iterator[httpx.Client]:
    """A server of one model, behind a key."""
    yield from start(start_server, {"embedder": models["embedder"]}, api_keys=["sesame"])


def ask(http: httpx.Client, path: str, **body: Any) -> Any:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_predictions_of_one_a_pair_and_many(http: httpx.Client) -> None:
    items = ["A good film.", PAIR, "A bad one."]
    single, pair, other = ask(http, "/classify", inputs=items, model="sentiment")
    given = list(PAIR.values())
    for inputs, expected in (
        ("A good film.", single),
        (["A good film."], single),
        (given, pair),
        ([["A good film."], given, ["A bad one."]], [single, pair, other]),
        ([given], [pair]),
    ):
        assert ask(http, "/predict", inputs=inputs, model="sentiment") == expected
    raw = ask(http, "/predict", inputs="A good film.", raw_scores=True, model="sentiment")
    scores = np.array([each["score"] for each in raw])
    assert [each["label"] for each in raw] == [each["label"] for each in single]
    np.testing.assert_allclose(
        np.exp(scores) / np.exp(scores).sum(), [each["score"] for each in single], atol=1e-6
    )
    cut = http.post(
        "/predict", json={"inputs": [[LONG], ["a"]], "truncate": True, "model": "sentiment"}
    )
    assert int(cut.headers["x-truncated-tokens"]) > 0


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], "inputs: must be a text, a pair"),
        (["a", "b", "c"], "inputs: must be a text, a pair"),
        ([["a"], "b"], "inputs: must be a text, a pair"),
        ([["a"], []], "inputs[1] must be a text, a pair"),
        ([["a"], ["b", 7]], "inputs[1] must be a text, a pair"),
        ([["a"], ["b", " "]], "inputs[1] must not be empty"),
        ([["a"], [LONG]], "inputs[1]: the text has 702 tokens"),
        (LONG, "the text has 702 tokens"),
    ],
)
def test_predictions_that_cannot_be_made(http: httpx.Client, inputs: Any, words: str) -> None:
    """Errors are `{"error", "error_type"}`, which is what text-embeddings-inference writes, too."""
    reply = http.post("/predict", json={"inputs": inputs, "model": "sentiment"})
    assert reply.status_code == 422
    assert reply.json().keys() == {"error", "error_type"}
    assert reply.json()["error"].startswith(words)


def test_decoded_ids_are_texts(http: httpx.Client) -> None:
    body = {"inputs": TEXTS, "model": "sentiment", "add_special_tokens": False}
    ids = [[token["id"] for token in text] for text in ask(http, "/tokenize", **body)]
    texts = ask(http, "/detokenize", ids=ids, model="sentiment")
    assert ask(http, "/decode", ids=ids, model="sentiment") == texts
    assert ask(http, "/decode", ids=ids[0], model="sentiment", skip_special_tokens=False) == [
        texts[0]
    ]


def test_embeddings_for_openais_sdk_without_v1(http: httpx.Client) -> None:
    expected = ask(http, "/embed", inputs=TEXTS, model="embedder")
    url = str(http.base_url)
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        reply = client.embeddings.create(model="embedder", input=TEXTS)
    assert [each.embedding for each in reply.data] == expected


def test_invocations_are_the_models_own_task(http: httpx.Client) -> None:
    """As of SageMaker, whose clients send the body of the only model's task."""
    body: dict[str, Any]
    for body, path in (
        ({"inputs": TEXTS, "model": "embedder"}, "/embed"),
        ({"inputs": TEXTS[0], "model": "sentiment"}, "/predict"),
        ({"inputs": [[TEXTS[0]], TEXTS], "model": "sentiment"}, "/predict"),
        ({"query": "Who?", "texts": TEXTS, "model": "ranker"}, "/rerank"),
        (
            {
                "inputs": {"source_sentence": "A ship.", "sentences": TEXTS},
                "model": "embedder",
            },
            "/similarity",
        ),
    ):
        expected = ask(http, path, **body)
        for route in ("/invocations", "/"):
            assert ask(http, route, **body) == expected
    reply = http.post("/invocations", json={"inputs": "a"})
    assert reply.status_code == 422
    assert reply.json()["error"].startswith("several models do invocations; name one with")


def test_the_only_model_need_not_be_named(alone: httpx.Client) -> None:
    """`InferenceClient` with a server's address, as LangChain has it, asks at the root."""
    key = {"authorization": "Bearer sesame"}
    expected = alone.post("/embed", json={"inputs": TEXTS}, headers=key).json()
    client = huggingface_hub.InferenceClient(model=str(alone.base_url), token="sesame")
    np.testing.assert_array_equal(client.feature_extraction(TEXTS), expected)
    for path in ("/", "/invocations", "/predict", "/vertex", "/embeddings", "/decode"):
        assert alone.post(path, json={"inputs": TEXTS}).status_code == 401


def test_pings_are_open(alone: httpx.Client) -> None:
    assert alone.get("/ping").json() == {"status": "ready"}
    assert alone.get("/").headers["content-type"].startswith("text/html")


def test_instances_are_answered_together(http: httpx.Client) -> None:
    """As of Vertex AI: each is a body of its own."""
    bodies: list[dict[str, Any]]
    bodies = [{"inputs": TEXTS[0]}, {"inputs": TEXTS, "normalize": True}, {"inputs": TEXTS[1]}]
    expected = [ask(http, "/embed", model="embedder", **body) for body in bodies]
    reply = http.post("/vertex", json={"instances": bodies, "model": "embedder"})
    assert reply.json() == {"predictions": expected}
    alone = http.post("/embed", json={"inputs": TEXTS, "model": "embedder"})
    assert int(reply.headers["x-compute-tokens"]) == 2 * int(alone.headers["x-compute-tokens"])
    bodies = [
        {"inputs": [[TEXTS[0]], TEXTS]},
        {"inputs": TEXTS[0], "raw_scores": True},
    ]
    predictions = ask(http, "/vertex", instances=bodies, model="sentiment")["predictions"]
    assert predictions == [ask(http, "/predict", model="sentiment", **body) for body in bodies]
    ranking: dict[str, Any] = {"query": "Who?", "texts": TEXTS}
    assert ask(http, "/vertex", instances=[ranking], model="ranker") == {
        "predictions": [ask(http, "/rerank", model="ranker", **ranking)]
    }


@pytest.mark.parametrize(
    ("instances", "words"),
    [
        ([], "instances: must have at least 1 instances"),
        (["a"], "instances[0]: Input should be an object"),
        ([{"inputs": "a"}, {"text": "b"}], "instances[1]: "),
        ([{"inputs": "a"}, {"inputs": ""}], "instances[1]: inputs: must not be empty"),
        ([{"inputs": "a"}, {"inputs": LONG}], "instances[1]: the text has 702 tokens"),
        ([{"inputs": "a"}, {"inputs": ["b", LONG]}], "instances[1]: inputs[1]: the text has 702"),
        ([{"inputs": "a"}] * 257, "257 texts"),
    ],
)
def test_instances_that_cannot_be_answered(http: httpx.Client, instances: Any, words: str) -> None:
    reply = http.post("/vertex", json={"instances": instances, "model": "embedder"})
    assert reply.status_code == 422
    assert words in reply.json()["error"]
