"""`loadtests.run` as a command, against a server."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from loadtests.__main__ import main
from loadtests.run import is_loopback

RUN = ("run", "--rate", "20", "--duration", "1", "--seed", "1")


@pytest.mark.parametrize("scenario", ["mixed", "generate"])
def test_a_run_reports_every_request(
    fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], scenario: str
) -> None:
    output = tmp_path / "report.json"
    arguments = ("--url", fake.url, "--scenario", scenario, "--output", str(output))
    assert main([*RUN, *arguments, "--max-new-tokens", "3"]) == 0
    report = json.loads(output.read_text())
    assert report["settings"]["scenario"] == scenario
    assert report["requests"] == report["succeeded"] == len(fake.bodies) > 0
    streams = [body for body in fake.bodies if body.get("stream")]
    assert report["tokens"] == 3 * len(streams)
    assert {body["parameters"]["max_new_tokens"] for body in streams} == {3}
    generate = report["kinds"]["generate"]
    assert generate["time_to_first_token_ms"]["count"] == len(streams)
    assert generate["inter_token_ms"]["count"] == 2 * len(streams)
    assert set(report["kinds"]) == (
        {"generate", "fill-mask", "classify"} if scenario == "mixed" else {"generate"}
    )
    shown = capsys.readouterr().out
    assert "time to first token" in shown
    assert "achieved" in shown


def test_errors_are_not_retried_and_make_the_run_fail(
    fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*RUN, "--url", fake.url, "--scenario", "classify"]
    fake.refuse(429, "overloaded", retry_after="1")
    assert main(arguments) == 1
    assert "overloaded" in capsys.readouterr().out
    fake.refuse(429, "overloaded", retry_after="1")
    assert main([*arguments, "--allow-errors"]) == 0


def test_a_server_that_is_down_or_not_ready_is_an_error(
    fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.ready = False
    assert main([*RUN, "--url", fake.url]) == 1
    assert "is not ready: engine down" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert main([*RUN, "--url", f"http://127.0.0.1:{taken.getsockname()[1]}"]) == 1
    assert "could not connect" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--url", "http://example.org"),
        ("--rate", "0"),
        ("--duration", "inf"),
        ("--max-in-flight", "0"),
        ("--scenario", "mixed", "--model", "story"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*RUN, *arguments])
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.3.2.1", True),
        ("http://[::1]:8000", True),
        ("http://localhost:8000", True),
        ("http://localhost.example.org", False),
        ("http://127.0.0.1@example.org", False),
        ("http://192.168.0.4", False),
        ("127.0.0.1:8000", False),
    ],
)
def test_loopback_urls(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected
