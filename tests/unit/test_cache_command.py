"""`maskdial cache`: whose prompts are on disk, and their removal."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from maskdial import cli
from maskdial.causal.prefix_disk import record
from maskdial.causal.prefix_disk.record import Header, Owner


def write(folder: Path, number: int, owner: Owner, days: float = 0.0) -> Path:
    array = np.zeros(1000, np.float32)
    header = Header.of(number.to_bytes(32, "big"), b"", "block", owner, array)
    record.write(folder, header, array)
    path = folder / header.file_name
    used_at = time.time() - days * 86400
    os.utime(path, (used_at, used_at))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "prefixes"
    folder.mkdir()
    write(folder, 1, Owner("chat", "alice"))
    write(folder, 2, Owner("chat", "alice"), days=3)
    write(folder, 3, Owner("chat", "bob"), days=9)
    write(folder, 4, Owner("code", ""))
    write(folder, 5, Owner("code\x1b[31m", "[red]"), days=20)
    (folder / record.file_name(bytes(32), "block")).write_bytes(b"zeros")
    (folder / "letter.txt").write_text("dear")
    (folder / "lock").touch()
    return folder


def left(folder: Path) -> set[int]:
    parsed = (record.parse_name(path.name) for path in folder.iterdir())
    return {int.from_bytes(each[0], "big") for each in parsed if each is not None}


def rows(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_listing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert [line.split()[:3] for line in text.splitlines()[1:-1]] == [
        ["(damaged)", "-", "1"],
        ["chat", "alice", "2"],
        ["chat", "bob", "1"],
        ["code", "-", "1"],
        ["code\\x1b[31m", "[red]", "1"],
    ]
    assert left(folder) == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("filters", "removed"),
    [
        ((), {0, 1, 2, 3, 4, 5}),
        (("--model", "chat"), {1, 2, 3}),
        (("--key", "alice"), {1, 2}),
        (("--key", ""), {4}),
        (("--older-than", "2"), {2, 3, 5}),
        (("--model", "chat", "--key", "bob", "--older-than", "5"), {3}),
        (("--model", "nobody"), set()),
    ],
)
def test_removal(folder: Path, filters: tuple[str, ...], removed: set[int]) -> None:
    damaged = folder / record.file_name(bytes(32), "block")
    os.utime(damaged)
    assert cli.main(["cache", str(folder), *filters]) == 0
    assert left(folder) == {0, 1, 2, 3, 4, 5}
    assert cli.main(["cache", str(folder), *filters, "--remove"]) == 0
    assert left(folder) == {0, 1, 2, 3, 4, 5} - removed
    assert (folder / "letter.txt").read_text() == "dear"


def test_the_folder_of_the_settings(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["cache"]) == 1
    assert "name the folder" in capsys.readouterr().err
    monkeypatch.setenv("MASKDIAL_PREFIX_CACHE_DIR", str(folder))
    assert cli.main(["cache", "--key", "bob"]) == 0
    assert rows(capsys)[1][:2] == ["chat", "bob"]


def test_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert cli.main(["cache", str(tmp_path)]) == 0
    assert "no prefixes" in capsys.readouterr().out
