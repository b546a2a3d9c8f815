"""Labels, thresholds and questions that cannot be: a status and a sentence on every such route."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.registry.catalog import STARTER_FOLDER
from tests.page import bundles

TEXT = "Alice took the train from Paris to Rome."
MEGABYTE = "x y " * 250_000
MANY = [f"label {index}" for index in range(10_000)]
LONG = "very " * 400
ROUTES: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "finder /token-classify": lambda labels: {"candidate_labels": labels},
    "finder /redact": lambda labels: {"labels": labels},
    "extractor /token-classify": lambda labels: {"candidate_labels": labels},
    "extractor /zero-shot-classify": lambda labels: {"candidate_labels": labels},
    "nli /zero-shot-classify": lambda labels: {"candidate_labels": labels},
    "extractor /extract": lambda labels: {"schema": {"entities": labels}},
    "extractor /extract of labels": lambda labels: {
        "schema": {"classifications": [{"task": "tone", "labels": labels}]}
    },
    "extractor /extract of relations": lambda labels: {"schema": {"relations": labels}},
}
QUESTION = {"type": "choice", "instructions": "How is it?"}
LEVELS = [{"label": "POSITIVE"}, {"label": "POSITIVE"}]


@pytest.fixture(scope="module")
def http(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("bundles")
    models: dict[str, Path] = {
        "sentiment": STARTER_FOLDER / "sentiment",
        "finder": bundles.make_finder(folder / "finder"),
        "extractor": bundles.make_extractor(folder / "extractor"),
        "nli": bundles.make_nli(folder / "nli"),
    }
    server = start_server(models=models)
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client
    server.stop()


def post(http: httpx.Client, route: str, parameters: dict[str, Any]) -> httpx.Response:
    model, path = route.split()[:2]
    return http.post(path, json={"model": model, "inputs": TEXT, "parameters": parameters})


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([], "labels, not 0"),
        (["a", ""], ""),
        (["a", " "], "must not be empty"),
        (["a", "b", "a"], "'a' is there twice"),
        (MANY, "not 10000"),
        (["a", LONG], "must have between 1 and 1024 characters, not 2000"),
    ],
    ids=["none", "empty", "blank", "repeated", "10,000", "long"],
)
@pytest.mark.parametrize("route", ROUTES)
def test_labels_that_cannot_be(
    http: httpx.Client, route: str, labels: list[str], words: str
) -> None:
    reply = post(http, route, ROUTES[route](labels))
    assert reply.status_code == 422
    sentence = (
        reply.json()["error"].replace(" types,", " labels,").replace(" relations,", " labels,")
    )
    assert words in sentence
    assert sentence.startswith("parameters.")
    assert len(sentence) < 250


@pytest.mark.parametrize("route", [each for each in ROUTES if "zero" not in each])
def test_thresholds(http: httpx.Client, route: str) -> None:
    parameters = ROUTES[route](["person", "city"])
    for threshold in (-0.1, 1.1):
        reply = post(http, route, parameters | {"threshold": threshold})
        assert reply.status_code == 422
        words = f"parameters.threshold: must be between 0 and 1, not {threshold}"
        assert reply.json()["error"] == words
    nothing = post(http, route, parameters | {"threshold": 1}).json()
    if route.endswith("/redact"):
        assert nothing == {"text": TEXT, "replacements": []}
    elif route.endswith("/token-classify"):
        assert nothing == []
    elif route.endswith("/extract"):
        assert nothing == {"entities": {"person": [], "city": []}}


@pytest.mark.parametrize(
    ("path", "questions", "words"),
    [
        ("/v1/decisions", [QUESTION], "questions[0]: choices: this field is required"),
        (
            "/v1/decisions",
            [QUESTION | {"choices": []}],
            "questions[0].choices: must have between 2 and 255 choices, not 0",
        ),
        (
            "/v1/decisions",
            [QUESTION | {"choices": [{"value": "POSITIVE"}] * 2}],
            "questions[0]: choices: must be different from each other",
        ),
        (
            "/v1/decisions",
            [{"type": "score", "instructions": "How is it?", "levels": LEVELS}],
            "questions[0]: levels: must be different from each other",
        ),
        (
            "/v1/systemone",
            {"a": {"type": "choice"}},
            "questions.a: criteria: a choice needs an object with its options",
        ),
        (
            "/v1/systemone",
            {"a": {"type": "score", "criteria": []}},
            "questions.a: criteria: a score needs a list of levels",
        ),
        (
            "/v1/systemone",
            {"a": {"type": "score", "criteria": [{"x": 1}, "y", {"x": 1}]}},
            "questions.a: criteria: levels must be different from each other",
        ),
    ],
)
def test_questions_that_cannot_be(
    http: httpx.Client, path: str, questions: object, words: str
) -> None:
    name = "input" if path == "/v1/decisions" else "state"
    body = {"model": "sentiment", name: TEXT, "questions": questions}
    reply = http.post(path, json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == words


def test_states_and_texts_of_a_megabyte(http: httpx.Client) -> None:
    """Sentences that count characters are said before anything is tokenized."""
    criteria: dict[str, Any] = {"type": "choice", "criteria": {"POSITIVE": None, "NEGATIVE": None}}
    for model, words in (
        ("sentiment", "state: the text has 1,000,000 characters"),
        ("nli", "questions.a: the input and a hypothesis have 1,000,009 characters together"),
    ):
        body = {"model": model, "state": MEGABYTE, "questions": {"a": criteria}}
        reply = http.post("/v1/systemone", json=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["message"].startswith(words)
    for route, words in (
        ("nli /zero-shot-classify", "the text and the hypothesis of 'a' have 1,000,018 characters"),
        ("finder /token-classify", "the text has 500,000 words"),
        ("finder /redact", "the text has 500,000 words"),
        ("extractor /extract", "the text has 1,000,000 characters"),
    ):
        model, path = route.split()
        parameters = ROUTES[route](["a"])
        body = {"model": model, "inputs": MEGABYTE, "parameters": parameters}
        reply = http.post(path, json=body)
        assert reply.status_code == 422
        assert reply.json()["error"].startswith(words)
