"""How Anthropic's dialect writes errors, and the routes that write them so."""

from typing import Any

from fastapi import Response

from maskdial.dialects.anthropic.replies import AnthropicError
from maskdial.dialects.call import Answerer, BodyT, task_route
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
from maskdial.http.replies import encode_json, json_reply, sdk_error_reply
from maskdial.http.route import TaskRoute
from maskdial.http.sse import named_frame

PREFIX = "/v1/messages"
"""Routing errors have this form at this path and below it."""

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


def anthropic_route(
    path: str, answer: Answerer[BodyT], body: type[BodyT], reply: Any, *, streams: bool = False
) -> TaskRoute:
    """A task route whose errors are Anthropic's."""
    return task_route(
        path,
        answer,
        body,
        reply,
        streams=streams,
        error=AnthropicError,
        error_reply=error_reply,
        invalid_status=400,
        tags=["anthropic"],
    )


def event_frame(content: dict[str, Any]) -> bytes:
    """A server-sent event, named after its type."""
    return named_frame(content["type"], encode_json(content))


def error_reply(error: MaskdialError) -> Response:
    """An error as a response of Anthropic's API."""
    return sdk_error_reply(error, error_content(error))


def error_frame(error: MaskdialError) -> bytes:
    """An error that ends a stream."""
    return named_frame("error", encode_json(error_content(error)))


def error_content(error: MaskdialError) -> AnthropicError:
    """An error as Anthropic's API writes it; the message names the field at fault."""
    kind = next((name for cls, name in _TYPES if isinstance(error, cls)), "api_error")
    return _content(error.message, kind)


def http_error_reply(status: int, message: str, headers: dict[str, str]) -> Response:
    """A routing error (no such path, wrong method) as a response of Anthropic's API."""
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    return json_reply(_content(message, kind), status=status, headers=headers)


def _content(message: str, kind: str) -> AnthropicError:
    return {"type": "error", "error": {"type": kind, "message": message}}
