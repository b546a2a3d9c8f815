"""Replies: JSON, headers, the native form of errors, and what all SDKs expect of errors."""

import json
from collections.abc import Sequence

from fastapi import Response
from pydantic_core import to_json
from typing_extensions import TypedDict

from maskdial.engine.timing import Timings
from maskdial.errors import DeadlineError, MaskdialError, UnauthorizedError, ValidationError

_MAX_WARNING_LENGTH = 1000  # characters, of all together


class NativeError(TypedDict):
    """An error as the native API writes it: a sentence, and the name of its kind."""

    error: str
    error_type: str


def encode_json(content: object) -> bytes:
    """JSON; numbers that it cannot represent, such as the logarithm of 0, become null.

    Dataclasses are objects of their fields.
    """
    return to_json(content, inf_nan_mode="null")


def json_reply(
    content: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A response whose body is compact JSON, encoded once, with extra headers."""
    return Response(encode_json(content), status, headers, media_type="application/json")


def timing_headers(timings: Timings) -> dict[str, str]:
    """``x-queue-time`` and ``x-inference-time`` in milliseconds, ``x-compute-tokens``,
    ``x-truncated-tokens`` where tokens were truncated, and ``x-cached-tokens`` where answers were
    kept.
    """
    cached = {"x-cached-tokens": str(timings.cached_tokens)} if timings.cached_tokens else {}
    return (
        truncation_header(timings.truncated_tokens)
        | cached
        | {
            "x-queue-time": f"{timings.queue_seconds * 1e3:.3f}",
            "x-inference-time": f"{timings.inference_seconds * 1e3:.3f}",
            "x-compute-tokens": str(timings.compute_tokens),
        }
    )


def truncation_header(num_tokens: int) -> dict[str, str]:
    """``x-truncated-tokens``, where tokens were truncated."""
    return {"x-truncated-tokens": str(num_tokens)} if num_tokens else {}


def warnings_header(warnings: Sequence[str]) -> dict[str, str]:
    """``x-schema-warnings``: which constraints of a request's schemas are not enforced.

    Sentences are separated by ``; ``. Characters beyond ASCII, and semicolons, are escaped as in
    JSON; beyond 1,000 characters, the rest is counted.
    """
    told: list[str] = []
    room = _MAX_WARNING_LENGTH
    for warning in warnings:
        text = json.dumps(warning)[1:-1].replace(";", r"\u003b").replace("\x7f", r"\u007f")
        room -= len(text)
        if room < 0:
            break
        told.append(text)
    if len(told) < len(warnings):
        told.append(f"and {len(warnings) - len(told)} more")
    return {"x-schema-warnings": "; ".join(told)} if told else {}


def error_content(error: MaskdialError) -> NativeError:
    """An error as the native API writes it."""
    return {"error": error.message, "error_type": error.error_type}


def error_reply(error: MaskdialError) -> Response:
    """An error as a response of the native API."""
    return json_reply(error_content(error), status=error.status, headers=error_headers(error))


def error_headers(error: MaskdialError) -> dict[str, str]:
    """``Retry-After`` for errors that pass, and ``WWW-Authenticate`` where a key is missing."""
    if isinstance(error, UnauthorizedError):
        return {"www-authenticate": "Bearer"}
    return {} if error.retry_after is None else {"retry-after": str(error.retry_after)}


def sdk_error_reply(error: MaskdialError, content: object) -> Response:
    """An error as the SDKs of OpenAI and Anthropic expect it; the content is the dialect's.

    Bodies that cannot be served are 400 there, not 422.
    """
    headers = error_headers(error)
    if isinstance(error, DeadlineError):
        # The SDKs would retry a 504, and spend the same time again for nothing.
        headers["x-should-retry"] = "false"
    status = 400 if isinstance(error, ValidationError) else error.status
    return json_reply(content, status=status, headers=headers)
