"""`POST /v1/embeddings`: texts or token ids as vectors."""

from collections.abc import Sequence
from typing import Annotated, TypeVar

import pydantic
from fastapi import Response
from pydantic import Field

from maskdial.ask.catalogue import task_of
from maskdial.ask.embed import embed_all
from maskdial.bounds import Range
from maskdial.bundle.texts import check_ids
from maskdial.bundle.tokenizer import TextOrIds
from maskdial.dialects.body import TaskBody, example
from maskdial.dialects.call import Call
from maskdial.dialects.masked_body import Text, TruncationParameters
from maskdial.dialects.openai.base import (
    NotBlankInput,
    OpenAIBody,
    TextsOrIds,
    check_input,
    inputs_of,
    is_batch,
)
from maskdial.dialects.openai.errors import FORM
from maskdial.dialects.openai.replies import EmbeddingsReply, PromptUsage
from maskdial.dialects.vectors import (
    INSTRUCTION_IN_PROMPT,
    SECONDS_PER_VALUE,
    TRAINED_TASK,
    VectorForm,
)
from maskdial.engine.offload import offload
from maskdial.errors import ValidationError
from maskdial.http.replies import json_reply, timing_headers
from maskdial.masked.model import MaskedModel
from maskdial.masked.tasks.embed import EmbedRequest

AnyBody = TypeVar("AnyBody", bound=TaskBody)

_FOREIGN_IDS = (
    "token ids must be of the model's own tokenizer: LangChain sends those of OpenAI's unless "
    "check_embedding_ctx_length=False"
)


def _check_texts(value: object) -> object:
    """Blank texts among others are embedded as they are: they refuse no document's other lines."""
    check_input(value)
    texts = value if isinstance(value, list) else [value]
    if all(isinstance(text, str) and not text.strip() for text in texts):
        raise ValueError("must not be empty")
    return value


class EmbeddingsBody(VectorForm, TruncationParameters, OpenAIBody):
    """Texts to embed. Truncation and ``output_dtype`` are extensions."""

    spellings = {"texts": "input"}  # noqa: RUF012
    model_config = example({"input": ["The ship left at dawn.", "She baked bread."]})

    input: Annotated[
        TextsOrIds, pydantic.PlainValidator(_check_texts, json_schema_input_type=NotBlankInput)
    ] = Field(
        description="A text, a list of texts, a list of token ids, or a list of such lists. Token "
        "ids are used unchanged."
    )
    dimensions: Annotated[int, Range(1)] | None = Field(
        None, description="Keep the first dimensions only, and normalize again. Default: all."
    )
    prompt_name: str | None = Field(
        None, description="Extension: which of the model's prompts to put before every text."
    )
    instruction: Text | None = Field(None, description=f"Extension: {INSTRUCTION_IN_PROMPT}")
    task: Text | None = Field(None, description=f"Jina's: {TRAINED_TASK}")

    @property
    def batch(self) -> bool:
        return is_batch(self.input)


async def embeddings(call: Call[EmbeddingsBody]) -> Response:
    """Turns a text into a vector, or several texts into one each."""
    body = call.body
    model = await call.masked(task_of(EmbedRequest))
    texts = inputs_of(body.input)
    _check_own_ids(texts, model)
    wanted = EmbedRequest(
        texts,
        body.truncation,
        body.prompt_name,
        body.instruction,
        dimensions=body.dimensions,
        dtypes=body.dtypes,
        trained_for=body.task,
    )
    embedded = await embed_all(wanted, model, call.server.config, call.deadline)
    vectors, timings = embedded.content, embedded.timings

    def reply() -> Response:
        content = {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": vector}
                for index, vector in enumerate(body.write(vectors))
            ],
            "model": model.name,
            "usage": prompt_usage(timings.compute_tokens),
        }
        return json_reply(content, headers=timing_headers(timings))

    return await offload(reply, vectors.size * SECONDS_PER_VALUE)


def _check_own_ids(texts: Sequence[TextOrIds], model: MaskedModel) -> None:
    for index, ids in enumerate(texts):
        if isinstance(ids, str):
            continue
        try:
            check_ids(ids, model)
        except ValidationError as error:
            raise ValidationError(
                f"{error.message}; {_FOREIGN_IDS}", field="texts", index=index
            ) from error


def prompt_usage(num_tokens: int) -> PromptUsage:
    """Token counts of a request that generates none."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


ROUTES = tuple(
    FORM.route(path, embeddings, EmbeddingsBody, EmbeddingsReply)
    for path in ("/v1/embeddings", "/embeddings")
)
