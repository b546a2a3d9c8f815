"""`/v1/systemone` with models of every method, and with the client."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.registry.catalog import STARTER_FOLDER
from maskdial_client import Client, ValidationError

TEXT = "Once upon a time a little girl found a happy dog in the park."
QUESTIONS: dict[str, Any] = {
    "sad": {"type": "noul", "instructions": "The girl is sad."},
    "who": {
        "type": "choice",
        "instructions": "Who is in the park?",
        "criteria": {"dog": None, "cat": "a small animal"},
    },
    "mood": {
        "type": "score",
        "instructions": "How happy is it?",
        "criteria": ["not", "little", "very"],
    },
}


@pytest.fixture(scope="module")
def url(start_server: Callable[..., Any], chat_bundle: Path, masked_starter: Path) -> Iterator[str]:
    models = {
        "chat": chat_bundle,
        "hybrid": STARTER_FOLDER / "hybrid",
        "masked": masked_starter,
        "sentiment": STARTER_FOLDER / "sentiment",
    }
    server = start_server(models=models, max_queue=64)
    yield server.url
    server.stop()


def ask(url: str, status: int = 200, **body: object) -> Any:
    reply = httpx.post(f"{url}/v1/systemone", json=body, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


def as_decisions(url: str, model: str, text: str) -> Any:
    questions = [
        {"type": "predicate", "instructions": "The girl is sad."},
        {
            "type": "choice",
            "instructions": "Who is in the park?",
            "choices": [{"value": "dog"}, {"value": "cat", "description": "a small animal"}],
        },
        {
            "type": "score",
            "instructions": "How happy is it?",
            "levels": [{"label": "not"}, {"label": "little"}, {"label": "very"}],
        },
    ]
    body = {"model": model, "input": text, "questions": questions}
    reply = httpx.post(f"{url}/v1/decisions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(
    ("model", "method"), [("chat", "letters"), ("hybrid", "likelihood"), ("masked", "mask")]
)
def test_the_same_questions_get_the_same_probabilities(url: str, model: str, method: str) -> None:
    found = ask(url, model=model, state=TEXT, questions=QUESTIONS)
    other = as_decisions(url, model, TEXT)
    assert other["method"] == method
    predicate, choice, score = other["answers"]
    assert found["model"] == model
    assert found["usage"] == {"input_tokens": other["usage"]["input_tokens"], "output_tokens": 0}
    answers = found["answers"]
    assert answers["sad"] == {"type": "noul", "noul": predicate["probability"]}
    assert answers["who"]["choice"] == choice["choice"]
    assert answers["who"]["confidence"] == pytest.approx(choice["confidence"])
    assert answers["who"]["probabilities"] == {
        each["value"]: each["probability"] for each in choice["probabilities"]
    }
    assert answers["mood"]["score"] == score["score"]
    assert answers["mood"]["legend"] == {"0": "not", "1": "little", "2": "very"}
    assert [*answers["mood"]["probabilities"].values()] == [
        each["probability"] for each in score["probabilities"]
    ]


def test_a_state_of_json_is_read_as_its_text(url: str) -> None:
    question = {"film": {"type": "choice", "criteria": {"POSITIVE": None, "NEGATIVE": None}}}
    state = {"review": "A warm film.", "stars": [5, None]}
    text = json.dumps(state, separators=(",", ":"))
    found = ask(url, model="sentiment", state=state, questions=question, assets={})
    assert (
        found["answers"] == ask(url, model="sentiment", state=text, questions=question)["answers"]
    )


def test_one_option_is_certain(url: str) -> None:
    questions = {
        "a": {"type": "choice", "criteria": {"only": {"json": 1}}},
        "b": {"type": "score", "criteria": ["only"]},
    }
    answers = ask(url, model="chat", state="", questions=questions)["answers"]
    assert answers["a"]["probabilities"] == {"only": 1.0}
    assert answers["a"]["confidence"] == answers["b"]["confidence"] == 1.0
    assert answers["b"]["score"] == 0


def test_the_state_is_read_once(url: str) -> None:
    """Many questions about a text take little more than one, by the prefix cache."""

    def num_prefilled() -> float:
        name = 'maskdial_prompt_tokens_total{model="chat"}'
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    state = "The king went to the sea. " * 40
    questions = {f"q{i}": {**QUESTIONS["sad"], "instructions": f"Is it {i}?"} for i in range(16)}
    before = num_prefilled()
    usage = ask(url, model="chat", state=state, questions=questions)["usage"]
    assert num_prefilled() - before < 0.5 * usage["input_tokens"]


def test_answers_do_not_depend_on_what_is_asked_beside_them(url: str) -> None:
    states = [f"{TEXT} {'word ' * count}" for count in range(6)]

    def answer(state: str) -> Any:
        return ask(url, model="chat", state=state, questions=QUESTIONS)["answers"]

    alone = [
        {
            name: ask(url, model="chat", state=state, questions={name: each})["answers"][name]
            for name, each in QUESTIONS.items()
        }
        for state in states
    ]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(answer, states)) == alone


def test_a_question_at_fault_is_named(url: str) -> None:
    questions = {**QUESTIONS, "b c": {"type": "noul", "instructions": "sad"}}
    error = ask(url, 400, model="sentiment", state=TEXT, questions=questions)["error"]
    assert error["param"] == "questions.sad"
    assert "knows only its own labels" in error["message"]


def test_the_client_decides(url: str) -> None:
    with Client(url) as client:
        answers = client.decide(TEXT, QUESTIONS, model="chat")
        found = ask(url, model="chat", state=TEXT, questions=QUESTIONS)["answers"]
        assert answers["sad"].value == found["sad"]["noul"]
        assert answers["sad"].confidence is None
        assert answers["who"].value == found["who"]["choice"]
        assert answers["mood"].value == found["mood"]["score"]
        assert answers["mood"].probabilities == found["mood"]["probabilities"]
        with pytest.raises(ValidationError, match=r"^questions: "):
            client.decide(TEXT, {}, model="chat")
