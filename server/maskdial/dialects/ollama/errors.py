"""How Ollama's dialect writes errors, and lines of streams."""

from maskdial.dialects.errors import ErrorForm
from maskdial.dialects.ollama.replies import OllamaError
from maskdial.errors import MaskdialError
from maskdial.http.replies import encode_json
from maskdial.http.sse import escape_line_ends

LINES = "application/x-ndjson"
"""The media type of a stream: a line of JSON for each event."""


def line(content: object) -> bytes:
    """One event of a stream."""
    return escape_line_ends(encode_json(content)) + b"\n"


def error_content(error: MaskdialError) -> OllamaError:
    """An error as Ollama's API writes it."""
    return {"error": error.message}


FORM = ErrorForm("ollama", error_content, OllamaError, prefix="/api/", stream_type=LINES)
