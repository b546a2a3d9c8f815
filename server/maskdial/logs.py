"""How the log is written: as text or as JSON, one line for each record in any case."""

import json
import logging
import os
import re
import textwrap
from datetime import UTC, datetime
from typing import Any, Literal

from maskdial.log_writer import LogWriter

ACCESS = "maskdial.access"
"""The logger with a record for each request, whose attribute ``access`` has its fields."""

_STDERR = 2

LogFormat = Literal["text", "json", "json-texts"]
"""With ``json-texts``, the access log has the bodies of requests and replies."""

# The C0 and C1 control characters, delete, and Unicode's line separators; a tab is harmless.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


STACKS = "stacks"
"""The attribute of a record that has the stacks of all threads, a frame a line."""


def configure(level: str, log_format: LogFormat) -> None:
    """Sets up the root logger, which writes to stderr.

    The access log is for collectors, in JSON, and for who watches a terminal.
    """
    handler = LogWriter(_STDERR)
    is_json = log_format != "text"
    handler.setFormatter(JsonFormatter() if is_json else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    has_access_log = is_json or os.isatty(_STDERR)
    logging.getLogger(ACCESS).setLevel("INFO" if has_access_log else "WARNING")
    handler.addFilter(lambda record: is_json or not _is_look(record))


def _is_look(record: logging.LogRecord) -> bool:
    """Whether a record is of a request that only looked, as pages, probes and scrapers do often."""
    access = getattr(record, "access", None)
    if access is None:
        return False
    return access["method"] in ("GET", "HEAD", "OPTIONS") and (access["status"] or 0) < 400


class TextFormatter(logging.Formatter):
    """Lines for people. Those of a traceback are indented: none of them can pass for a record."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        text, stacks = super().format(record), getattr(record, STACKS, "")
        return f"{text}\n{textwrap.indent(stacks.rstrip(), '    ')}" if stacks else text

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        if (access := getattr(record, "access", None)) is not None:
            record.message = _access_line(access)
        return _CONTROL.sub(_escaped, super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return textwrap.indent(super().formatException(ei), "    ")


def _access_line(access: dict[str, Any]) -> str:
    """What a person wants to know of a request: what was asked of whom, how it ended, how long."""
    ended = "" if access["outcome"] == "ok" else f" {access['outcome']}"
    parts = [
        f"{access['method']} {access['route'] or 'unknown route'} {access['status'] or '-'}{ended}",
        access["model"] and f"model {access['model']}",
        access["key"] and f"key {access['key']}",
        f"{access['total_ms']:,.0f} ms"
        + (f" ({access['queue_ms']:,.0f} in the queue)" if access.get("queue_ms", 0) >= 1 else ""),
        "compute_tokens" in access and f"{access['compute_tokens']:,} tokens computed",
    ]
    return ", ".join(part for part in parts if part)


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
