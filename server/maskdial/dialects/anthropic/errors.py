"""How Anthropic's dialect writes errors."""

from maskdial.dialects.anthropic.replies import AnthropicError
from maskdial.dialects.errors import ErrorForm
from maskdial.errors import (
    DeadlineError,
    ForbiddenError,
    MaskdialError,
    NotFoundError,
    OverloadedError,
    SlowBodyError,
    TooLargeError,
    UnauthorizedError,
    ValidationError,
)
from maskdial.http.replies import encode_json
from maskdial.http.sse import named_frame

_TYPES: tuple[tuple[type[MaskdialError], str], ...] = (
    (ValidationError, "invalid_request_error"),
    (UnauthorizedError, "authentication_error"),
    (ForbiddenError, "permission_error"),
    (NotFoundError, "not_found_error"),
    (SlowBodyError, "timeout_error"),
    (TooLargeError, "request_too_large"),
    (OverloadedError, "rate_limit_error"),
    (DeadlineError, "timeout_error"),
)


def error_frame(error: MaskdialError) -> bytes:
    """An error that ends a stream."""
    return named_frame("error", encode_json(error_content(error)))


def error_content(error: MaskdialError) -> AnthropicError:
    """An error as Anthropic's API writes it; the message names the field at fault."""
    kind = next((name for cls, name in _TYPES if isinstance(error, cls)), "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


FORM = ErrorForm("anthropic", error_content, AnthropicError, prefix="/v1/messages")
