"""Replies in messages on channels, as gpt-oss writes them."""

from collections.abc import Iterable, Sequence

import pytest

from maskdial.causal.stop import ReasoningGate
from maskdial.causal.tools import (
    ContentDelta,
    ReasoningDelta,
    ReplyDelta,
    ReplyFormat,
    Tool,
    ToolCallDelta,
)
from maskdial.causal.tools.harmony import CALLS, THINKING, HarmonyParser, open_channel

TOOLS = [Tool("f", {"type": "object", "properties": {}})]
FORMAT = ReplyFormat(CALLS, THINKING, harmony=True)
Reply = tuple[str, str, list[tuple[str, str]]]


def parse(parser: HarmonyParser, pieces: Iterable[str], *, cut: bool = False) -> list[ReplyDelta]:
    return [each for piece in pieces for each in parser.push(piece)] + parser.finish(cut=cut)


def told(deltas: Sequence[ReplyDelta]) -> Reply:
    """The reasoning, the content, and the calls with their arguments."""
    calls: list[tuple[str, str]] = []
    for each in deltas:
        if isinstance(each, ToolCallDelta):
            if each.name is not None:
                calls.append((each.name, ""))
            name, arguments = calls[each.index]
            calls[each.index] = name, arguments + each.arguments
    return (
        "".join(each.text for each in deltas if isinstance(each, ReasoningDelta)),
        "".join(each.text for each in deltas if isinstance(each, ContentDelta)),
        calls,
    )


def check(
    text: str,
    expected: Reply,
    *,
    tools: Sequence[Tool] = TOOLS,
    cut: bool = False,
) -> None:
    for pieces in ([text], list(text)):
        deltas = parse(HarmonyParser(tools), pieces, cut=cut)
        assert told(deltas) == expected
        assert not any(each in (ContentDelta(""), ReasoningDelta("")) for each in deltas)


@pytest.mark.parametrize("end", ["<|end|>", "<|return|>", ""])
def test_nothing_follows_the_end_of_an_answer(end: str) -> None:
    check(f"<|channel|>final<|message|>Hi{end}", ("", "Hi", []))


def test_nothing_follows_the_end_of_a_call() -> None:
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"
    check(f"{call}<|call|>", ("", "", [("f", "{}")]))


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.g <|constrain|>json",
        " to=functions.g<|channel|>commentary json",
    ],
)
def test_a_call_of_a_tool_that_is_none_is_one(header: str) -> None:
    text = header + '<|message|>{"a": 1}<|call|>'
    check(text, ("", "", [("g", '{"a": 1}')]))
    check(text, ("", '{"a": 1}', []), tools=())
    # What is no function is none of the tools that the client named.
    check(text.replace("functions.g", "python"), ("", '{"a": 1}', []))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello there<|channel|>final<|message|>Hi", ("", "Hello there\n\nHi", [])),
        (
            "Hello<|start|>assistant<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
            "<|channel|>final<|message|>Hi",
            ("Hm", "Hello\n\nHi", []),
        ),
        ("Hello there<|end|>", ("", "Hello there", [])),
        ("Hello <there|> to you", ("", "Hello <there|> to you", [])),
        ("to be", ("", "to be", [])),
        ("to=me", ("", "to=me", [])),
    ],
)
def test_text_before_any_channel_is_content(text: str, expected: Reply) -> None:
    check(text, expected)


def test_text_without_a_channel_is_streamed() -> None:
    parser = HarmonyParser(TOOLS)
    assert parse(parser, ["Hello", " there"])[:2] == [ContentDelta("Hello"), ContentDelta(" there")]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Hello there", "Hello there"),
        ("Hello there<|chan", "Hello there"),
        ("Hello there to", "Hello there to"),
        ("<|chan", ""),
        (" to=functions.f", ""),
        ("<|channel|>final", ""),
        ("<|channel|>final<|mess", ""),
        ("<|channel|>final<|message|>Hi<|en", "Hi"),
    ],
)
def test_a_reply_that_is_cut_keeps_its_text_and_no_half_header(text: str, content: str) -> None:
    check(text, ("", content, []), cut=True)


ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"


@pytest.mark.parametrize("budget", [None, 100])
@pytest.mark.parametrize(
    ("before", "opened"),
    [
        ("<|channel|>final<|message|>", False),
        ("<|channel|>final <|constrain|>json<|message|>", False),
        (f"{ANALYSIS}a message|{NEXT}<|channel|>final<|message|>", False),
        (f"a message|{NEXT}<|channel|>final<|message|>", True),
        (f"{ANALYSIS}Hm{NEXT}{ANALYSIS}Hm{NEXT}<|channel|>final<|message|>", False),
    ],
)
def test_no_stop_string_is_looked_for_in_a_header(
    before: str, opened: bool, budget: int | None
) -> None:
    answer = "The message is |."
    for size in (1, 2, 3, 100):
        gate = ReasoningGate(FORMAT.reasoning(opened=opened, budget=budget, closing=(1,)))
        text = before + answer
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        divided = [gate.push_token(piece) for piece in pieces]
        assert "".join(told for told, _ in divided) == before
        assert "".join(text for _, text in divided) + gate.flush() == answer


def test_a_budget_ends_the_reasoning_and_no_header() -> None:
    gate = ReasoningGate(FORMAT.reasoning(opened=False, budget=2, closing=(7,)))
    for piece, closing in [
        (ANALYSIS, None),
        ("a", 7),
        ("<|end|>", None),
        ("<|start|>", None),
        ("assistant", None),
        ("<|channel|>final", None),
        ("<|message|>", None),
    ]:
        assert gate.push_token(piece) == (piece, "")
        assert gate.closing == closing
    assert gate.push_token("Hi") == ("", "Hi")


@pytest.mark.parametrize(
    ("prompt", "channel"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", None),
        ("<|start|>user<|message|>Hi", ""),
        ("<|start|>assistant<|channel|>final<|message|>The old", "final"),
        (f"<|start|>assistant{ANALYSIS}", "analysis"),
        (f"<|start|>assistant{ANALYSIS}Hm{NEXT}<|channel|>final<|message|>", "final"),
        ("<|start|>assistant<|channel|>final<|message|>Hi<|return|>", None),
        ("", None),
    ],
)
def test_the_channel_that_a_prompt_ends_in(prompt: str, channel: str | None) -> None:
    assert open_channel(prompt) == channel
    assert FORMAT.opens(prompt) is (channel == "analysis")
    assert FORMAT.answers(prompt) is (channel in ("final", ""))


@pytest.mark.parametrize("cut", [True, False])
def test_an_answer_that_goes_on_is_streamed(cut: bool) -> None:
    parser = FORMAT.parser(TOOLS, answering=True)
    pieces = [parser.push(piece) for piece in (" lived", " by", " the sea.")]
    assert pieces == [[ContentDelta(" lived")], [ContentDelta(" by")], [ContentDelta(" the sea.")]]
    assert parser.push("<|end|>") == parser.finish(cut=cut) == []
    assert not parser.reasoning


@pytest.mark.parametrize("budget", [None, 5])
def test_stop_strings_count_in_an_answer_that_goes_on(budget: int | None) -> None:
    assert FORMAT.reasoning(opened=False, answering=True, budget=budget, closing=()) is None
