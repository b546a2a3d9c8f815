"""How the OpenAI dialect writes errors."""

from maskdial.dialects.errors import ErrorForm
from maskdial.dialects.openai.replies import OpenAIError
from maskdial.errors import (
    DeadlineError,
    ForbiddenError,
    MaskdialError,
    NotFoundError,
    OverloadedError,
    PromptTooLongError,
    RefusedError,
    SlowBodyError,
    TooLargeError,
    UnauthorizedError,
    ValidationError,
)
from maskdial.http.replies import encode_json
from maskdial.http.sse import data_frame

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""The code of a prompt that does not fit the context."""

_INVALID = "invalid_request_error"
_FAULTS = (
    ValidationError,
    UnauthorizedError,
    ForbiddenError,
    NotFoundError,
    SlowBodyError,
    TooLargeError,
)


def error_frame(error: MaskdialError) -> bytes:
    """An error that ends a stream."""
    return data_frame(encode_json(error_content(error)))


def error_content(error: MaskdialError) -> OpenAIError:
    """An error as the OpenAI API writes it: ``param`` is the field at fault, if one is."""
    param = error.field if isinstance(error, ValidationError) else None
    code = None if isinstance(error, ValidationError) else error.error_type
    if isinstance(error, RefusedError):
        code = error.error_type
    if isinstance(error, PromptTooLongError):
        code = CONTEXT_LENGTH_EXCEEDED
    if isinstance(error, NotFoundError):
        param, code = error.field, "model_not_found" if error.field == "model" else None
    if isinstance(error, UnauthorizedError):
        code = "invalid_api_key"
    return {"error": {"message": error.message, "type": _type(error), "param": param, "code": code}}


def _type(error: MaskdialError) -> str:
    if isinstance(error, _FAULTS):
        return _INVALID
    if isinstance(error, OverloadedError):
        return "rate_limit_error"
    return "timeout_error" if isinstance(error, DeadlineError) else "server_error"


FORM = ErrorForm("openai", error_content, OpenAIError, prefix="/v1/")
