"""`POST /api/embed` and `/api/embeddings`: texts as vectors, as Ollama has them."""

import time
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Response
from pydantic import BeforeValidator, Field

from maskdial.ask.catalogue import task_of
from maskdial.ask.embed import embed_all
from maskdial.bounds import Range
from maskdial.dialects.body import example
from maskdial.dialects.call import Call
from maskdial.dialects.ollama.body import OllamaBody
from maskdial.dialects.ollama.options import Options
from maskdial.dialects.vectors import SECONDS_PER_VALUE
from maskdial.engine.offload import offload
from maskdial.http.replies import json_reply, timing_headers
from maskdial.masked.tasks.embed import EmbedRequest
from maskdial.masked.tasks.task import Truncation


def _check_input(value: object) -> object:
    if not isinstance(value, str | list):
        raise ValueError("must be a string or a list of strings")
    for index, text in enumerate(value if isinstance(value, list) else ()):
        if not isinstance(text, str):
            raise ValueError(f"item {index} must be a string")
    return value


class VectorBody(OllamaBody):
    """The fields that `/api/embed` and `/api/embeddings` have in common."""

    neutral = {"stream": (False,)}  # noqa: RUF012

    options: Options | None = Field(None, description="Means nothing here.")


class EmbedBody(VectorBody):
    """Texts to embed; without any, the model is loaded."""

    spellings = {"texts": "input"}  # noqa: RUF012
    model_config = example({"input": ["The ship left at dawn.", "She baked bread."]})

    input: Annotated[
        str | list[str],
        BeforeValidator(
            _check_input,
            json_schema_input_type=str | list[str],
        ),
    ] = Field(description="A text, or a list of texts; blank ones are embedded as they are.")
    truncate: bool | None = Field(None, description="Truncate long texts. Default: true.")
    dimensions: Annotated[int, Range(1)] | None = Field(
        None, description="Keep the first dimensions only. Default: all."
    )

    @property
    def texts(self) -> list[str]:
        """The texts, also if it is one."""
        if isinstance(self.input, list):
            return self.input
        return [self.input] if self.input.strip() else []


class EmbeddingsBody(VectorBody):
    """A text to embed; without one, the model is loaded."""

    spellings = {"texts": "prompt"}  # noqa: RUF012
    model_config = example({"prompt": "The ship left at dawn."})

    prompt: str = ""


async def embed(call: Call[EmbedBody]) -> Response:
    """Turns texts into vectors of length 1."""
    began = time.perf_counter_ns()
    body = call.body
    model = await call.masked(task_of(EmbedRequest))
    loaded = time.perf_counter_ns()
    content: dict[str, Any] = {"model": body.model or model.name, "embeddings": []}
    num_tokens, headers = 0, dict[str, str]()
    if body.texts:
        truncation = Truncation(body.truncate is not False, None)
        embedded = await embed_all(
            EmbedRequest(body.texts, truncation, normalize=True, dimensions=body.dimensions),
            model,
            call.server.config,
            call.deadline,
        )
        vectors, num_tokens = embedded.content, embedded.timings.compute_tokens
        headers = timing_headers(embedded.timings)
        content["embeddings"] = await offload(vectors.tolist, vectors.size * SECONDS_PER_VALUE)
    content |= _counts(began, loaded, num_tokens)
    num_values = sum(map(len, content["embeddings"]))
    return await offload(
        lambda: json_reply(content, headers=headers), num_values * SECONDS_PER_VALUE
    )


async def embeddings(call: Call[EmbeddingsBody]) -> Response:
    """Turns a text into a vector, as long as the model makes it: the older route."""
    text = call.body.prompt
    model = await call.masked(task_of(EmbedRequest))
    if not text.strip():
        return json_reply({"embedding": []})
    embedded = await call.answer(EmbedRequest([text], Truncation(True, None)), model)
    headers = timing_headers(embedded.timings)
    return json_reply({"embedding": embedded.content[0].tolist()}, headers=headers)


def _counts(began: int, loaded: int, num_tokens: int) -> Mapping[str, int]:
    return {
        "total_duration": time.perf_counter_ns() - began,
        "load_duration": loaded - began,
        "prompt_eval_count": num_tokens,
    }
