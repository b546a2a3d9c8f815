"""Formats from a checkpoint's response_template: replies are read as transformers reads them."""

import json
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from maskdial.causal.tools import ContentDelta, ReasoningDelta, ReplyParser, Tool, ToolCallDelta
from maskdial.causal.tools.response_template import calls_of, thinking_of

THOUGHTS = {"open": "<think>\n", "close": "\n</think>", "content": "text"}
TAGGED = {
    "open_pattern": r"\s*<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
NAMED = {
    "open_pattern": r"<\|call\|>(?P<name>[\w-]+)",
    "close": "<|end|>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
DELIMITED = NAMED | {
    "open_pattern": r"<\|call\|>call:(?P<name>\w+)",
    "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
}
ARGUMENTS = {"city": 'Paris "75"', "days": 3, "where": {"tall": True, "tags": ["a", "b{"]}}
TOOLS = [
    Tool("weather", parameters={"type": "object"}),
    Tool("clock", parameters={"type": "object"}),
]


def template_of(calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    shared = {"reasoning_content": THOUGHTS, "content": {"content": "text"}}
    return {"start_anchor": "assistant\n", "fields": {"tool_calls": calls} | shared | fields}


@pytest.mark.parametrize(
    ("calls", "reply"),
    [
        (
            TAGGED,
            f'<tool_call>{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}</tool_call>'
            '<tool_call>{"name": "clock", "arguments": {}}</tool_call>',
        ),
        (NAMED, f"<|call|>weather{json.dumps(ARGUMENTS)}<|end|><|call|>clock{{}}<|end|>"),
        (
            DELIMITED,
            '<|call|>call:weather{city:<|"|>Paris "75"<|"|>,days:3,'
            'where:{tall:true,tags:[<|"|>a<|"|>,<|"|>b{<|"|>]}}<|end|>'
            "<|call|>call:clock{}<|end|>",
        ),
    ],
)
def test_replies_are_read_as_transformers_reads_them(calls: dict[str, Any], reply: str) -> None:
    spec = template_of(calls)
    marks = thinking_of(spec)
    assert marks is not None
    assert (marks.begin, marks.end) == ("<think>", "</think>")
    text = f"<think>\nWhere?\n</think>{reply}"
    expected = parse_response(text, spec, prefix="assistant\n")
    parser = ReplyParser(calls_of(spec), TOOLS, thinking=marks)
    deltas = [*parser.push(text), *parser.finish()]
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    assert reasoning.strip() == expected["reasoning_content"].strip()
    assert not [delta for delta in deltas if isinstance(delta, ContentDelta)]
    read: list[dict[str, Any]] = []
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            if delta.name is not None:
                read.append({"name": delta.name, "arguments": ""})
            read[-1]["arguments"] += delta.arguments
    assert [call | {"arguments": json.loads(call["arguments"])} for call in read] == [
        call["function"] for call in expected["tool_calls"]
    ]


@pytest.mark.parametrize(
    "calls",
    [
        NAMED | {"open_pattern": r"<call>\s*<name=(?P<name>\w+)>"},
        NAMED | {"open_pattern": r"(?P<name>\w+)"},
        NAMED | {"open_pattern": 3},
        NAMED | {"close": ["<a>", "<b>"]},
        NAMED | {"content": "xml-inline"},
        NAMED | {"transform": "{content}"},
        NAMED | {"transform": None},
        DELIMITED | {"content_args": {"unquoted_keys": True, "string_delims": [["<", ">"]]}},
        "<call>",
    ],
)
def test_patterns_that_nobody_can_write_by_are_left_alone(calls: Any) -> None:
    spec = template_of(calls, reasoning_content={"open_pattern": "<a|b>", "close": "</a>"})
    assert calls_of(spec) is None
    assert thinking_of(spec) is None


@pytest.mark.parametrize("spec", [None, {}, {"fields": []}, {"fields": {}}])
def test_what_has_no_fields_says_nothing(spec: dict[str, Any] | None) -> None:
    assert calls_of(spec) is None
    assert thinking_of(spec) is None
