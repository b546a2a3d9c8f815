"""How the OpenAI dialect writes errors, and the routes that write them so."""

from typing import Any

from fastapi import Response

from maskdial.dialects.call import Answerer, BodyT, task_route
from maskdial.dialects.openai.replies import OpenAIError
from maskdial.errors import (
    DeadlineError,
    ForbiddenError,
    MaskdialError,
    NotFoundError,
    OverloadedError,
    PromptTooLongError,
    SlowBodyError,
    TooLargeError,
    UnauthorizedError,
    ValidationError,
)
from maskdial.http.replies import encode_json, json_reply, sdk_error_reply
from maskdial.http.route import TaskRoute
from maskdial.http.sse import data_frame

PREFIX = "/v1/"
"""Below it, every failure has this form, also that of a route that does not exist."""

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


def openai_route(
    path: str, answer: Answerer[BodyT], body: type[BodyT], reply: Any, *, streams: bool = False
) -> TaskRoute:
    """A task route whose errors are OpenAI's."""
    return task_route(
        path,
        answer,
        body,
        reply,
        streams=streams,
        error=OpenAIError,
        error_reply=error_reply,
        invalid_status=400,
        tags=["openai"],
    )


def error_reply(error: MaskdialError) -> Response:
    """An error as a response of the OpenAI API."""
    return sdk_error_reply(error, error_content(error))


def error_frame(error: MaskdialError) -> bytes:
    """An error that ends a stream."""
    return data_frame(encode_json(error_content(error)))


def error_content(error: MaskdialError) -> OpenAIError:
    """An error as the OpenAI API writes it: ``param`` is the field at fault, if one is."""
    param = error.field if isinstance(error, ValidationError) else None
    code = None if isinstance(error, ValidationError) else error.error_type
    if isinstance(error, PromptTooLongError):
        code = CONTEXT_LENGTH_EXCEEDED
    if isinstance(error, NotFoundError):
        param, code = error.field, "model_not_found" if error.field == "model" else None
    if isinstance(error, UnauthorizedError):
        code = "invalid_api_key"
    return _content(error.message, _type(error), param, code)


def http_error_reply(status: int, message: str, headers: dict[str, str]) -> Response:
    """A routing error (no such path, wrong method) as a response of the OpenAI API."""
    return json_reply(_content(message, _INVALID, None, None), status=status, headers=headers)


def _type(error: MaskdialError) -> str:
    if isinstance(error, _FAULTS):
        return _INVALID
    if isinstance(error, OverloadedError):
        return "rate_limit_error"
    return "timeout_error" if isinstance(error, DeadlineError) else "server_error"


def _content(message: str, kind: str, param: str | None, code: str | None) -> OpenAIError:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
