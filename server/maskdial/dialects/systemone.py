"""`POST /v1/systemone`: typed questions about a state, as decision models are asked.

The bodies and answers of transformers serve, vLLM and llama.cpp; errors are OpenAI's, as in vLLM.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired, Self

from fastapi import Response
from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import TypedDict

from maskdial.ask.catalogue import DECIDE
from maskdial.ask.decide import decide
from maskdial.bounds import Size
from maskdial.dialects.body import BodyError, FieldError, TaskBody, example
from maskdial.dialects.call import Call
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.masked_body import TruncationParameters
from maskdial.dialects.openai.errors import FORM
from maskdial.engine.questions import Content, Option, Probabilities, Question, as_text
from maskdial.errors import ValidationError, shortened
from maskdial.http.replies import json_reply, timing_headers

_MAX_QUESTIONS = 64
_KINDS: dict[str, Literal["predicate", "choice", "score"]] = {
    "noul": "predicate",
    "choice": "choice",
    "score": "score",
}


def _check_content(value: object) -> object:
    if not isinstance(value, str | dict | list):
        raise ValueError("must be a text, an object or a list")
    return value


def _check_criteria(value: object) -> object:
    """Pydantic would tell of each form of a value that fits none of them."""
    if not isinstance(value, dict | list):
        raise ValueError("must be an object or a list")
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if each is not None and not isinstance(each, str | dict | list):
            raise ValueError(f"{key} must be a text or JSON, or null")
    return value


State = Annotated[str | dict[str, Any] | list[Any], BeforeValidator(_check_content)]
Criteria = Annotated[dict[str, Content] | list[Content], BeforeValidator(_check_criteria)]


class SystemOneQuestion(Lenient):
    """A noul (true or false), a choice, or a score on levels."""

    within = "questions"

    type: Literal["noul", "choice", "score"]
    instructions: State | None = None
    criteria: Criteria | None = Field(
        None,
        description="Of a choice: its options with their meanings, or null. Of a score: its "
        "levels, from the lowest to the highest. Of a noul: what true and false mean, if anything.",
    )

    @model_validator(mode="after")
    def _check_criteria(self) -> Self:
        given = self.criteria
        if self.type == "score":
            if not isinstance(given, list) or not given:
                raise FieldError("criteria", "a score needs a list of levels")
            if None in given:
                raise FieldError("criteria", "a level must be a text or JSON, not null")
            if len({json.dumps(each, sort_keys=True) for each in given}) < len(given):
                raise FieldError("criteria", "levels must be different from each other")
        elif isinstance(given, list):
            raise FieldError("criteria", f"a {self.type} takes an object, not a list")
        elif self.type == "choice" and not given:
            raise FieldError("criteria", "a choice needs an object with its options")
        elif self.type == "noul" and not (given or {}).keys() <= {"true", "false"}:
            raise FieldError("criteria", "a noul has no options but true and false")
        return self

    def question(self, name: str) -> Question:
        """The question as `/decide` has it, neutral of this template."""
        given = self.criteria
        options: tuple[Option, ...] = ()
        meanings: dict[str, Content] = {}
        if isinstance(given, list):
            options = tuple(Option(as_text(level), content=level) for level in given)
        elif self.type == "choice" and given is not None:
            options = tuple(Option(key, as_text(each), each) for key, each in given.items())
        else:
            meanings = given or {}
        kind, instructions = _KINDS[self.type], as_text(self.instructions)
        return Question(kind, instructions, options, name, self.instructions, meanings)

    def answer(self, probabilities: Probabilities) -> dict[str, Any]:
        """The answer as it is sent."""
        if self.type == "noul":
            return {"type": "noul", "noul": probabilities[0]}
        given = self.criteria
        assert given is not None, "the validator asks for options"
        levels = given if isinstance(given, list) else []
        options = [str(index) for index in range(len(levels))] or [*given]
        by_option = dict(zip(options, probabilities, strict=True))
        best = probabilities.index(max(probabilities))
        if self.type == "choice":
            return {
                "type": "choice",
                "choice": options[best],
                "confidence": _confidence(probabilities),
                "probabilities": by_option,
            }
        return {
            "type": "score",
            "score": sum(level * each for level, each in enumerate(probabilities)),
            "legend": dict(zip(options, levels, strict=True)),
            "confidence": _nearness(probabilities, best),
            "probabilities": by_option,
        }


def _confidence(probabilities: Sequence[float]) -> float:
    """How far the likeliest option stands out: 0 if all are alike, 1 if it is certain."""
    if len(probabilities) == 1:
        return 1.0
    uniform = 1 / len(probabilities)
    return max(0.0, (max(probabilities) - uniform) / (1 - uniform))


def _nearness(probabilities: Sequence[float], best: int) -> float:
    """How near the likeliest level the others' probability lies: 1 if it is certain, 0 if it lies
    as far from it as a uniform distribution does from its middle.
    """
    count = len(probabilities)
    if count == 1:
        return 1.0
    distance = sum(each * abs(level - best) for level, each in enumerate(probabilities))
    uniform = sum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return max(0.0, 1 - distance / uniform)


class SystemOneBody(Lenient, TruncationParameters, TaskBody):
    """A state, and questions about it by their names. Truncation is an extension."""

    spellings = {"text": "state"}  # noqa: RUF012

    model_config = example(
        {
            "model": "sentiment",
            "state": "A warm, funny and quietly moving film.",
            "questions": {
                "film": {
                    "type": "choice",
                    "instructions": "How is the film?",
                    "criteria": {"POSITIVE": None, "NEGATIVE": None},
                }
            },
        }
    )

    state: State
    questions: Annotated[dict[str, SystemOneQuestion], Size(1, _MAX_QUESTIONS, "questions")]
    assets: dict[str, Any] = Field(
        default_factory=dict, description="Images are refused; an empty object is not."
    )

    @model_validator(mode="after")
    def _check_assets(self) -> Self:
        if self.assets:
            raise FieldError("assets", "images are not supported; describe them in the state")
        return self

    def locate(self, error: ValidationError) -> ValidationError:
        """As of other bodies, with a question by its name."""
        if error.field != "questions" or error.index is None:
            return super().locate(error)
        where = f"questions.{shortened([*self.questions][error.index])}"
        return BodyError(f"{where}: {error.message}", field=where)


class SystemOneAnswer(TypedDict):
    """An answer: the probability that something is true, an option, or a score."""

    type: Literal["noul", "choice", "score"]
    noul: NotRequired[float]
    choice: NotRequired[str]
    score: NotRequired[float]
    legend: NotRequired[dict[str, Any]]
    confidence: NotRequired[float]
    probabilities: NotRequired[dict[str, float]]


class SystemOneUsage(TypedDict):
    """Tokens that the model read."""

    input_tokens: int
    output_tokens: int


class SystemOneReply(TypedDict):
    """Answers by the names of their questions."""

    model: str
    answers: dict[str, SystemOneAnswer]
    usage: SystemOneUsage


async def systemone(call: Call[SystemOneBody]) -> Response:
    """Answers typed questions about a state with the probabilities of their options.

    How a model answers, and the same questions' probabilities, are those of `/v1/decisions`.
    """
    body = call.body
    model = await call.model(DECIDE)
    found = await decide(
        body.state,
        [each.question(name) for name, each in body.questions.items()],
        model,
        call.server.config,
        call.deadline,
        truncation=body.truncation,
    )
    answers = {
        name: question.answer(probabilities)
        for (name, question), probabilities in zip(
            body.questions.items(), found.probabilities, strict=True
        )
    }
    usage = {"input_tokens": found.timings.compute_tokens, "output_tokens": 0}
    content = {"model": model.name, "answers": answers, "usage": usage}
    return json_reply(content, headers=timing_headers(found.timings))


ROUTES = (FORM.route("/v1/systemone", systemone, SystemOneBody, SystemOneReply),)
