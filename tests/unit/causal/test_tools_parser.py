"""A reply is told apart into reasoning, text and calls while it is written."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maskdial.causal.chat.template import ChatTemplate
from maskdial.causal.tools import (
    AnswerMarks,
    ContentDelta,
    ReasoningDelta,
    ReplyDelta,
    ReplyParser,
    ThinkingMarks,
    Tool,
    ToolCallDelta,
    ToolFormat,
    derive_format,
)

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "on": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list": {"type": "array", "items": {"type": "string"}},
        "map": {"type": "object"},
    },
}
TOOLS = [Tool("say", SCHEMA), Tool("say_no", {"type": "object", "properties": {}})]
THINK = ThinkingMarks("<think>", "</think>")
Reply = tuple[str, str, list[tuple[str, Any]], bool]


def derive(name: str) -> ToolFormat:
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(source, name=name, tokens={"bos_token": "<s>", "eos_token": "</s>"})
    found = derive_format(template, end_tokens=["</s>", "<start_function_response>"])
    assert found is not None
    return found


FORMATS = {
    path.stem: derive(path.stem) for path in TEMPLATES.glob("*.jinja") if path.stem != "no_tools"
}


def parse(parser: ReplyParser, pieces: Iterable[str], *, cut: bool = False) -> list[ReplyDelta]:
    return [delta for piece in pieces for delta in parser.push(piece)] + parser.finish(cut=cut)


def read(name: str | None, pieces: Iterable[str], *, cut: bool = False, **kwargs: Any) -> Reply:
    """Content, reasoning, calls as (name, arguments), and whether one is incomplete."""
    parser = ReplyParser(FORMATS[name] if name else None, TOOLS, **kwargs)
    deltas = parse(parser, pieces, cut=cut)
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if isinstance(delta, ToolCallDelta) and delta.name is not None:
            calls.append((delta.name, ""))
        if isinstance(delta, ToolCallDelta):
            called, arguments = calls[delta.index]
            calls[delta.index] = (called, arguments + delta.arguments)
    return content, reasoning, calls, parser.incomplete


HERMES_CALL = '<tool_call>\n{"name": "say", "arguments": {"text": "a}\\"]é"}}\n</tool_call>'
SAY = ("say", {"text": 'a}"]é'})
SAY_NO: tuple[str, dict[str, Any]] = ("say_no", {})

REPLIES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", "Just <text> and {json}, <tool_", "Just <text> and {json}, <tool_", []),
    ("hermes", f"So:\n\n{HERMES_CALL}", "So:", [SAY]),
    (
        "hermes",
        f'{HERMES_CALL}\n<tool_call>\n{{"name": "say_no", "arguments": {{}}}}\n</tool_call>\n',
        "",
        [SAY, SAY_NO],
    ),
    ("llama", '{"name": "say", "parameters": {"text": "a}\\"]é"}}', "", [SAY]),
    ("llama", '<|python_tag|>{"name": "say_no", "parameters": {}}', "", [SAY_NO]),
    ("llama", 'See {"name": "say", "parameters": {}}', 'See {"name": "say", "parameters": {}}', []),
    ("llama", '{"other": 1}', '{"other": 1}', []),
    (
        "mistral_old",
        '[TOOL_CALLS] [{"name": "say", "arguments": {"text": "a}\\"]é"}, "id": "abcdefghi"}, '
        '{"name": "say_no", "arguments": {}, "id": "123456789"}]',
        "",
        [SAY, SAY_NO],
    ),
    (
        "mistral_new",
        'Hm [TOOL_CALLS]say{"text": "a}\\"]é"}[TOOL_CALLS]say_no{}',
        "Hm",
        [SAY, SAY_NO],
    ),
    (
        "phi4_mini",
        '<|tool_call|>[{"name": "say", "arguments": {"text": "a}\\"]é"}}, '
        '{"name": "say_no", "arguments": {}}]<|/tool_call|>',
        "",
        [SAY, SAY_NO],
    ),
    (
        "function_gemma",
        '<start_function_call>call:say{text:<escape>a}"]é<escape>}<end_function_call>'
        "<start_function_call>call:say_no{}<end_function_call>",
        "",
        [SAY, SAY_NO],
    ),
    (
        "function_gemma",
        "<start_function_call>call:say{count:-3,list:[<escape>a,b<escape>,<escape><escape>],"
        "map:{k:{on:true},n:null},on:false,maybe:<escape>x:y<escape>}<end_function_call>",
        "",
        [
            (
                "say",
                {
                    "count": -3,
                    "list": ["a,b", ""],
                    "map": {"k": {"on": True}, "n": None},
                    "on": False,
                    "maybe": "x:y",
                },
            )
        ],
    ),
    (
        "qwen3_coder",
        'Ok.\n<tool_call>\n<function=say>\n<parameter=text>\na}"]é\n</parameter>\n</function>\n'
        "</tool_call>\n<tool_call>\n<function=say_no>\n</function>\n</tool_call>",
        "Ok.",
        [SAY, SAY_NO],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=say>\n<parameter=text>\n12\n\n</parameter>\n<parameter=count>\n12\n"
        '</parameter>\n<parameter=maybe>\nnull\n</parameter>\n<parameter=map>\n{"a": [1]}\n'
        "</parameter>\n<parameter=list>\nnot json\n</parameter>\n</function>\n</tool_call>",
        "",
        [
            (
                "say",
                {"text": "12\n", "count": 12, "maybe": None, "map": {"a": [1]}, "list": "not json"},
            )
        ],
    ),
    (
        # Constants, lists and dictionaries as the templates of Qwen3.5 and others write them
        "qwen3_coder",
        "<tool_call>\n<function=say>\n<parameter=text>\nTrue\n</parameter>\n<parameter=on>\nTrue\n"
        "</parameter>\n<parameter=maybe>\nNone\n</parameter>\n<parameter=list>\n['a', \"b's\"]\n"
        "</parameter>\n<parameter=map>\n{'k': [1, {'n': None}]}\n</parameter>\n<parameter=count>\n"
        "True\n</parameter>\n<parameter=other>\nTrue\n</parameter>\n</function>\n</tool_call>",
        "",
        [
            (
                "say",
                {
                    "text": "True",
                    "on": True,
                    "maybe": "None",  # a text may be this word
                    "list": ["a", "b's"],
                    "map": {"k": [1, {"n": None}]},
                    "count": "True",
                    "other": "True",
                },
            )
        ],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=say>\n<parameter=map>\n{1j: 2}\n</parameter>\n<parameter=list>\n"
        "[float('nan')]\n</parameter>\n<parameter=on>\n((((\n</parameter>\n</function>\n</tool_call>",
        "",
        [("say", {"map": "{1j: 2}", "list": "[float('nan')]", "on": "(((("})],
    ),
    (
        # What no reply can have: half of a surrogate pair, and numbers that are none in JSON
        "qwen3_coder",
        "<tool_call>\n<function=say>\n<parameter=list>\n['\\ud800']\n</parameter>\n<parameter=map>\n"
        "{'\\udc00': 1}\n</parameter>\n<parameter=count>\nNaN\n</parameter>\n<parameter=other>\n"
        "[-Infinity]\n</parameter>\n</function>\n</tool_call>",
        "",
        [
            (
                "say",
                {
                    "list": "['\\ud800']",
                    "map": "{'\\udc00': 1}",
                    "count": "NaN",
                    "other": "[-Infinity]",
                },
            )
        ],
    ),
    (
        "minicpm5",
        '<function name="say"><param name="text"><![CDATA[a < b\n]]></param><param name="on">False'
        '</param><param name="maybe"><![CDATA[]]></param></function>'
        '<function name="say"><param name="text">a]]></param></function>'
        '<function name="say"><param name="text"><![CDATA[a</param></function>',
        "",
        [
            ("say", {"text": "a < b\n", "on": False, "maybe": ""}),
            ("say", {"text": "a]]>"}),
            ("say", {"text": "<![CDATA[a"}),
        ],
    ),
    (
        "lfm2",
        '<|tool_call_start|>[say(text="a}\\"]é"), say_no()]<|tool_call_end|>',
        "",
        [SAY, SAY_NO],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[say(text='it\\'s, \"(x)\"', count=-1.5e3, on=True, maybe=None, "
        "list=['a', \"b]\"], map={'k': [False, true]})]<|tool_call_end|>",
        "",
        [
            (
                "say",
                {
                    "text": 'it\'s, "(x)"',
                    "count": -1500.0,
                    "on": True,
                    "maybe": None,
                    "list": ["a", "b]"],
                    "map": {"k": [False, True]},
                },
            )
        ],
    ),
]


def decoded(reply: Reply) -> Reply:
    content, reasoning, calls, incomplete = reply
    return content, reasoning, [(name, json.loads(text)) for name, text in calls], incomplete


@pytest.mark.parametrize(("name", "text", "content", "calls"), REPLIES)
def test_calls_and_text_are_told_apart(
    name: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    for pieces in ([text], list(text)):
        assert decoded(read(name, pieces)) == (content, "", calls, False)


@given(st.data())
@settings(max_examples=400)
def test_how_a_reply_is_cut_changes_nothing(data: st.DataObject) -> None:
    name, text, *_ = data.draw(st.sampled_from(REPLIES))
    text = data.draw(st.sampled_from(["", "<think>\nHm <tool_call>\n</think>\n\n"])) + text
    text = text[: data.draw(st.integers(0, len(text)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    cut = data.draw(st.booleans())
    whole = read(name, [text], cut=cut, thinking=THINK)
    assert read(name, pieces, cut=cut, thinking=THINK) == whole


# What a grammar would not allow: whatever else it is, it is not lost, and nothing fails.
PARTS = ["<think>", "</think>", "<tool_call>\n", '{"name": "', "say", '", "arguments": ', "{", "}"]
PARTS += ['"', "\\", "\n</tool_call>", "[TOOL_CALLS]", "<start_function_call>call:", "<escape>"]
PARTS += ["<function=", "<parameter=text>\n", "\n</parameter>\n", "<|tool_call_start|>[", "(", ")"]
PARTS += ["<end_function_call>", ":", ",", "text", "é", " ", "]", "<|python_tag|>", "'"]


@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(PARTS), max_size=25))
@example("mistral_new", ["[TOOL_CALLS]", "say", "\n</tool_call>"])
@example("mistral_new", ["[TOOL_CALLS]", "say", "[TOOL_CALLS]"])
@example("mistral_new", ["[TOOL_CALLS]", "say", "{", "]"])
@settings(max_examples=600)
def test_any_text_can_be_read(name: str, parts: list[str]) -> None:
    text = "".join(parts)
    reply = read(name, [text], thinking=THINK)
    assert reply == read(name, list(text), thinking=THINK)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_no_delta_holds_half_a_tag(name: str) -> None:
    form = FORMATS[name]
    call = form.call.replace("$NAME", "say_no").replace("$ID", "abcdefghi")
    call = call.replace("$ARGUMENTS", "{}" if form.arguments is None else "")
    section = form.section_begin + call + form.section_end
    text = section if not form.trigger else f"Some text. {section}"
    parser = ReplyParser(form, TOOLS, thinking=THINK)
    deltas = parse(parser, f"<think>So <it> is.</think>{text}")
    shown = "".join(delta.text for delta in deltas if not isinstance(delta, ToolCallDelta))
    assert shown == ("So <it> is." + ("Some text." if form.trigger else ""))
    (first, *_) = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    assert (first.index, first.name) == (0, "say_no")
    assert first.call_id


def test_a_name_that_is_none_is_kept_although_it_begins_with_one() -> None:
    text = HERMES_CALL.replace('"say"', '"say_more"')
    for pieces in ([text], list(text)):
        assert decoded(read("hermes", pieces)) == ("", "", [("say_more", SAY[1])], False)


@pytest.mark.parametrize(
    ("length", "calls"), [(128, [("n" * 128, {})]), (129, [])], ids=["longest", "too long"]
)
def test_a_name_has_an_end(length: int, calls: list[tuple[str, Any]]) -> None:
    text = HERMES_CALL.replace("say", "n" * length).replace('"text": "a}\\"]é"', "")
    for pieces in ([text], list(text)):
        content, _, found, incomplete = decoded(read("hermes", pieces))
        assert (content, found, incomplete) == ("" if calls else text, calls, False)
    # What is no name is told at once, and is read no further.
    parser = ReplyParser(FORMATS["hermes"], TOOLS)
    deltas = parser.push('<tool_call>\n{"name": "' + "n" * 129)
    assert deltas == [ContentDelta('<tool_call>\n{"name": "' + "n" * 129)]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<response>So it is.</response>", "So it is.", []),
        ("So it is.", "So it is.", []),
        # Nothing was opened.
        (
            "As XML: <response>ok</response> and this explains it.",
            "As XML: <response>ok</response> and this explains it.",
            [],
        ),
        ("Close it by </response>.", "Close it by </response>.", []),
        # Only the last one ends it.
        (
            "<response>Use </response> to close <it>.\n</response> Bye",
            "Use </response> to close <it>.",
            [],
        ),
        ("<response>a</response></response>\n", "a</response>", []),
        ("<response>Two  </response>\n\nparts</response>", "Two  </response>\n\nparts", []),
        (f"<response>Well </response> {HERMES_CALL}", "Well", [SAY]),
        (f"<response>a </response> b</response>{HERMES_CALL}", "a </response> b", [SAY]),
        (f"Well </response> {HERMES_CALL}", "Well </response>", [SAY]),
    ],
)
def test_a_written_mark_ends_the_answer_where_one_began_it(
    text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    answer = AnswerMarks("<response>", "</response>")
    for pieces in ([text], list(text)):
        assert decoded(read("hermes", pieces, answer=answer)) == (content, "", calls, False)


def test_a_special_token_ends_the_answer_in_any_case() -> None:
    answer = AnswerMarks("<response>", "</response>", {"</response>": 1})
    for begin in ("", "<response>"):
        text = f"{begin}So </response> and </response>"
        assert read("hermes", list(text), answer=answer) == ("So", "", [], False)


def test_a_call_is_streamed() -> None:
    deltas = parse(ReplyParser(FORMATS["hermes"], TOOLS), [HERMES_CALL[:46], HERMES_CALL[46:]])
    first, second = deltas
    assert isinstance(first, ToolCallDelta)
    assert isinstance(second, ToolCallDelta)
    assert (first.name, first.arguments) == ("say", '{"tex')
    assert (second.name, second.call_id, second.arguments) == (None, None, 't": "a}\\"]é"}')


def test_a_long_argument_is_streamed_although_it_is_no_json() -> None:
    parser = ReplyParser(FORMATS["qwen3_coder"], TOOLS)
    parser.push("<tool_call>\n<function=say>\n<parameter=text>\n")
    assert parser.push('a "line"\n') == [ToolCallDelta(0, 'a \\"line\\"')]
    assert parser.push("and </para") == [ToolCallDelta(0, "\\nand </para")]


@pytest.mark.parametrize("name", ["magistral", "mistral_old"])
def test_an_id_of_the_models_own_is_kept_where_it_comes_first(name: str) -> None:
    text = {
        "magistral": "[TOOL_CALLS]say_no[CALL_ID]abcdefghi[ARGS]{}",
        "mistral_old": '[TOOL_CALLS] [{"name": "say_no", "arguments": {}, "id": "abcdefghi"}]',
    }[name]
    (delta,) = parse(ReplyParser(FORMATS[name], TOOLS), [text])
    assert isinstance(delta, ToolCallDelta)
    assert delta.call_id is not None
    assert len(delta.call_id) == 9
    assert (delta.call_id == "abcdefghi") is (name == "magistral")


@pytest.mark.parametrize(
    ("text", "cut", "expected"),
    [
        (HERMES_CALL[:-1], True, ("", "", [("say", '{"text": "a}\\"]é"}')], True)),
        (HERMES_CALL[:48], True, ("", "", [("say", '{"text"')], True)),
        ("Hi\n<tool_call>\n{", True, ("Hi", "", [], True)),
        (f"{HERMES_CALL}\n<tool", True, ("", "", [("say", '{"text": "a}\\"]é"}')], True)),
        ("Hi <tool_c", True, ("Hi ", "", [], False)),
        ("Hi <tool_c", False, ("Hi <tool_c", "", [], False)),
        ("<think>Hm </thi", True, ("", "Hm ", [], False)),
        ("<think>Hm", True, ("", "Hm", [], False)),
        ("<thi", True, ("", "", [], False)),
    ],
)
def test_a_reply_that_was_cut_off(text: str, cut: bool, expected: Reply) -> None:
    assert read("hermes", [text], cut=cut, thinking=THINK) == expected
    assert read("hermes", list(text), cut=cut, thinking=THINK) == expected


def test_a_section_that_was_cut_off_after_its_calls() -> None:
    text = '<|tool_call|>[{"name": "say_no", "arguments": {}}]<|/tool'
    assert read("phi4_mini", [text]) == ("", "", [("say_no", "{}")], False)


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nHi\n", False, ("Hi\n", "Hm.")),
        ("\n<think></think>Hi", False, ("Hi", "")),
        ("Hi <think>no</think>", False, ("Hi <think>no</think>", "")),
        ("  Hi", False, ("  Hi", "")),
        ("Hm.\n</think>\n\nHi", True, ("Hi", "Hm.")),
        ("Hm", True, ("", "Hm")),
    ],
)
@pytest.mark.parametrize("name", ["hermes", None])
def test_reasoning_has_its_own_channel(
    name: str | None, text: str, opened: bool, expected: tuple[str, str]
) -> None:
    for pieces in ([text], list(text)):
        reply = read(name, pieces, thinking=THINK, thinking_opened=opened)
        assert reply[:2] == expected


@pytest.mark.parametrize("name", ["hermes", "llama", "function_gemma"])
def test_without_tools_a_call_is_text(name: str) -> None:
    for text in (HERMES_CALL, '{"name": "say", "parameters": {}}'):
        deltas = parse(ReplyParser(FORMATS[name]), [text])
        assert deltas == [ContentDelta(text)]


def test_the_special_tokens_to_be_spelled_are_told() -> None:
    form = FORMATS["mistral_new"].with_special({"[TOOL_CALLS]": 5, "<s>": 1})
    marks = THINK.with_special({"<think>": 6})
    assert ReplyParser(form, TOOLS, thinking=marks).special_tags == {"[TOOL_CALLS]", "<think>"}
    assert ReplyParser(form, thinking=marks).special_tags == {"<think>"}


def test_a_model_that_knows_no_tools_calls_in_json() -> None:
    text = '{"name": "say_no", "arguments": {}}'
    assert read(None, list(text)) == ("", "", [("say_no", "{}")], False)
