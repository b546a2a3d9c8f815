"""How Cohere's dialect writes errors, and the routes that write them so."""

import uuid
from typing import Any

from fastapi import Response
from typing_extensions import TypedDict

from maskdial.dialects.call import Answerer, BodyT, task_route
from maskdial.errors import MaskdialError
from maskdial.http.replies import encode_json, sdk_error_reply
from maskdial.http.route import TaskRoute
from maskdial.http.sse import named_frame


class CohereError(TypedDict):
    """An error as Cohere's API writes it."""

    id: str
    message: str


def cohere_route(
    path: str, answer: Answerer[BodyT], body: type[BodyT], reply: Any, *, streams: bool = False
) -> TaskRoute:
    """A task route whose errors are Cohere's."""
    return task_route(
        path,
        answer,
        body,
        reply,
        streams=streams,
        error=CohereError,
        error_reply=error_reply,
        invalid_status=400,
        tags=["cohere"],
    )


def event_frame(content: dict[str, Any]) -> bytes:
    """A server-sent event, named after its type."""
    return named_frame(content["type"], encode_json(content))


def error_frame(error: MaskdialError) -> bytes:
    """An error that ends a stream."""
    delta = {"error": error.message, "finish_reason": "ERROR"}
    return event_frame({"type": "message-end", "delta": delta})


def error_reply(error: MaskdialError) -> Response:
    """An error as a response of Cohere's API."""
    content: CohereError = {"id": uuid.uuid4().hex, "message": error.message}
    return sdk_error_reply(error, content)
