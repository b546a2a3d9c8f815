"""``maskdial chat``: the messages it sends, what it prints, and how it exits."""

import argparse
import contextlib
import io
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from maskdial_client import cli

ANSWER = " caf\u00e9 ole"
_SCRIPT = """
import argparse, signal, sys
from maskdial_client import cli
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores SIGINT
parser = argparse.ArgumentParser()
cli.add_chat_arguments(parser)
sys.exit(cli.run_chat(parser.parse_args()))
"""


class Terminal(io.StringIO):
    """Typed lines; ``^C`` stands for the key."""

    def isatty(self) -> bool:
        return True

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]  # as in typeshed
        line = super().readline(size)
        if line == "^C\n":
            raise KeyboardInterrupt
        return line


@pytest.fixture
def chat(fake: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command on lines of input and returns its exit status."""

    def run(text: str, *arguments: str, terminal: bool = False) -> int:
        monkeypatch.setattr(sys, "stdin", Terminal(text) if terminal else io.StringIO(text))
        parser = argparse.ArgumentParser()
        cli.add_chat_arguments(parser)
        return cli.run_chat(parser.parse_args(["--url", fake.url, *arguments]))

    return run


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


ASSISTANT = {"role": "assistant", "content": ANSWER}


def test_each_line_is_answered_in_the_conversation_so_far(
    chat: Any, fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat("Hi\n\n  \nMore", "--system", "Be brief.", "--temperature", "0", "--stop", "x") == 0
    assert capsys.readouterr() == (f"{ANSWER}\n{ANSWER}\n", "")
    assert fake.bodies == [
        {
            "messages": [system("Be brief."), user("Hi")],
            "parameters": {"max_new_tokens": 4096, "temperature": 0.0, "stop": ["x"]},
            "stream": True,
        },
        {
            "messages": [system("Be brief."), user("Hi"), ASSISTANT, user("More")],
            "parameters": {"max_new_tokens": 4096, "temperature": 0.0, "stop": ["x"]},
            "stream": True,
        },
    ]


def test_a_message_is_answered_and_nothing_else_is_read(
    chat: Any, fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat("never read", "What", "is it?", "--max-new-tokens", "7") == 0
    assert capsys.readouterr() == (f"{ANSWER}\n", "")
    assert chat("a long\ntext", "Sum up:", "-") == 0
    assert [(body["messages"], body["parameters"]) for body in fake.bodies] == [
        ([user("What is it?")], {"max_new_tokens": 7}),
        ([user("Sum up: a long\ntext")], {"max_new_tokens": 4096}),
    ]
    capsys.readouterr()
    for message in ("-", " "):
        assert chat("\n", message) == 1
        assert capsys.readouterr().err.startswith("maskdial: the message is empty")
    assert len(fake.bodies) == 2
    fake.refuse(422, "validation")
    assert chat("", "Hi") == 1
    assert capsys.readouterr().err == "maskdial: this is validation\n"


def test_commands_change_the_conversation(chat: Any, fake: Any) -> None:
    lines = ["One", "/system  Be kind. ", "Two", "/reset", " /three", "/system", "Four", "/quit"]
    assert chat("\n".join([*lines, "Five"])) == 0
    assert [body["messages"] for body in fake.bodies] == [
        [user("One")],
        [system("Be kind."), user("One"), ASSISTANT, user("Two")],
        [system("Be kind."), user(" /three")],
        [user(" /three"), ASSISTANT, user("Four")],
    ]


def test_without_a_terminal_the_first_error_exits(
    chat: Any, fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.refuse(422, "validation")
    assert chat("Hi\nMore\n") == 1
    assert capsys.readouterr() == ("", "maskdial: this is validation\n")
    assert chat("/unknown\nHi\n") == 1
    assert capsys.readouterr().err.startswith("maskdial: unknown command /unknown: /reset starts")
    assert len(fake.bodies) == 1


def test_in_a_terminal_an_error_leaves_the_conversation_unchanged(
    chat: Any, fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.refuse(422, "validation")
    assert chat("Hi\n/unknown\n^C\nMore\n", terminal=True) == 0
    output, errors = capsys.readouterr()
    assert output == f"{ANSWER}\n"
    help_line, refusal, unknown, *rest = errors.splitlines()
    assert "Ctrl-D exits" in help_line
    assert refusal == "maskdial: this is validation"
    assert unknown.startswith("maskdial: unknown command /unknown")
    assert rest == ["", ""]  # after ^C, and at the end of the input
    assert [body["messages"] for body in fake.bodies] == [[user("Hi")], [user("More")]]


def test_an_error_within_an_answer_ends_the_line(
    chat: Any, fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.stream = "error"
    assert chat("Hi\n") == 1
    assert capsys.readouterr() == (" caf\u00e9\n", "maskdial: the step failed\n")


def test_ctrl_c_stops_the_answer_but_not_the_conversation(fake: Any) -> None:
    fake.stream = "endless"
    with (
        subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, "--url", fake.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUTF8": "1"},
        ) as process,
        contextlib.ExitStack() as cleanup,
    ):
        cleanup.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"Hi\n")
        process.stdin.flush()
        assert process.stdout.read(6) == " caf\u00e9".encode()
        process.send_signal(signal.SIGINT)
        assert fake.closed.wait(30)
        fake.stream = "whole"
        output, errors = process.communicate(b"More\n", timeout=60)
    assert (process.returncode, output.decode(), errors) == (0, f"\n{ANSWER}\n", b"(stopped)\n")
    first = {"role": "assistant", "content": " caf\u00e9"}
    assert [body["messages"] for body in fake.bodies] == [
        [user("Hi")],
        [user("Hi"), first, user("More")],
    ]
