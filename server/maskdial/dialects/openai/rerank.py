"""`POST /v1/rerank` and `/v2/rerank`, as Cohere and Jina have them."""

import uuid
from functools import partial
from typing import Annotated

import pydantic
from fastapi import Request, Response
from pydantic import Field

from maskdial.dialects.body import (
    LARGEST_INT,
    AnyText,
    Range,
    Size,
    Wire,
    example,
    read_body,
    wire_names,
)
from maskdial.dialects.call import masked_for
from maskdial.dialects.native.task_bodies import INSTRUCTION_IN_TEMPLATE, Text, TruncationParameters
from maskdial.dialects.native.tasks import task_of
from maskdial.dialects.openai.base import OpenAIBody
from maskdial.dialects.openai.embeddings import prompt_usage
from maskdial.dialects.openai.errors import openai_route
from maskdial.dialects.openai.models import about_model
from maskdial.dialects.openai.replies import RankedDocument, RankReply
from maskdial.dialects.shared_routes import Sharer
from maskdial.engine.timing import Deadline
from maskdial.http.context import server_context
from maskdial.http.disconnect import unless_gone
from maskdial.http.replies import json_reply, timing_headers
from maskdial.masked import run
from maskdial.masked.tasks.rerank import RerankRequest

_NAMES = {"texts": "documents"}


def _document_text(document: object) -> object:
    """A document may be an object with its text."""
    if isinstance(document, dict) and document.keys() == {"text"}:
        return document["text"]
    if isinstance(document, str):
        return document
    raise ValueError('must be a string or {"text": "..."}')


class _TextDocument(Wire):
    """A document as an object."""

    text: AnyText


_Document = Annotated[
    Text, pydantic.BeforeValidator(_document_text, json_schema_input_type=AnyText | _TextDocument)
]


class RankBody(TruncationParameters, OpenAIBody):
    """A query, and documents to put in order. Truncation is an extension."""

    model_config = example(
        {"query": "Where is the ship?", "documents": ["The ship left at dawn.", "She baked bread."]}
    )

    query: Text
    documents: Annotated[list[_Document], Size(1, LARGEST_INT, "documents")]
    top_n: Annotated[int, Range(1)] | None = Field(
        None, description="Return this many of the best documents. Default: all."
    )
    return_documents: bool | None = Field(
        None, description="Return the documents with their scores. Default: false."
    )
    instruction: Text | None = Field(
        None, description=f"Extension, as in vLLM: {INSTRUCTION_IN_TEMPLATE}"
    )


async def rerank(request: Request) -> Response:
    """Orders documents by how well they answer a query, with their scores."""
    server = server_context(request)
    body = await read_body(RankBody, await request.body())
    deadline = Deadline(body.timeout, server.config)
    with about_model():
        model = await masked_for(request, task_of(RerankRequest), body.choice(), deadline)
    with wire_names(_NAMES, batch=True):
        wanted = RerankRequest(
            body.query, body.documents, body.truncation, instruction=body.instruction
        )
        answer = await run.answer(
            wanted, model, server.config, deadline, partial(unless_gone, request)
        )
    results: list[RankedDocument] = [
        {"index": rank.index, "relevance_score": rank.score}
        for rank in answer.content[: body.top_n]
    ]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": body.documents[result["index"]]}
    content: RankReply = {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": model.name,
        "results": results,
        "usage": prompt_usage(answer.timings.compute_tokens),
    }
    return json_reply(content, headers=timing_headers(answer.timings))


SHARER = Sharer(rerank, RankBody, RankReply, ("documents",))
"""Its part of `/rerank`."""

ROUTES = tuple(
    openai_route(path, rerank, RankBody, RankReply) for path in ("/v1/rerank", "/v2/rerank")
)
