"""`loadtests.sessions` against one server, which finds as much with a session as without."""

import json
from pathlib import Path

import pytest

from loadtests.__main__ import main


def test_one_server(url: str, tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    size = ["--conversations", "4", "--turns", "3", "--clients", "1", "--rounds", "1"]
    assert main(["sessions", "--url", url, *size, "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["sections"]["sessions"]["rows"]
    assert [row["routing"] for row in rows] == ["session", "none"]
    for row in rows:
        assert row["requests"] == 12
        # Four conversations of 96 tokens of instructions and three turns of 48.
        assert row["prompt_tokens"] == 4 * (144 + 192 + 240)
        assert 0 < row["cached_tokens"] == rows[0]["cached_tokens"]
        assert row["hit_rate"] <= row["possible"]


def test_another_machine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sessions", "--url", "http://192.0.2.1:8000"])
    assert "needs --allow-remote" in capsys.readouterr().err
