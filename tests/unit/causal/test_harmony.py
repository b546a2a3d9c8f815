"""Replies in messages on channels, as gpt-oss writes them."""

from collections.abc import Iterable, Sequence

import pytest

from maskdial.causal.tools import ContentDelta, ReasoningDelta, ReplyDelta, Tool, ToolCallDelta
from maskdial.causal.tools.harmony import HarmonyParser

TOOLS = [Tool("f", {"type": "object", "properties": {}})]
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
