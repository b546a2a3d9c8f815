"""`POST /v1/rerank` and `/v2/rerank`, as Cohere and Jina have them."""

import uuid
from typing import Annotated

import pydantic
from fastapi import Response
from pydantic import Field

from maskdial.ask.catalogue import task_of
from maskdial.bounds import LARGEST_INT, Range, Size
from maskdial.dialects.body import AnyText, Wire, example
from maskdial.dialects.call import Call, endpoint
from maskdial.dialects.masked_body import Text, TruncationParameters
from maskdial.dialects.openai.base import OpenAIBody
from maskdial.dialects.openai.embeddings import prompt_usage
from maskdial.dialects.openai.errors import FORM
from maskdial.dialects.openai.replies import RankedDocument, RankReply
from maskdial.dialects.shared_routes import Sharer
from maskdial.dialects.vectors import INSTRUCTION_IN_TEMPLATE
from maskdial.http.replies import json_reply, timing_headers
from maskdial.masked.tasks.rerank import RerankRequest


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

    spellings = {"texts": "documents"}  # noqa: RUF012
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


async def rerank(call: Call[RankBody]) -> Response:
    """Orders documents by how well they answer a query, with their scores."""
    body = call.body
    model = await call.masked(task_of(RerankRequest))
    wanted = RerankRequest(
        body.query,
        body.documents,
        body.truncation,
        instruction=body.instruction,
        top_n=body.top_n,
    )
    answer = await call.answer(wanted, model)
    results: list[RankedDocument] = [
        {"index": rank.index, "relevance_score": rank.score} for rank in answer.content
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


SHARER = Sharer(endpoint(rerank, RankBody), RankBody, RankReply, ("documents",))
"""Its part of `/rerank`."""

ROUTES = tuple(
    FORM.route(path, rerank, RankBody, RankReply) for path in ("/v1/rerank", "/v2/rerank")
)
