"""How the log is written: as text or as JSON, one line for each record in any case."""

import json
import logging
import re
import textwrap
from datetime import UTC, datetime
from typing import Any, Literal

from maskdial.log_writer import LogWriter

ACCESS = "maskdial.access"
"""The logger with a record for each request, whose attribute ``access`` has its fields."""

_STDERR = 2

LogFormat = Literal["text", "json", "json-texts"]

# The C0 and C1 control characters, delete, and Unicode's line separators; a tab is harmless.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


STACKS = "stacks"
"""The attribute of a record that has the stacks of all threads, a frame a line."""


def configure(level: str, log_format: LogFormat) -> None:
    """Sets up the root logger, which writes to stderr. Only JSON has the access log."""
    handler = LogWriter(_STDERR)
    handler.setFormatter(TextFormatter() if log_format == "text" else JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    logging.getLogger(ACCESS).setLevel("WARNING" if log_format == "text" else "INFO")


class TextFormatter(logging.Formatter):
    """Lines for people. Those of a traceback are indented: none of them can pass for a record."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        text, stacks = super().format(record), getattr(record, STACKS, "")
        return f"{text}\n{textwrap.indent(stacks.rstrip(), '    ')}" if stacks else text

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return _CONTROL.sub(_escaped, super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return textwrap.indent(super().formatException(ei), "    ")


class JsonFormatter(logging.Formatter):
    """Writes each record as one JSON object, for collectors of logs."""

    def format(self, record: logging.LogRecord) -> str:
        content = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        access = getattr(record, "access", None)
        if access is not None:
            content |= access
        else:
            content["message"] = record.getMessage()
        if record.exc_info:
            content["traceback"] = self.formatException(record.exc_info)
        if stacks := getattr(record, STACKS, ""):
            content[STACKS] = stacks
        # All but ASCII is escaped, and of that all control characters but one.
        return json.dumps(content).replace("\x7f", "\\u007f")


def _escaped(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode()
