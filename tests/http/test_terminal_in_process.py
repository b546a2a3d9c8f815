"""The terminal's commands without a server print what they print with one."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import maskdial_client.transport
from maskdial import cli
from maskdial.registry.catalog import STARTER_FOLDER

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command; returns its status, and what it printed."""
    monkeypatch.setenv("MASKDIAL_GENERATION_CONFIG", "off")
    monkeypatch.setenv("MASKDIAL_THREADS", "1")

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(arguments)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.mark.parametrize(
    "arguments",
    [
        ("fill", "The [MASK] barked."),
        ("score", "The old king", "--json"),
        ("generate", "Once upon a time", "--max-new-tokens", "9", "--seed", "2", "--json"),
        ("generate", "Once upon a time", "--stream", "--max-new-tokens", "9", "--top-k", "5"),
    ],
)
def test_a_bundle_answers_as_the_server_does(
    arguments: tuple[str, ...], command: Command, openai_server: Any
) -> None:
    if "--stream" in arguments:
        arguments = (*arguments, "--seed", "4")
    bundle = ("--bundle", str(STARTER_FOLDER / "hybrid"))
    found = command(*arguments, *bundle)
    assert found == command(*arguments, "--server", openai_server.url, "--model", "hybrid")
    assert found[0] == 0
    assert found[1]
    assert not found[2]


def test_chats_without_a_server(
    command: Command, chat_bundle: Path, openai_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    for place in (
        ("--bundle", str(chat_bundle)),
        ("--server", openai_server.url, "--model", "chat"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Who lives here?\nWhere?\n"))
        answers.append(command("chat", "--max-new-tokens", "6", "--temperature", "0", *place))
    assert answers[0] == answers[1]
    assert answers[0][0] == 0
    assert answers[0][1].count("\n") >= 2


def test_run_does_what_the_model_is_for(
    command: Command, chat_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = ("--max-new-tokens", "6", "--temperature", "0")
    for source, verb, arguments in (
        ("sentiment", "classify", ("A fine film.",)),
        (str(STARTER_FOLDER / "sentiment"), "classify", ("A fine film.",)),
        ("hybrid", "generate", ("Once upon", *sampling)),
        (str(chat_bundle), "chat", sampling),
    ):
        found = []
        for asked in (
            ("run", source, *arguments),
            (
                verb,
                *arguments,
                "--bundle",
                source if "/" in source else str(STARTER_FOLDER / source),
            ),
        ):
            monkeypatch.setattr(sys, "stdin", io.StringIO("Who lives here?\n"))
            found.append(command(*asked))
        assert found[0] == found[1]
        assert found[0][0] == 0
        assert found[0][1]
    status, _, err = command("run", "nothing-here", "a text")
    assert status == 1
    assert "'nothing-here' is neither NAME=PATH, nor a name of the Hub" in err


def test_the_starters_answer_where_no_server_does(
    command: Command, openai_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maskdial_client.transport, "DEFAULT_URL", "http://127.0.0.1:1")
    status, out, err = command("classify", "A fine film.")
    assert status == 0
    assert "no server at http://127.0.0.1:1; the starter models answer in this process" in err
    assert out == command("classify", "A fine film.", "--server", openai_server.url)[1]


def test_without_a_server_errors_are_the_same_sentences(
    command: Command, tmp_path: Path, openai_server: Any
) -> None:
    bundle = ("--bundle", str(STARTER_FOLDER / "sentiment"))
    long = "word " * 2000
    here = command("classify", long, *bundle)
    assert here == command("classify", long, "--server", openai_server.url)
    assert here[0] == 1
    status, _, err = command("classify", "x", "--bundle", str(tmp_path / "absent"))
    assert (status, err.count("\n")) == (1, 1)
    assert "has no maskdial.json" in err
    status, _, err = command("classify", "x", *bundle, "--server", openai_server.url)
    assert (status, "give either --bundle or --server" in err) == (1, True)
