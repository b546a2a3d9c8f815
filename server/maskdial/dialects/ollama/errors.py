"""How Ollama's dialect writes errors and lines of streams, and the routes that do so."""

from typing import Any

from fastapi import Response

from maskdial.dialects.call import Answerer, BodyT, task_route
from maskdial.dialects.ollama.replies import OllamaError
from maskdial.errors import MaskdialError
from maskdial.http.replies import encode_json, json_reply, sdk_error_reply
from maskdial.http.route import TaskRoute
from maskdial.http.sse import escape_line_ends

PREFIX = "/api/"
"""Below it, every failure has this form, also that of a route that does not exist."""

LINES = "application/x-ndjson"
"""The media type of a stream: a line of JSON for each event."""


def ollama_route(
    path: str, answer: Answerer[BodyT], body: type[BodyT], reply: Any, *, streams: bool = False
) -> TaskRoute:
    """A task route whose errors are Ollama's."""
    return task_route(
        path,
        answer,
        body,
        reply,
        streams=streams,
        stream_type=LINES,
        error=OllamaError,
        error_reply=error_reply,
        invalid_status=400,
        statuses=(403,),
        tags=["ollama"],
    )


def line(content: object) -> bytes:
    """One event of a stream."""
    return escape_line_ends(encode_json(content)) + b"\n"


def error_line(error: MaskdialError) -> bytes:
    """An error that ends a stream."""
    return line(_content(error.message))


def error_reply(error: MaskdialError) -> Response:
    """An error as a response of Ollama's API."""
    return sdk_error_reply(error, _content(error.message))


def http_error_reply(status: int, message: str, headers: dict[str, str]) -> Response:
    """A routing error (no such path, wrong method) as a response of Ollama's API."""
    return json_reply(_content(message), status=status, headers=headers)


def _content(message: str) -> OllamaError:
    return {"error": message}
