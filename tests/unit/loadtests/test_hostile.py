"""`loadtests faults fuzz`: what they send and count, and whether they can find something."""

import json
import random
from collections.abc import Callable

import pytest

from loadtests.__main__ import main
from loadtests.faults import fuzz
from loadtests.faults.hostile import body, grammar, http_message, template
from loadtests.server import Reply

EXAMPLE = {"inputs": "It was", "parameters": {"max_new_tokens": 5, "stop": ["a", "b"]}}


@pytest.mark.parametrize(
    "draw",
    [http_message, grammar, template, lambda source: body(EXAMPLE, ["inputs", "model"], source)],
)
def test_inputs_differ_and_can_be_drawn_again(draw: Callable[[random.Random], object]) -> None:
    first = [draw(random.Random(f"7-{number}")) for number in range(300)]
    assert first == [draw(random.Random(f"7-{number}")) for number in range(300)]
    assert len({str(each) for each in first}) > 150


def test_bodies_are_like_the_example_but_for_a_fault() -> None:
    source = random.Random(3)
    texts = [body(EXAMPLE, ["inputs", "model"], source) for _ in range(500)]
    good = []
    for text in texts:
        try:
            good.append(json.loads(text))
        except ValueError:
            continue
    assert len(good) > 300
    assert sum(value != EXAMPLE for value in good) > 250
    assert sum(isinstance(value, dict) and "parameters" in value for value in good) > 200


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply(200, b"[]"), True),
        (Reply(422, b'{"error": "x"}'), True),
        (Reply(422, b"[]"), False),
        (Reply(200, b"Internal Server Error"), False),
        (Reply(200, b"data: {}\n\n"), True),
        (Reply(200, b"data: {}"), False),
        (Reply(200, b"{}\n{}\n"), True),
        (Reply(200, b"{}\n{]\n{}\n"), False),
        (Reply(422, b"{}\n{}\n"), False),
    ],
)
def test_replies_have_a_form(reply: Reply, expected: bool) -> None:
    assert fuzz.is_well_formed(reply) is expected


@pytest.mark.slow
def test_a_short_run_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASKDIAL_THREADS", "1")
    monkeypatch.setattr(fuzz, "_SETTLE_SECONDS", 2.5)
    assert main(["faults", "fuzz", "--inputs=400", "--clients=8", "--seed=1"]) == 0
    assert "answers afterwards as before" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.zoo
def test_a_server_that_breaks_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here by the form of its replies, of which none is taken for a good one."""
    monkeypatch.setenv("MASKDIAL_THREADS", "1")
    monkeypatch.setattr(fuzz, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(fuzz, "_SHARES", {"body": 1.0})
    monkeypatch.setattr(fuzz, "is_well_formed", lambda _: False)
    assert main(["faults", "fuzz", "--inputs=20", "--clients=2", "--seed=1"]) == 1
    assert "no JSON" in capsys.readouterr().out
