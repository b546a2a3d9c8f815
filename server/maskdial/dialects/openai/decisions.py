"""`POST /v1/decisions`: questions about an input, answered with probabilities."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import pydantic
from fastapi import Response
from pydantic import Field, model_validator

from maskdial.ask.catalogue import DECIDE
from maskdial.ask.decide import Decisions, decide
from maskdial.bounds import Size
from maskdial.dialects.body import FieldError, example
from maskdial.dialects.call import Call
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.masked_body import Text, TruncationParameters
from maskdial.dialects.openai.base import OpenAIBody
from maskdial.dialects.openai.decisions_input import Item, Parts, joined
from maskdial.dialects.openai.errors import FORM
from maskdial.dialects.openai.replies import DecisionsReply
from maskdial.engine.questions import Option, Probabilities, Question
from maskdial.http.replies import json_reply, timing_headers


def _as_items(content: object) -> object:
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


def _check_value(value: object) -> object:
    if not isinstance(value, str | bool):
        raise ValueError("must be a string or a boolean")
    if isinstance(value, str) and not value.strip():
        raise ValueError("must not be empty")
    return value


class ChoiceOption(Lenient):
    """One of the values to choose from. A boolean is not the text of the same name."""

    value: Annotated[str | bool, pydantic.BeforeValidator(_check_value)]
    description: str | None = None

    @property
    def option(self) -> Option:
        text = self.value if isinstance(self.value, str) else str(self.value).lower()
        return Option(text, self.description or "")


class ScoreLevel(Lenient):
    """One of the levels of a score."""

    label: Text
    description: str | None = None

    @property
    def option(self) -> Option:
        return Option(self.label, self.description or "")


class QuestionBody(Lenient):
    """A statement to judge (predicate), values to choose from, or a score to give."""

    type: Literal["predicate", "choice", "score"]
    instructions: Parts
    name: str | None = None
    choices: Annotated[list[ChoiceOption], Size(2, 255, "choices")] | None = Field(
        None, description="Of a choice: the values, each of them once."
    )
    levels: Annotated[list[ScoreLevel], Size(2, 255, "levels")] | None = Field(
        None, description="Of a score: the levels, from the lowest to the highest."
    )

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        wanted = {"choice": "choices", "score": "levels"}.get(self.type)
        for field, options in (("choices", self.choices), ("levels", self.levels)):
            if field == wanted and options is None:
                raise FieldError(field, "this field is required")
            if field != wanted and options is not None:
                raise FieldError(field, f"a {self.type} has none; leave it out")
        # Of one type, so that true and "true" differ.
        values = [(type(each.value), each.value) for each in self.choices or ()]
        for field, keys in (
            ("choices", values),
            ("levels", [each.label for each in self.levels or ()]),
        ):
            if len(set(keys)) < len(keys):
                raise FieldError(field, "must be different from each other")
        if not joined(self.instructions).strip():
            raise FieldError("instructions", "must not be empty")
        return self

    def question(self, index: int) -> Question:
        """The neutral question; ``index`` names one that has no name."""
        options = tuple(each.option for each in (*(self.choices or ()), *(self.levels or ())))
        instructions = joined(self.instructions).strip()
        return Question(self.type, instructions, options, self.name or str(index + 1))

    def answer(self, probabilities: Probabilities) -> dict[str, Any]:
        """The answer as it is sent."""
        named = {"type": self.type, "name": self.name}
        if self.type == "predicate":
            return named | {"probability": probabilities[0]}
        if self.choices is not None:
            return named | {
                "choice": self.choices[probabilities.index(max(probabilities))].value,
                "confidence": _confidence(probabilities),
                "probabilities": [
                    {"value": each.value, "probability": probability}
                    for each, probability in zip(self.choices, probabilities, strict=True)
                ],
            }
        assert self.levels is not None, "a score has levels"
        return named | {
            "score": sum(level * probability for level, probability in enumerate(probabilities)),
            "confidence": _confidence(probabilities),
            "probabilities": [
                {"label": each.label, "value": level, "probability": probability}
                for level, (each, probability) in enumerate(
                    zip(self.levels, probabilities, strict=True)
                )
            ],
        }


def _confidence(probabilities: Sequence[float]) -> float:
    """How far the likeliest option stands out: 0 if all are alike, 1 if it is certain."""
    uniform = 1 / len(probabilities)
    return (max(probabilities) - uniform) / (1 - uniform)


class DecisionsBody(TruncationParameters, OpenAIBody):
    """An input, and questions about it. Truncation is an extension."""

    spellings = {"text": "input"}  # noqa: RUF012

    model_config = example(
        {
            "model": "sentiment",
            "input": "A warm, funny and quietly moving film.",
            "questions": [
                {
                    "type": "choice",
                    "instructions": "How is the film?",
                    "choices": [{"value": "POSITIVE"}, {"value": "NEGATIVE"}],
                }
            ],
        }
    )

    input: Annotated[
        list[Item],
        pydantic.BeforeValidator(_as_items, json_schema_input_type=str | list[Item]),
    ] = Field(description="A text, or messages and tool calls, which become lines of a transcript.")
    questions: Annotated[list[QuestionBody], Size(1, 400, "questions")]

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        calls: set[str | None] = set()
        for index, item in enumerate(self.input):
            if item.output is None:
                calls.add(item.call_id)
            elif item.call_id not in calls:
                raise FieldError("input", f"item {index} is the output of no call before it")
        if not self.text.strip():
            raise FieldError("input", "must not be empty")
        return self

    @property
    def batch(self) -> bool:
        return True

    @property
    def text(self) -> str:
        """What the models read: a single user message is its text."""
        if len(self.input) == 1 and self.input[0].role == "user":
            return joined(self.input[0].content or ())
        return "\n".join(item.as_line for item in self.input)


async def decisions(call: Call[DecisionsBody]) -> Response:
    """Answers questions about an input with the probabilities of their options."""
    body = call.body
    model = await call.model(DECIDE)
    found = await decide(
        body.text,
        [each.question(index) for index, each in enumerate(body.questions)],
        model,
        call.server.config,
        call.deadline,
        truncation=body.truncation,
    )
    content = {
        "answers": [
            question.answer(probabilities)
            for question, probabilities in zip(body.questions, found.probabilities, strict=True)
        ],
        "model": model.name,
        "method": found.method,
        "usage": _usage(found),
    }
    return json_reply(content, headers=timing_headers(found.timings))


def _usage(found: Decisions) -> dict[str, Any]:
    num_tokens = found.timings.compute_tokens
    return {
        "input_tokens": num_tokens,
        "input_tokens_details": {"cached_tokens": found.num_cached, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_tokens,
    }


ROUTES = (FORM.route("/v1/decisions", decisions, DecisionsBody, DecisionsReply),)
