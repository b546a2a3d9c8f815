"""What the shipped fill-mask model makes of plain sentences: 40 blanks, each with several words
that a reader would accept. They were written without looking at any model's answers.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

MODEL = "hybrid"  # the starter bundle
TOP_K = 5
FLOOR = 26  # sentences

CLOZE: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "cloze.json").read_text(encoding="utf-8")
)


def spelled(word: str) -> str:
    """A word without what vocabularies add or drop: the space before it, and its case."""
    return word.strip().casefold()


def accepts(answers: Iterable[str], words: Iterable[str]) -> bool:
    """Whether one of a model's words is among the acceptable ones."""
    return not {spelled(answer) for answer in answers}.isdisjoint(map(spelled, words))


def test_sentences_are_forty_and_different() -> None:
    assert len(CLOZE) == 40
    assert len({sentence["text"] for sentence in CLOZE}) == 40


@pytest.mark.parametrize("sentence", CLOZE, ids=lambda sentence: sentence["text"])
def test_a_sentence_has_one_blank_and_several_answers(sentence: dict[str, Any]) -> None:
    assert set(sentence) == {"text", "answers"}
    assert sentence["text"].count("[MASK]") == 1
    answers = sentence["answers"]
    assert 3 <= len(answers) <= 15
    assert all(answer.isalpha() for answer in answers), "single words"
    assert max(Counter(map(spelled, answers)).values()) == 1, "each once"


@pytest.mark.parametrize(
    ("word", "accepted"),
    [("house", True), (" house", True), (" House", True), ("monday", True), ("##house", False)],
)
def test_any_vocabularys_spelling_counts(word: str, accepted: bool) -> None:
    assert accepts(["house", "Monday"], ["of", word]) is accepted


def test_the_starter_fills_plain_sentences(http: httpx.Client) -> None:
    body = {
        "model": MODEL,
        "inputs": [sentence["text"] for sentence in CLOZE],
        "parameters": {"top_k": TOP_K},
    }
    reply = http.post("/fill-mask", json=body)
    assert reply.status_code == 200, reply.text
    words = [[filling["token_str"] for filling in fillings] for fillings in reply.json()]
    assert all(len(best) == TOP_K for best in words)
    missed = [
        f"{sentence['text']} {best}"
        for sentence, best in zip(CLOZE, words, strict=True)
        if not accepts(sentence["answers"], best)
    ]
    num_accepted = len(CLOZE) - len(missed)
    report = "\n".join([f"{num_accepted} of {len(CLOZE)} have an acceptable word; not:", *missed])
    print(report)
    assert num_accepted >= FLOOR, report
