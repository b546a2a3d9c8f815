"""Validation: what it costs, whatever a file has in it, and how it is stopped."""

import json
import threading
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import pytest

from maskdial.batches import lines as lines_module
from maskdial.batches.answers import Answers
from maskdial.batches.lines import Input, open_input
from maskdial.batches.validation import Findings, validate

LINE = {"custom_id": "a", "method": "POST", "url": "/classify", "body": {"inputs": "x"}}


class NoRequests:
    """What `Answers` needs to look at lines."""

    context = None
    task_paths = frozenset({"/classify"})

    def streams(self, path: str, body: Any) -> bool:
        return False


def read(path: Path, stop: threading.Event | None = None) -> tuple[Findings, Input, int]:
    """What is found in a file, and how often it was asked whether to stop."""
    num_asked = 0
    is_stopped = stop is not None and stop.is_set()

    class Counting(threading.Event):
        def is_set(self) -> bool:
            nonlocal num_asked
            num_asked += 1
            return is_stopped

    answers = Answers(cast(Any, NoRequests()), None, None)
    lines = open_input(str(path), "jsonl", 2_000_000, None, None)
    try:
        return validate(lines, answers, "/classify", Counting()), lines, num_asked
    finally:
        lines.close()


@pytest.mark.parametrize("blank", [b"\n", b" \r\n", b"\t\n\n"])
def test_blank_lines_are_skipped_many_at_a_time(tmp_path: Path, blank: bytes) -> None:
    path = tmp_path / "in"
    num_blank = 2_000_000 // len(blank) * blank.count(b"\n")
    good = json.dumps(LINE).encode()
    blanks = blank * (2_000_000 // len(blank))
    path.write_bytes(blanks + b"  " + good + b"\n" + blanks + b"wrong\n" + blanks)
    found, lines, num_asked = read(path)
    assert (found.num_lines, found.first) == (2, num_blank + 1)
    assert [error["line"] for error in found.errors] == [2 * num_blank + 2]
    assert lines.done == path.stat().st_size
    assert num_asked < 10_000


def test_a_file_of_blank_lines_is_stopped_at_once(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\n" * 5_000_000)
    stop = threading.Event()
    stop.set()
    _, lines, _ = read(path, stop)
    assert lines.done == 0


def test_a_long_line_is_stopped_within(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"x" * 20_000_000)
    assert read(path)[2] > 15


def test_it_ends_with_the_hundredth_error(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"x\n" * 100_000)
    found, lines, _ = read(path)
    assert (found.num_lines, len(found.errors)) == (100, 100)
    assert lines.done == 200


def test_sentences_do_not_repeat_what_is_long(tmp_path: Path) -> None:
    path = tmp_path / "in"
    long = "\U0001f600" * 300_000
    wrong: list[dict[str, Any]] = [
        LINE | {long: 1},
        LINE | {"custom_id": "b", "url": long},
        LINE | {"custom_id": "c", "method": long},
        LINE | {"custom_id": "d", "body": long},
        LINE | {"custom_id": "e", "body": {"model": long}},
        {long: 1},
    ]
    encoded = [json.dumps(each, ensure_ascii=False) for each in wrong]
    path.write_text("\n".join([*encoded, "[", f'"{long}"', f'{{"{long}'] * 11), encoding="utf-8")
    found, _, _ = read(path)
    assert len(found.errors) > 90
    assert len(json.dumps(found.errors)) < 30_000


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"[" + b"[]," * 30_001 + b"[]]", "the line has more than 30,000 lists and objects"),
        (
            json.dumps({f"{number}": 1 for number in range(30_001)}).encode(),
            "an object in the line has 30,001 fields; the limit is 30,000",
        ),
    ],
)
def test_the_shape_of_a_line_is_looked_at_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, fault: str
) -> None:
    def parse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(lines_module, "from_json", parse)
    path = tmp_path / "in"
    path.write_bytes(content)
    assert read(path)[0].errors[0]["message"] == fault


def test_what_a_file_was_like_is_known_behind_blank_lines(tmp_path: Path) -> None:
    """The fingerprint is that of the bytes, however they are read."""
    good = json.dumps(LINE).encode() + b"\n"
    ends = []
    for name, buffered in (("a", 16), ("b", 50_000)):
        path = tmp_path / name
        path.write_bytes(b"\n" * 100_000 + good + b" \n" * 1_000 + good)
        opened: Any = path.open("rb", buffering=0)
        with BufferedReader(opened, buffered) as file:
            lines = lines_module.JsonLines(file, str(path), 2_000_000)
            ends.append([(line.number, line.end.fingerprint, line.end.done) for line in lines])
    assert ends[0] == ends[1]
    assert [number for number, _, _ in ends[0]] == [100_001, 101_002]
