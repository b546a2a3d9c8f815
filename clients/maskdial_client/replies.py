"""Error replies: from an HTTP response to the exception that it stands for."""

import json
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from maskdial_client.errors import ApiError, api_error_class

_QUOTED_BYTES = 200


def error_from(response: httpx.Response) -> ApiError:
    """The exception for an error response that has been read.

    A proxy in between may reply with something other than the API's JSON; the exception's class
    then follows from the status, and its message quotes the start of the body.
    """
    document: Any
    try:
        document = json.loads(response.content)
    except ValueError:
        document = None
    error_type = None
    openai_error = document.get("error") if isinstance(document, dict) else None
    if isinstance(openai_error, dict) and isinstance(openai_error.get("message"), str):
        message = openai_error["message"]
        error_type = "validation" if response.status_code == 400 else None
    elif isinstance(document, dict) and isinstance(document.get("error"), str):
        message = document["error"]
        if isinstance(document.get("error_type"), str):
            error_type = document["error_type"]
    else:
        start = response.content[:_QUOTED_BYTES].decode("utf-8", "replace").strip()
        message = f"the reply was HTTP {response.status_code}" + (f": {start}" if start else "")
    return api_error_class(error_type, response.status_code)(
        message,
        status=response.status_code,
        error_type=error_type,
        request_id=response.headers.get("x-request-id"),
        retry_after=retry_after_seconds(response.headers.get("retry-after")),
    )


def retry_after_seconds(value: str | None, now: datetime | None = None) -> float | None:
    """A Retry-After header (RFC 9110, 10.2.3: seconds or a date) in seconds; None if invalid."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - (now or datetime.now(UTC))).total_seconds())
