"""The client's commands: what they print, and their exit statuses."""

import argparse
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maskdial_client import cli

COMMANDS: dict[str, tuple[Any, Callable[[argparse.Namespace], int]]] = {
    "fill": (cli.add_fill_arguments, cli.run_fill),
    "classify": (cli.add_classify_arguments, cli.run_classify),
    "score": (cli.add_score_arguments, cli.run_score),
    "generate": (cli.add_generate_arguments, cli.run_generate),
}
_SCRIPT = """
import argparse, signal, sys
from maskdial_client import cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores SIGINT
parser = argparse.ArgumentParser()
cli.add_generate_arguments(parser)
sys.exit(cli.run_generate(parser.parse_args()))
"""


def run(command: str, *arguments: str) -> int:
    add_arguments, run_command = COMMANDS[command]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run_command(parser.parse_args(arguments))


def start_generate(url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, "--stream", "--url", url, "Once"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_fill_prints_candidates(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fill", "--url", fake.url, "A [MASK].") == 0
    assert capsys.readouterr().out.splitlines() == [
        "  0.5000  capital  A capital.",
        "  0.2500  heart    A heart.",
    ]


def test_fill_prints_headings_for_several_texts_and_masks(
    fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fill", "--url", fake.url, "A [MASK].", "[MASK] [MASK]", "--target", "x") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "A [MASK].",
        "[MASK] [MASK]",
        "mask 1",
        "mask 2",
    ]
    assert fake.bodies[0]["parameters"] == {"targets": ["x"]}


def test_classify_reads_lines_and_pairs(
    fake: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Good.\nBad.\n"))
    assert run("classify", "--url", fake.url, "-", "--pair", "Fine.", "--json") == 0
    results = json.loads(capsys.readouterr().out)
    assert results[1]["labels"][0] == {"label": "positive", "score": 0.75}
    assert fake.bodies[0]["inputs"] == [
        {"text": "Good.", "text_pair": "Fine."},
        {"text": "Bad.", "text_pair": "Fine."},
    ]


def test_score_prints_tokens_and_their_sum(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    scored = {
        "tokens": [
            {"id": 4, "text": "The", "logprob": None},
            {"id": 5, "text": " cat", "logprob": -12.5},
        ],
        "log_likelihood": -12.5,
        "perplexity": 268337.29,
        "method": "causal",
    }
    fake.answer([scored])
    assert run("score", "--url", fake.url, "The cat", "--model", "story", "--truncate") == 0
    assert capsys.readouterr().out.splitlines() == [
        "        -  The",
        " -12.5000   cat",
        " -12.5000  in total, causal; perplexity 2.683e+05",
    ]
    assert fake.bodies == [
        {"inputs": ["The cat"], "parameters": {"truncate": True}, "model": "story"}
    ]
    nothing = {"tokens": [], "log_likelihood": 0.0, "perplexity": None, "method": "pseudo"}
    fake.answer([scored, nothing])
    assert run("score", "--url", fake.url, "The cat", "A") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "The cat"
    assert lines[-2:] == ["A", "   0.0000  in total, pseudo; perplexity -"]
    fake.answer([nothing])
    assert run("score", "--url", fake.url, "A", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [nothing]


def test_generate_prints_the_text(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--url", fake.url, "Once", "--temperature", "0") == 0
    assert capsys.readouterr().out == " there was\n"
    assert fake.bodies[0]["parameters"] == {"temperature": 0.0}


def test_generate_accepts_a_schema_or_a_pattern(
    fake: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}', encoding="utf-8")
    assert run("generate", "--url", fake.url, "Once", "--json-schema", str(schema)) == 0
    assert run("generate", "--url", fake.url, "Once", "--regex", "a+", "--min-p", "0.1") == 0
    assert [body["parameters"] for body in fake.bodies] == [
        {"grammar": {"type": "json", "value": {"type": "integer"}}},
        {"grammar": {"type": "regex", "value": "a+"}, "min_p": 0.1},
    ]
    capsys.readouterr()
    for content in ("{", None):
        if content is None:
            schema.unlink()
        else:
            schema.write_text(content, encoding="utf-8")
        assert run("generate", "--url", fake.url, "Once", "--json-schema", str(schema)) == 1
        assert "schema.json as JSON: " in capsys.readouterr().err
    assert len(fake.bodies) == 2


def test_generate_accepts_a_deadline_and_a_priority(fake: Any) -> None:
    assert run("generate", "--url", fake.url, "Once", "--deadline", "2", "--priority", "-1") == 0
    assert fake.bodies == [{"inputs": "Once", "timeout": 2.0, "priority": -1}]


def test_generate_stream_prints_tokens_or_events(
    fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "--url", fake.url, "Once", "--stream") == 0
    assert capsys.readouterr().out == " caf\u00e9 ole\n"
    assert run("generate", "--url", fake.url, "Once", "--stream", "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["token"]["text"] for event in events] == [" caf\u00e9", " ole", "</s>"]


def test_an_error_is_one_sentence_and_status_1(
    fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.refuse(422, "validation")
    assert run("fill", "--url", fake.url, "no mask") == 1
    assert capsys.readouterr() == ("", "maskdial: this is validation\n")
    assert run("fill", "--url", "nonsense", "[MASK]") == 1
    assert "not an http:// or https:// URL" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["fill", "classify", "score", "generate"])
def test_without_a_server_a_line_says_how_to_start_one(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert run(command, "--url", f"http://127.0.0.1:{port}", "text") == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"maskdial: could not connect to http://127.0.0.1:{port} (")
    assert errors.endswith("); `maskdial serve` starts a server\n")
    assert errors.count("\n") == 1


def test_an_error_in_a_stream_leaves_the_text_on_its_own_line(
    fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.stream = "error"
    assert run("generate", "--url", fake.url, "Once", "--stream") == 1
    assert capsys.readouterr() == (" caf\u00e9\n", "maskdial: the step failed\n")


def test_ctrl_c_exits_silently_with_130_and_closes_the_stream(fake: Any) -> None:
    fake.stream = "endless"
    with start_generate(fake.url) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b" "
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"")
    assert fake.closed.wait(30)


def test_a_closed_pipe_exits_silently_with_141(fake: Any) -> None:
    with start_generate(fake.url) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        errors = process.stderr.read()
    assert (process.returncode, errors) == (141, b"")
