"""How Cohere's dialect writes errors."""

import uuid

from typing_extensions import TypedDict

from maskdial.dialects.errors import ErrorForm
from maskdial.errors import MaskdialError
from maskdial.http.sse import event_frame


class CohereError(TypedDict):
    """An error as Cohere's API writes it."""

    id: str
    message: str


def error_frame(error: MaskdialError) -> bytes:
    """An error that ends a stream."""
    delta = {"error": error.message, "finish_reason": "ERROR"}
    return event_frame({"type": "message-end", "delta": delta})


def error_content(error: MaskdialError) -> CohereError:
    """An error as Cohere's API writes it."""
    return {"id": uuid.uuid4().hex, "message": error.message}


FORM = ErrorForm("cohere", error_content, CohereError)
