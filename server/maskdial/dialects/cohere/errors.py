"""How Cohere's dialect writes errors, and the routes that write them so."""

import uuid
from typing import Any

from fastapi import Response
from typing_extensions import TypedDict

from maskdial.dialects.call import Answerer, BodyT, task_route
from maskdial.errors import MaskdialError
from maskdial.http.replies import sdk_error_reply
from maskdial.http.route import TaskRoute


class CohereError(TypedDict):
    """An error as Cohere's API writes it."""

    id: str
    message: str


def cohere_route(path: str, answer: Answerer[BodyT], body: type[BodyT], reply: Any) -> TaskRoute:
    """A task route whose errors are Cohere's."""
    return task_route(
        path,
        answer,
        body,
        reply,
        error=CohereError,
        error_reply=error_reply,
        invalid_status=400,
        tags=["cohere"],
    )


def error_reply(error: MaskdialError) -> Response:
    """An error as a response of Cohere's API."""
    content: CohereError = {"id": uuid.uuid4().hex, "message": error.message}
    return sdk_error_reply(error, content)
