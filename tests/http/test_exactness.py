"""``maskdial exactness`` against this server: every answer has the bits of the first one."""

import json

import pytest

from maskdial import cli


def test_this_server_is_exact(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "hybrid", "--requests", "3", "--concurrency", "4", "--max-tokens", "8"]
    status = cli.main(["exactness", url, *arguments, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [each for each in report["checks"] if each["severity"]] == []
    assert (status, report["log_probabilities"]) == (0, True)
    checked = {each["check"] for each in report["checks"] if not each["not_checked"]}
    assert {"4 at once", "in two requests", "with the prefix cached", "streamed"} <= checked
    assert {"under a JSON schema, 4 at once", "/fill-mask, in one list"} <= checked


def test_labels_are_exact(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "sentiment", "--requests", "3", "--concurrency", "4", "--json"]
    status = cli.main(["exactness", url, *arguments])
    report = json.loads(capsys.readouterr().out)
    assert (status, report["route"]) == (0, None)
    assert "/classify, 4 at once" in {each["check"] for each in report["checks"]}
