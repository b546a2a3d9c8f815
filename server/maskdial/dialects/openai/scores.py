"""`POST /v1/score`, and its part of `/score`: scores of pairs of texts, as vLLM has them."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

import pydantic
from fastapi import Response
from pydantic import Field, model_validator

from maskdial.ask.catalogue import task_of
from maskdial.dialects.body import AT_LEAST_ONE, AnyText, FieldError, example
from maskdial.dialects.call import Call, endpoint
from maskdial.dialects.masked_body import TruncationParameters
from maskdial.dialects.openai.base import OpenAIBody, check_items
from maskdial.dialects.openai.embeddings import prompt_usage
from maskdial.dialects.openai.errors import FORM
from maskdial.dialects.openai.replies import ScoreListReply
from maskdial.dialects.shared_routes import Sharer
from maskdial.http.replies import json_reply, timing_headers
from maskdial.masked.tasks.pair_scores import PairScoresRequest
from maskdial.masked.tasks.task import Truncation

_PAIRS = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)
"""What vLLM's versions call the two sides."""


_Texts = Annotated[
    AnyText | Annotated[list[AnyText], Field(json_schema_extra=AT_LEAST_ONE)],
    pydantic.BeforeValidator(check_items),
]


class PoolingParameters(TruncationParameters):
    """What vLLM's requests to models that do not generate have in common."""

    truncate_prompt_tokens: Literal[-1] | None = Field(
        None, description="-1: as truncate, to what the model takes. Other numbers are refused."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="As truncation_direction."
    )
    use_activation: bool | None = Field(
        None,
        description="Whether scores are probabilities, and vectors have length 1; false: logits, "
        "and vectors as they are. Default: as the model was trained.",
    )

    @property
    def truncation(self) -> Truncation:
        enabled = True if self.truncate is None and self.truncate_prompt_tokens else self.truncate
        return Truncation(enabled, self.truncation_direction or self.truncation_side)


class ScoresBody(PoolingParameters, OpenAIBody):
    """Texts, and those to score them with: one for many, or as many of both."""

    model_config = example(
        {
            "text_1": "Where is the ship?",
            "text_2": ["The ship left at dawn.", "She baked bread."],
        }
    )

    text_1: _Texts | None = Field(None, description="A text, or as many as the others.")
    text_2: _Texts | None = Field(None, description="A text, or a list of them.")
    queries: _Texts | None = Field(None, description="text_1 by another name.")
    documents: _Texts | None = Field(None, description="text_2, beside queries.")
    items: _Texts | None = Field(None, description="text_2, beside queries.")
    data_1: _Texts | None = Field(None, description="text_1 by another name.")
    data_2: _Texts | None = Field(None, description="text_2, beside data_1.")

    @model_validator(mode="after")
    def _check_sides(self) -> Self:
        given = {name for pair in _PAIRS for name in pair if getattr(self, name) is not None}
        if not any(given == set(pair) for pair in _PAIRS):
            names = ", ".join(" and ".join(pair) for pair in _PAIRS)
            raise FieldError("text_1", f"give both sides of the pairs, by one of {names}")
        return self

    def names(self) -> Mapping[str, str]:
        first, second = self._sides
        return {"firsts": first, "seconds": second, "texts": second}

    @property
    def batch(self) -> bool:
        return any(isinstance(getattr(self, name), list) for name in self._sides)

    @property
    def _sides(self) -> tuple[str, str]:
        """What the two sides are called."""
        return next(pair for pair in _PAIRS if None not in map(self.__dict__.get, pair))

    def request(self) -> PairScoresRequest:
        """The body as a dialect-neutral request."""
        firsts, seconds = (_listed(getattr(self, name)) for name in self._sides)
        return PairScoresRequest(
            firsts, seconds, self.truncation, raw_scores=self.use_activation is False
        )


def _listed(texts: str | Sequence[str]) -> Sequence[str]:
    return [texts] if isinstance(texts, str) else texts


async def score_pairs(call: Call[ScoresBody]) -> Response:
    """Scores pairs of texts: by a reranker, or by the cosines of embeddings."""
    model = await call.masked(task_of(PairScoresRequest))
    answer = await call.answer(call.body.request(), model)
    content: ScoreListReply = {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model.name,
        "data": [
            {"index": index, "object": "score", "score": score}
            for index, score in enumerate(answer.content)
        ],
        "usage": prompt_usage(answer.timings.compute_tokens),
    }
    return json_reply(content, headers=timing_headers(answer.timings))


SHARER = Sharer(
    endpoint(score_pairs, ScoresBody),
    ScoresBody,
    ScoreListReply,
    ("text_1", "text_2", "queries", "documents", "items", "data_1", "data_2"),
)
"""Its part of `/score`."""

ROUTES = (FORM.route("/v1/score", score_pairs, ScoresBody, ScoreListReply),)
