"""Log lines: one for each record, whatever is in it."""

import fcntl
import json
import logging
import os
import resource
import sys
import threading
from collections.abc import Iterator

import pytest

from maskdial import logs
from maskdial.log_writer import LogWriter
from maskdial.logs import STACKS, JsonFormatter, TextFormatter

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


ACCESS_FIELDS = {
    "method": "POST",
    "route": "/v1/chat/completions",
    "model": "chat",
    "key": None,
    "status": 200,
    "outcome": "ok",
    "total_ms": 1234.5,
}


def access_line(**fields: object) -> str:
    made = record("request", access=ACCESS_FIELDS | fields)
    return TextFormatter().format(made).partition("maskdial: ")[2]


def test_a_request_is_a_line_for_a_person() -> None:
    assert access_line() == "POST /v1/chat/completions 200, model chat, 1,234 ms"
    line = access_line(key="team\n", queue_ms=12.3, compute_tokens=1500, status=499, outcome="gone")
    assert line == (
        "POST /v1/chat/completions 499 gone, model chat, key team\\n, 1,234 ms (12 in the queue), "
        "1,500 tokens computed"
    )
    refused = access_line(route=None, model=None, status=None, outcome="disconnect")
    assert refused == "POST unknown route - disconnect, 1,234 ms"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_who_watches_a_terminal_sees_what_was_asked_and_what_failed(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    root = logging.Logger("root")
    written: list[str] = []

    class Writer(logging.Handler):
        def emit(self, each: logging.LogRecord) -> None:
            written.append(self.format(each))

    monkeypatch.setattr(os, "isatty", lambda descriptor: is_terminal)
    monkeypatch.setattr(logs, "LogWriter", lambda descriptor: Writer())
    monkeypatch.setattr(
        logging, "basicConfig", lambda level, handlers: root.addHandler(handlers[0])
    )
    monkeypatch.setattr(logging, "captureWarnings", lambda on: None)
    logger = logging.getLogger(logs.ACCESS)
    level = logger.level
    try:
        logs.configure("info", "text")
        assert logger.isEnabledFor(logging.INFO) == is_terminal
        for fields in ({}, {"method": "GET"}, {"method": "GET", "status": 404}):
            root.handle(record("request", access=ACCESS_FIELDS | fields))
        assert [line.partition("maskdial: ")[2][:8] for line in written] == ["POST /v1", "GET /v1/"]
        logs.configure("info", "json")
        assert logger.isEnabledFor(logging.INFO)
    finally:
        logger.setLevel(level)


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


def test_stacks_are_part_of_their_record() -> None:
    made = record("stuck", **{STACKS: "Thread 0x1:\n  File x\n"})
    assert TextFormatter().format(made).endswith("stuck\n    Thread 0x1:\n      File x")
    assert json.loads(JsonFormatter().format(made))[STACKS] == "Thread 0x1:\n  File x\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The ends to read and to write; the former is closed by the test where that is its point."""
    ends = os.pipe()
    yield ends
    os.close(ends[1])


def read_lines(descriptor: int, last: str) -> list[str]:
    """All lines until one that has this text."""
    lines = []
    with open(descriptor, encoding="utf-8") as file:
        for line in file:
            lines.append(line.rstrip("\n"))
            if last in line:
                break
    return lines


def test_lines_are_written_in_their_order(pipe: tuple[int, int]) -> None:
    writer = LogWriter(pipe[1])
    for number in range(1000):
        writer.handle(record(f"line {number}"))
    writer.handle(record("lone \ud800"))
    lines = read_lines(pipe[0], "lone")
    assert lines == [*(f"line {number}" for number in range(1000)), "lone \\ud800"]
    writer.flush()
    assert writer.num_dropped == 0


def test_a_pipe_that_nobody_reads_stops_nothing(pipe: tuple[int, int]) -> None:
    """The lines beyond the queue are dropped; later ones are written, and say how many.

    They say so more than once where the writer's thread began after the queue was full.
    """
    writer = LogWriter(pipe[1], max_bytes=100_000)
    for number in range(5000):
        writer.handle(record(f"{number:4d} {'x' * 95}"))
    assert writer.num_dropped > 0
    numbers, num_told = [], 0
    with open(pipe[0], encoding="utf-8") as file:
        while num_told < writer.num_dropped:
            line = file.readline()
            if line.endswith(" log records were dropped\n"):
                num_told += int(line.split()[0])
            else:
                numbers.append(int(line[:4]))
    assert num_told == writer.num_dropped
    assert numbers == sorted(set(numbers))
    assert len(numbers) + num_told == 5000


def test_a_pipe_whose_reader_is_gone_stops_nothing(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    writer = LogWriter(pipe[1])
    writer.handle(record("x"))
    writer.flush()
    assert writer.num_dropped == 1


def test_a_flush_ends_though_nobody_reads(pipe: tuple[int, int]) -> None:
    writer = LogWriter(pipe[1])
    for _ in range(2000):
        writer.handle(record("x" * 100))
    flushing = threading.Thread(target=writer.flush)
    flushing.start()
    flushing.join(60)
    assert not flushing.is_alive()
    os.close(pipe[0])
    writer.flush()  # or its thread would write to the next pipe that has this descriptor
    assert 0 < writer.num_dropped <= 2000


@pytest.mark.parametrize("lowest", [0, 1500], ids=["low", "beyond select()"])
def test_a_descriptor_that_does_not_block_gets_all_lines(
    pipe: tuple[int, int], lowest: int
) -> None:
    if lowest >= resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
        pytest.skip("this machine allows no such descriptor")
    os.set_blocking(pipe[1], False)
    descriptor = fcntl.fcntl(pipe[1], fcntl.F_DUPFD_CLOEXEC, lowest)
    assert descriptor >= lowest
    writer = LogWriter(descriptor)
    for number in range(2000):
        writer.handle(record(f"{number:4d} {'x' * 95}"))
    assert len(read_lines(pipe[0], "1999 ")) == 2000
    writer.flush()
    assert writer.num_dropped == 0
    os.close(descriptor)


def test_a_record_that_cannot_be_written_is_told(pipe: tuple[int, int]) -> None:
    writer = LogWriter(pipe[1])
    made = record("%d")
    made.args = ("x",)
    writer.handle(made)
    assert read_lines(pipe[0], "maskdial") == ["a record of maskdial cannot be written"]
