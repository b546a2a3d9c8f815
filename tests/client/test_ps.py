"""``maskdial ps``: the models of a running server."""

from typing import Any

import pytest

from maskdial import cli, ps


def test_the_models_of_a_server(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ps", "--server", fake.url]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "state", "tasks", "precision", "runs", "on", "tokens"]
    assert row.split()[:2] == ["story", "ready"]
    assert len(row) == len(head)


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ps", "--server", "http://127.0.0.1:1"]) == 1
    assert "maskdial serve" in capsys.readouterr().err


def test_names_cannot_command_the_terminal() -> None:
    rows = [("name", "tokens"), ("a\x1b[2J\n", "9")]
    assert ps.table(rows) == "name    tokens\na\\x1b[2J\\n       9"
