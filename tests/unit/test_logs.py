"""Log lines: one for each record, whatever is in it."""

import json
import logging
import sys

import pytest

from maskdial.logs import JsonFormatter, TextFormatter

HOSTILE = "a\r\nFAKE INFO x\x00\x1b[31m\x7f\x85\u2028\ttab é"


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("maskdial", logging.INFO, __file__, 1, message, (), None)
    made.__dict__.update(extra)
    return made


def test_text_has_no_control_characters() -> None:
    line = TextFormatter().format(record(HOSTILE))
    assert line.endswith("INFO maskdial: a\\r\\nFAKE INFO x\\x00\\x1b[31m\\x7f\\x85\\u2028\ttab é")


def test_json_is_one_line_of_ascii() -> None:
    line = JsonFormatter().format(record(HOSTILE))
    assert line.isascii()
    assert line.isprintable()
    content = json.loads(line)
    assert (content["message"], content["level"], content["logger"]) == (
        HOSTILE,
        "info",
        "maskdial",
    )
    assert content["time"].endswith("+00:00")


def test_an_access_record_has_its_fields_instead_of_a_message() -> None:
    content = json.loads(JsonFormatter().format(record("x", access={"route": "/a", "status": 200})))
    assert (content["route"], content["status"]) == ("/a", 200)
    assert "message" not in content


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_a_traceback_cannot_pass_for_a_record(formatter: logging.Formatter) -> None:
    try:
        raise ValueError("x\n2026-01-01 00:00:00,000 INFO maskdial: fake")
    except ValueError:
        made = record("failed")
        made.exc_info = sys.exc_info()
    first, *others = formatter.format(made).split("\n")
    assert "failed" in first
    assert all(line.startswith("    ") for line in others)
