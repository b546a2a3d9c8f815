"""`/v1/moderations` with the SDK, on a starter and on classifiers made of it."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from maskdial.bundle.bundle import read_manifests, write_manifest
from maskdial.dialects.openai.moderations import is_harmless
from maskdial.registry.catalog import STARTER_FOLDER

TEXTS = ["A warm and funny film.", "I hate every dull minute of it."]
MODELS: dict[str, dict[str, Any]] = {
    "guard": {"labels": ("toxic", "non-toxic")},
    "tags": {"labels": ("hate", "OK"), "problem_type": "multi_label_classification"},
    "number": {"problem_type": "regression"},
}


def make(folder: Path, changes: dict[str, Any]) -> Path:
    """The sentiment starter, said to have other labels: negative, positive in its own words."""
    shutil.copytree(STARTER_FOLDER / "sentiment", folder)
    (manifest,) = read_manifests("sentiment", folder)
    write_manifest(folder, manifest.model_copy(update=changes))
    return folder


@pytest.fixture(scope="module")
def http(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("bundles")
    models = {name: make(folder / name, changes) for name, changes in MODELS.items()}
    server = start_server(models=models | {"sentiment": STARTER_FOLDER / "sentiment"})
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.stop()


def ask(http: httpx.Client, **body: Any) -> list[Any]:
    reply = http.post("/v1/moderations", json=body)
    assert reply.status_code == 200, reply.text
    content = reply.json()
    assert content["id"].startswith("modr-")
    assert content["model"] == body["model"]
    results: list[Any] = content["results"]
    return results


def scores(http: httpx.Client, model: str) -> list[dict[str, float]]:
    answers = http.post("/classify", json={"model": model, "inputs": TEXTS}).json()
    return [{each["label"]: each["score"] for each in text} for text in answers]


def test_the_most_likely_label_is_flagged_unless_it_is_harmless(http: httpx.Client) -> None:
    first, second = ask(http, model="guard", input=TEXTS)
    assert [each["category_scores"] for each in (first, second)] == scores(http, "guard")
    assert first["categories"] == {"toxic": False, "non-toxic": False}
    assert second["categories"] == {"toxic": True, "non-toxic": False}
    assert [first["flagged"], second["flagged"]] == [False, True]
    assert first["category_applied_input_types"] == {"toxic": ["text"], "non-toxic": ["text"]}


def test_independent_labels_are_flagged_from_a_half_on(http: httpx.Client) -> None:
    for result, by_label in zip(
        ask(http, model="tags", input=TEXTS), scores(http, "tags"), strict=True
    ):
        assert result["category_scores"] == by_label
        assert result["categories"] == {"hate": by_label["hate"] >= 0.5, "OK": False}
        assert result["flagged"] == (by_label["hate"] >= 0.5)


def test_inputs_are_a_text_texts_or_the_parts_of_one(http: httpx.Client) -> None:
    (alone,) = ask(http, model="guard", input=TEXTS[0])
    assert alone == ask(http, model="guard", input=TEXTS)[0]
    parts = [{"type": "text", "text": text} for text in TEXTS]
    assert ask(http, model="guard", input=parts) == ask(http, model="guard", input="\n".join(TEXTS))


def test_the_sdk_reads_it(http: httpx.Client) -> None:
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none")
    reply = client.moderations.create(model="sentiment", input=TEXTS)
    assert [each.flagged for each in reply.results] == [True, True]
    assert (reply.results[0].category_scores.model_extra or {}).keys() == {"POSITIVE", "NEGATIVE"}


@pytest.mark.parametrize(
    ("label", "harmless"),
    [
        *(
            (label, True)
            for label in ("OK", "neutral", "SAFE", "non-toxic", "not_hate", "Not Spam")
        ),
        *((label, True) for label in ("none", "non_offensive", "nothate", "ham", "sfw")),
        *((label, False) for label in ("toxic", "H", "LABEL_0", "non_violent_crimes", "unsafe")),
        *((label, False) for label in ("nonconsensual content", "INJECTION", "nsfw", "POSITIVE")),
    ],
)
def test_harmless_labels_are_known_by_their_names(label: str, harmless: bool) -> None:
    assert is_harmless(label) == harmless


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "input: this field is required"),
        ({"input": []}, "input: must hold at least one text"),
        ({"input": ["a", " "]}, "input: item 1 must not be empty"),
        ({"input": ["a", {"type": "text", "text": "a"}]}, "input: item 1 must be a string, or all"),
        ({"input": [{"type": []}]}, 'input: item 0 must be {"type": "text"'),
        (
            {"input": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            "input: item 0 is an image, and classifiers read text only",
        ),
        ({"input": ["a", "good " * 700]}, "input[1]: the text has 702 tokens"),
        ({"input": "a", "model": "number"}, "model: model 'number' gives numbers, not the "),
        ({"input": "a", "model": "nobody"}, "no model 'nobody'"),
    ],
)
def test_what_is_refused(http: httpx.Client, body: dict[str, Any], words: str) -> None:
    reply = http.post("/v1/moderations", json={"model": "guard", **body})
    assert reply.status_code == (404 if "nobody" in words else 400)
    assert reply.json()["error"]["message"].startswith(words)
