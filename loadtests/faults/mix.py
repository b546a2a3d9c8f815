"""Mix: requests to every route that the starter models serve, each with a reply that is known."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtests import LoadTestError
from loadtests.server import Client, post
from loadtests.texts import draw_jobs

_NUM_EACH = 12
# What differs from one reply to the next: ids, times in seconds, what the prefix cache had.
_CHANGING = re.compile(rb'"(id|created|created_at|completed_at|cached_tokens)": ?("[^"]*"|[0-9.]+)')
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Tom"]}, "age": {"enum": [3, 7]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# A stream that waits says so by comments.
_COMMENT = re.compile(rb"^:.*\n\n", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Question:
    """One request, without the headers that differ from time to time."""

    path: str
    body: bytes

    def encode(self, headers: Mapping[str, str] | None = None) -> bytes:
        """The request on the wire."""
        return post(self.path, self.body, headers)


def draw_questions(seed: int) -> list[Question]:
    """Questions to all routes, in the same order for the same seed.

    Texts are generated greedily, so that every question has one answer.
    """
    rng = random.Random(seed)
    reviews = [job.text for job in draw_jobs("classify", 400, seed)]
    openings = [job.text for job in draw_jobs("generate", 400, seed)]
    questions = []
    for number in range(_NUM_EACH):
        review, opening = reviews[number], openings[number]
        words = review.split()
        masked = " ".join(["[MASK]" if i == len(words) // 2 else w for i, w in enumerate(words)])
        length = rng.randrange(4, 24)
        greedy = {"max_new_tokens": length, "temperature": 0}
        openai = {"model": "hybrid", "max_tokens": length, "temperature": 0}
        grammar = {"type": "json", "value": _SCHEMA}
        constrained = {**greedy, "max_new_tokens": 60, "grammar": grammar}
        choices = [{"value": "positive"}, {"value": "negative"}]
        asked = {"type": "choice", "instructions": "What is the opinion?", "choices": choices}
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/classify", {"inputs": review}),
            ("/classify", {"inputs": reviews[number : number + rng.randrange(2, 8)]}),
            ("/fill-mask", {"inputs": masked}),
            ("/score", {"inputs": opening, "model": "hybrid"}),
            # A pass for each token: a few words, or it would take half of all the time.
            ("/score", {"inputs": " ".join(words[:4]), "model": "hybrid:full"}),
            ("/tokenize", {"inputs": review, "model": "hybrid"}),
            ("/generate", {"inputs": opening, "parameters": greedy}),
            ("/generate", {"inputs": opening, "parameters": constrained}),
            ("/generate_stream", {"inputs": opening, "parameters": greedy}),
            ("/v1/completions", {**openai, "prompt": opening}),
            ("/v1/completions", {**openai, "prompt": opening, "stream": True}),
            ("/v1/decisions", {"model": "sentiment", "input": review, "questions": [asked]}),
        ]
        questions += [Question(path, json.dumps(body).encode()) for path, body in bodies]
    rng.shuffle(questions)
    return questions


def essence(body: bytes) -> bytes:
    """A reply's body without what differs from time to time."""
    return _CHANGING.sub(rb"", _COMMENT.sub(rb"", body))


async def learn_answers(port: int, questions: Sequence[Question]) -> dict[Question, bytes]:
    """The answer to every question, asked alone, by its `essence`.

    Raises:
        LoadTestError: a question has none.
    """
    client = Client(port)
    answers: dict[Question, bytes] = {}
    for question in questions:
        reply = await client.send(question.encode())
        if not reply.ok:
            raise LoadTestError(f"{question.path} answers {reply}")
        answers[question] = essence(reply.body)
    client.close()
    return answers
