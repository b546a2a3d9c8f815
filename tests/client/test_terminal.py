"""What models and servers write never commands the terminal, whichever command prints it."""

import argparse
import io
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from starlette.responses import JSONResponse, StreamingResponse

from maskdial_client import cli
from maskdial_client.terminal import printable, printable_json

# The window's title, a cleared screen, colors by a C1 code, the line written anew, half of a pair.
ATTACK = "\x1b]0;title\x07\x1b[2J\x9b31m\rforged\x7f\x00\u2028\x85\ud800 caf\u00e9 \U0001f600"
SHOWN = r"\x1b]0;title\x07\x1b[2J\x9b31m\rforged\x7f\x00\u2028\x85\ud800" + " caf\u00e9 \U0001f600"
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

Command = Callable[..., str]


def attacked(value: Any) -> Any:
    """A reply with the attack in each of its texts."""
    if isinstance(value, str):
        return value + ATTACK
    if isinstance(value, list):
        return [attacked(item) for item in value]
    return {k: attacked(v) for k, v in value.items()} if isinstance(value, dict) else value


@pytest.fixture
def command(fake: Any, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command and returns all that it prints."""

    def run(name: str, *arguments: str, status: int = 0) -> str:
        parser = argparse.ArgumentParser()
        getattr(cli, f"add_{name}_arguments")(parser)
        options = parser.parse_args(["--url", fake.url, *arguments])
        assert getattr(cli, f"run_{name}")(options) == status
        printed = capsys.readouterr()
        return str(printed.out + printed.err)

    return run


def queue(fake: Any, path: str, body: dict[str, Any]) -> None:
    content = attacked(json.loads(bytes(fake.reply(path, body).body)))
    fake.queued.append(Reply(content))


class Reply(JSONResponse):
    """JSON in ASCII: half of a pair has no UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def queue_stream(fake: Any) -> None:
    tokens = (
        {"id": 1, "text": text, "logprob": -1.0, "special": False} for text in (ATTACK, "\n\tx")
    )
    events = [
        b"data: " + json.dumps({"index": index, "token": token, "generated_text": None}).encode()
        for index, token in enumerate(tokens)
    ]
    details = {"finish_reason": "length", "generated_tokens": 2, "seed": None, "input_length": 1}
    end = {"id": 2, "text": "</s>", "logprob": -1.0, "special": True}
    last = {"index": 2, "token": end, "generated_text": ATTACK, "details": details}
    events.append(b"data: " + json.dumps(last).encode())
    fake.queued.append(StreamingResponse(iter([b"\n\n".join(events) + b"\n\n"])))


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "JSON"])
def test_every_command_prints_what_was_answered_as_text(
    as_json: bool, fake: Any, command: Command
) -> None:
    flags = ["--json"] if as_json else []
    queue(fake, "/fill-mask", {"inputs": ["A [MASK] [MASK]."]})
    shown = command("fill", "A [MASK] [MASK].", *flags)
    queue(fake, "/classify", {"inputs": ["a"]})
    shown += command("classify", "a", *flags)
    tokens = [{"id": 1, "text": "The", "logprob": None}]
    score = {"tokens": tokens, "log_likelihood": 0.0, "perplexity": None, "method": "causal"}
    fake.queued.append(Reply(attacked([score])))
    shown += command("score", "The", *flags)
    queue(fake, "/generate", {"inputs": "a", "parameters": {"details": as_json}})
    shown += command("generate", "a", *flags)
    queue_stream(fake)
    shown += command("generate", "--stream", "a", *flags)
    assert not UNSAFE.search(shown), ascii(UNSAFE.search(shown))
    if as_json:
        assert shown.count(r"\u001b]0;title") >= 12
        assert "caf\u00e9 \U0001f600" in shown
    else:
        # Two tokens and their sentences; two labels; one token and its method; a text; a stream.
        assert shown.count(SHOWN) >= 10
        assert "\n\tx" in shown


def test_json_means_the_same(fake: Any, command: Command) -> None:
    queue(fake, "/classify", {"inputs": ["a"]})
    (result,) = json.loads(command("classify", "a", "--json"))
    assert result["labels"][0]["label"] == f"positive{ATTACK}"


def test_an_error_of_the_server(fake: Any, command: Command) -> None:
    fake.queued.append(Reply({"error": f"no{ATTACK}\nmaskdial: all is well"}, 400))
    shown = command("classify", "a", status=1)
    assert not UNSAFE.search(shown)
    assert SHOWN in shown
    assert len(shown.splitlines()) == 1


def test_an_error_within_a_stream(fake: Any, command: Command) -> None:
    failure = {"error": ATTACK, "error_type": f"generation{ATTACK}"}
    event = b"data: " + json.dumps(failure).encode() + b"\n\n"
    fake.queued.append(StreamingResponse(iter([event])))
    shown = command("generate", "--stream", "a", status=1)
    assert not UNSAFE.search(shown)
    assert SHOWN in shown


def test_texts_of_standard_input(
    fake: Any, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may be another's, too."""
    text = ATTACK.replace("\r", "").replace("\ud800", "")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{text}\nb\n"))
    shown = command("classify", "-")
    assert not UNSAFE.search(shown)
    assert r"\x1b]0;title" in shown


def test_a_chat(fake: Any, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    queue_stream(fake)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    shown = command("chat")
    assert not UNSAFE.search(shown)
    assert SHOWN in shown
    assert shown.endswith("\n\tx\n(cut off after 2 tokens; see --max-new-tokens)\n")


@pytest.mark.parametrize("code", [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, 0xD800, 0xDFFF])
def test_each_control_character(code: int) -> None:
    character = chr(code)
    shown = printable(f"a{character}b")
    assert not UNSAFE.search(shown)
    assert "\n" not in shown
    assert "\t" not in shown
    assert shown.encode()
    assert printable(character, keep=character) == character
    text = json.dumps([character], ensure_ascii=False)
    assert json.loads(printable_json(text)) == [character]
    assert not UNSAFE.search(printable_json(text))


@pytest.mark.parametrize(
    "text", ["plain", "caf\u00e9", "\u4e2d\u6587", "\U0001f600", "a b\\x1b", ""]
)
def test_other_texts_stay(text: str) -> None:
    assert printable(text) == printable_json(text) == text
