"""Every family's calls, reasoning and answers, through its own template and kind of tokens.

A scripted model writes exactly what such a model writes. The grammar has to allow every token of
it, and the parser has to find each part; no mark may reach the content.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from maskdial.bundle.bundle import Bundle
from maskdial.bundle.manifest import SpecialTokens
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.chat.history import render_messages
from maskdial.causal.chat.message import ChatMessage, ToolCall
from maskdial.causal.chat.request import ChatRequest
from maskdial.causal.chat.template import ChatTemplate
from maskdial.causal.model import CausalModel
from maskdial.causal.request import GenerationRequest
from maskdial.causal.tools import (
    ContentDelta,
    ReasoningDelta,
    ReplyDelta,
    ReplyFormat,
    Tool,
    ToolCallDelta,
    ToolChoice,
)
from maskdial.grammar.compiler import GrammarCompiler
from maskdial.grammar.source import GrammarRequest, GrammarSource
from tests.unit.causal.reply_forms import ANSWER, CALL, FORMS, REASONING, SECOND, Form
from tests.unit.grammar.trusting import Trusting

TOOLS = [
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    ),
    Tool(
        "paint",
        {
            "type": "object",
            "properties": {"color": {"enum": ["red", "green"]}, "wet": {"type": "boolean"}},
            "required": ["color", "wet"],
            "additionalProperties": False,
        },
    ),
]
SCHEMA = {
    "type": "object",
    "properties": {"sky": {"type": "string"}},
    "required": ["sky"],
    "additionalProperties": False,
}
JSON = '{"sky": "blue <b>"}'
# How a tokenizer has the marks: as special tokens, as added tokens that are text, as no tokens.
Kind = Literal["special", "text", "none"]
KINDS: tuple[Kind, ...] = ("special", "text", "none")


@dataclass(frozen=True)
class Model:
    """A scripted model: its tokenizer, and what is known of its replies."""

    backend: tokenizers.Tokenizer
    tokenizer: Tokenizer
    format: ReplyFormat
    template: ChatTemplate
    compiler: GrammarCompiler
    special: dict[int, str]
    end: int

    def ids(self, text: str) -> list[int]:
        return [int(each) for each in self.backend.encode(text, add_special_tokens=False).ids]

    def pieces(self, text: str, tags: frozenset[str]) -> list[str]:
        """The texts that a parser gets of the tokens: special ones only if it asks for them."""
        found = []
        decoder = self.tokenizer.decoder([])
        for token_id in self.ids(text):
            name = self.special.get(token_id)
            if name is None:
                found.append(decoder.push(token_id))
            else:
                found.append(name if name in tags else "")
        return [*found, decoder.flush()]

    def accepts(self, source: GrammarSource | None, text: str) -> bool:
        """Whether the grammar allows each token of a text, and its end behind it."""
        assert source is not None
        matcher = self.compiler.submit("structural", source.text).result().matcher(first=True)
        for token_id in self.ids(text):
            if matcher.finished or not matcher.allowed()[token_id]:
                return False
            matcher.accept(token_id)
        return matcher.finished or bool(matcher.allowed()[self.end])


@cache
def model(name: str, kind: Kind) -> Model:
    form = FORMS[name]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({each: i for i, each in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    ends = [AddedToken(each, special=True, normalized=False) for each in form.ends]
    backend.add_special_tokens(ends)
    if kind != "none":
        special = kind == "special"
        tags = [AddedToken(tag, special=special, normalized=False) for tag in form.tags]
        backend.add_tokens(tags)
    end_ids = [backend.token_to_id(each) or 0 for each in form.ends]
    tokenizer = Tokenizer(backend, SpecialTokens(eos=sorted(end_ids)))
    template = ChatTemplate(form.template, name=name, tokens={"eos_token": form.ends[0]})
    manifest = SimpleNamespace(
        tool_format=None,
        thinking_marks=None,
        response_template=None,
        special_tokens=SimpleNamespace(eos=sorted(end_ids)),
    )
    bundle = cast(Bundle, SimpleNamespace(manifest=manifest))
    found = ReplyFormat.of_bundle(bundle, tokenizer, template)
    compiler = GrammarCompiler(
        backend.to_str(),
        vocab_size=backend.get_vocab_size(),
        eos_token_ids=end_ids,
        checker=Trusting(),
    )
    names = {token_id: tokenizer.id_to_token(token_id) for token_id in tokenizer.special_ids}
    return Model(backend, tokenizer, found, template, compiler, names, end_ids[0])


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    for name, kind in itertools.product(FORMS, KINDS):
        each = model(name, kind)
        each.template.close()
        each.compiler.close()
    model.cache_clear()


@dataclass(frozen=True)
class Found:
    reasoning: str
    content: str
    calls: list[tuple[str, Any]]
    incomplete: bool


def read(
    subject: Model, text: str, *, tools: Sequence[Tool] = (), opened: bool = False, by: int = 1
) -> Found:
    """What the parser finds in a reply that comes ``by`` characters or tokens at a time."""
    parser = subject.format.parser(tools, opened=opened)
    pieces = subject.pieces(text, parser.special_tags)
    if by > 1:
        joined = "".join(pieces)
        pieces = [joined[start : start + by] for start in range(0, len(joined), by)]
    deltas: list[ReplyDelta] = []
    for piece in pieces:
        deltas += parser.push(piece)
    deltas += parser.finish()
    names = [each.name for each in deltas if isinstance(each, ToolCallDelta) and each.name]
    arguments = [""] * len(names)
    for each in deltas:
        if isinstance(each, ToolCallDelta):
            arguments[each.index] += each.arguments
    return Found(
        "".join(each.text for each in deltas if isinstance(each, ReasoningDelta)),
        "".join(each.text for each in deltas if isinstance(each, ContentDelta)),
        [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)],
        parser.incomplete,
    )


def thought(form: Form, *, opened: bool) -> str:
    """The reasoning as the model writes it behind its prompt."""
    if form.thinking is None:
        return ""
    begin, end = form.thinking
    return f"{'' if opened else begin}{REASONING}{end}{form.between}"


def answered(form: Form, text: str) -> str:
    return f"{form.answer[0]}{text}{form.answer[1]}"


EVERY = pytest.mark.parametrize(
    ("name", "kind"), [*itertools.product(FORMS, KINDS)], ids=lambda value: str(value)
)


def test_some_sixty_families_are_covered() -> None:
    assert len({family for form in FORMS.values() for family in form.families}) >= 60


@EVERY
def test_the_format_is_found(name: str, kind: Kind) -> None:
    found = model(name, kind).format
    assert found.calls is not None
    assert (found.thinking is not None) is (FORMS[name].thinking is not None)
    prompt = model(name, kind).template.render([{"role": "user", "content": "Hi"}])
    opens = found.thinking is not None and found.thinking.opened_by(prompt)
    assert opens is FORMS[name].opened


@EVERY
def test_what_a_model_writes_is_told_apart(name: str, kind: Kind) -> None:
    form, subject = FORMS[name], model(name, kind)
    one, two = [CALL], [CALL, SECOND]
    opened = form.opened
    before = thought(form, opened=opened)
    reasoning = REASONING if form.thinking else ""
    answer = answered(form, ANSWER)
    for by in (1, 2, 7, 10_000):

        def found(
            text: str, *, tools: Sequence[Tool] = TOOLS, inside: bool = opened, by: int = by
        ) -> Found:
            return read(subject, text, tools=tools, opened=inside, by=by)

        assert found(before + form.one) == Found(reasoning, "", one, False)
        assert found(before + answer) == Found(reasoning, ANSWER, [], False)
        assert found(before + answer, tools=()) == Found(reasoning, ANSWER, [], False)
        if form.two is not None:
            assert found(before + form.two) == Found(reasoning, "", two, False)
        if form.lead:
            lead = before + answered(form, "I look.") + "\n" + form.one
            assert found(lead) == Found(reasoning, "I look.", one, False)
        # Without reasoning
        assert found(form.one, inside=False) == Found("", "", one, False)
        assert found(answer, inside=False) == Found("", ANSWER, [], False)


@EVERY
def test_a_name_may_be_a_path(name: str, kind: Kind) -> None:
    """And begin with another tool's, or end where the form goes on with the same sign."""
    form, subject = FORMS[name], model(name, kind)
    before = thought(form, opened=form.opened)
    names = ("mcp/get", "mcp/get:0", "mcp/get:the/weather", "get")
    tools = [Tool(each, TOOLS[0].parameters) for each in names]
    for each in names:
        text = before + form.one.replace("get_weather", each)
        named = ToolChoice("required", (each,))
        assert subject.accepts(subject.format.grammar(tools, named, opened=form.opened), text)
        for by in (1, 2, 7, 10_000):
            found = read(subject, text, tools=tools, opened=form.opened, by=by)
            assert (found.calls, found.content) == ([(each, CALL[1])], "")


@EVERY
def test_the_grammars_allow_what_a_model_writes(name: str, kind: Kind) -> None:
    form, subject = FORMS[name], model(name, kind)
    opened = form.opened
    before = thought(form, opened=opened)
    auto = subject.format.grammar(TOOLS, ToolChoice("auto"), opened=opened)
    required = subject.format.grammar(TOOLS, ToolChoice("required"), opened=opened)
    named = subject.format.grammar(TOOLS, ToolChoice("required", ("get_weather",)), opened=opened)
    for grammar in (auto, required, named):
        assert subject.accepts(grammar, before + form.one)
    assert subject.accepts(auto, before + answered(form, ANSWER))
    assert not subject.accepts(required, before + answered(form, ANSWER))
    if form.two is not None:
        assert subject.accepts(auto, before + form.two)
        assert subject.accepts(required, before + form.two)
        alone = subject.format.grammar(TOOLS, ToolChoice("auto"), parallel=False, opened=opened)
        assert not subject.accepts(alone, before + form.two)
    if form.lead:
        assert subject.accepts(auto, before + answered(form, "I look.") + "\n" + form.one)
    if not opened:
        assert subject.accepts(auto, form.one)
        assert subject.accepts(required, form.one)
    # A call is right or is none: its arguments satisfy the schema.
    wrong = form.one.replace("get_weather", "get_wether")
    assert not subject.accepts(auto, before + wrong)
    assert not subject.accepts(required, before + wrong)


@EVERY
def test_a_schema_holds_for_the_answer_alone(name: str, kind: Kind) -> None:
    form, subject = FORMS[name], model(name, kind)
    before = thought(form, opened=form.opened)
    content: Any = ("json_schema", SCHEMA)
    source = subject.format.grammar((), None, content=content, opened=form.opened)
    if source is None:
        assert form.thinking is None
        assert form.answer == ("", "")
        return
    assert subject.accepts(source, before + answered(form, JSON))
    assert not subject.accepts(source, before + answered(form, ANSWER))
    assert read(subject, before + answered(form, JSON), opened=form.opened).content == JSON
    either = subject.format.grammar(TOOLS, ToolChoice("auto"), content=content, opened=form.opened)
    assert subject.accepts(either, before + answered(form, JSON))
    assert subject.accepts(either, before + form.one)
    assert not subject.accepts(either, before + answered(form, ANSWER))


@EVERY
def test_a_reply_that_is_cut_off_shows_no_half_mark(name: str, kind: Kind) -> None:
    form, subject = FORMS[name], model(name, kind)
    before = thought(form, opened=form.opened) + form.answer[0]
    parser = subject.format.parser(TOOLS, opened=form.opened)
    pieces = subject.pieces(before + ANSWER + form.answer[1], parser.special_tags)
    num_before = len(subject.ids(before))
    for length in range(0, len(pieces), 3):
        parser = subject.format.parser(TOOLS, opened=form.opened)
        deltas: list[ReplyDelta] = []
        for piece in pieces[:length]:
            deltas += parser.push(piece)
        deltas += parser.finish(cut=True)
        content = "".join(each.text for each in deltas if isinstance(each, ContentDelta))
        written = ANSWER[: max(length - num_before, 0)]
        content = content.rstrip()
        assert written.startswith(content)
        # The letters that a mark may begin with are held back, with the space before them.
        assert written[len(content) :].strip() in ("", "<", "</")


@EVERY
def test_past_calls_are_written_as_the_model_writes_them(name: str, kind: Kind) -> None:
    form, subject = FORMS[name], model(name, kind)
    messages = [
        ChatMessage("user", "Hi"),
        ChatMessage(
            "assistant",
            "",
            tool_calls=(ToolCall("call_1", CALL[0], json.dumps(CALL[1])),),
        ),
        ChatMessage("tool", "sunny", tool_call_id="call_1"),
    ]
    rendered = render_messages(messages, subject.format)
    text = subject.template.render(rendered, tools=[tool.as_openai() for tool in TOOLS])
    # As the model wrote it, but for ids, and for gpt-oss's recipient, which moves to the front.
    one = form.one if name != "gpt-oss" else FORMS["gpt-oss, recipient first"].one
    assert re.search(re.escape(one).replace("abcdefgh1", r"\w{9}"), text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_continued_answer_of_gpt_oss_has_no_header(kind: Kind) -> None:
    subject, form = model("gpt-oss", kind), FORMS["gpt-oss"]
    messages = [ChatMessage("user", "Hi"), ChatMessage("assistant", "The old king")]
    prompt = subject.template.render(
        render_messages(messages, subject.format), continue_final_message=True
    )
    causal = cast(
        CausalModel,
        SimpleNamespace(reply_format=subject.format, tokenizer=subject.tokenizer, name="gpt-oss"),
    )

    def allows(text: str, choice: ToolChoice | None, schema: Any = None) -> bool:
        grammar = None if schema is None else GrammarRequest("json", schema, "format")
        request = ChatRequest(
            messages,
            GenerationRequest(grammar=grammar),
            TOOLS,
            tool_choice=choice,
            continue_final_message=True,
        )
        generation = request.generation_for(causal)
        assert generation.reasoning_for is not None
        assert generation.grammar_for is not None
        assert generation.reasoning_for(prompt) is None
        parser = request.parser(subject.format, prompt)
        assert parser.push(" lived.") == [ContentDelta(" lived.")]
        source = generation.grammar_for(prompt)
        assert source is not None
        return subject.accepts(GrammarSource(str(source.value)), text)

    auto, required = ToolChoice(), ToolChoice("required")
    for choice in (auto, None):
        assert allows(JSON, choice, SCHEMA)
        assert not allows(" lived.", choice, SCHEMA)
    assert allows(" lived.", auto)
    assert not allows(" lived.", required)
    assert allows(f" lived.<|end|><|start|>assistant{form.one}", required)


def test_several_past_calls_become_turns_where_a_turn_has_one() -> None:
    subject = model("llama", "none")
    calls = tuple(
        ToolCall(f"call_{index}", call, json.dumps(arguments))
        for index, (call, arguments) in enumerate((CALL, SECOND))
    )
    messages = [
        ChatMessage("user", "Hi"),
        ChatMessage("assistant", "I look.", tool_calls=calls),
        ChatMessage("tool", "dry", tool_call_id="call_1"),
        ChatMessage("tool", "sunny", tool_call_id="call_0"),
        ChatMessage("user", "Thanks"),
    ]
    rendered = render_messages(messages, subject.format)
    roles = [(each["role"], each["content"]) for each in rendered]
    assert roles == [
        ("user", "Hi"),
        ("assistant", "I look."),
        ("tool", "sunny"),
        ("assistant", ""),
        ("tool", "dry"),
        ("user", "Thanks"),
    ]
    assert [each["tool_calls"][0]["id"] for each in rendered if "tool_calls" in each] == [
        "call_0",
        "call_1",
    ]


def test_ids_with_the_number_of_the_call_are_kept_or_made() -> None:
    subject = model("kimi, by id", "special")
    messages = [
        ChatMessage(
            "assistant",
            "",
            tool_calls=(
                ToolCall("functions.get_weather:7", *_call(CALL)),
                ToolCall("call_x", *_call(SECOND)),
            ),
        ),
        ChatMessage("tool", "sunny", tool_call_id="call_x"),
    ]
    turn, result = render_messages(messages, subject.format)
    assert [call["id"] for call in turn["tool_calls"]] == [
        "functions.get_weather:7",
        "functions.paint:1",
    ]
    assert result["tool_call_id"] == "functions.paint:1"
    parser = subject.format.parser(TOOLS)
    deltas = parser.push(
        "".join(subject.pieces(FORMS["kimi, by id"].two or "", frozenset(parser.special_tags)))
    )
    ids = [each.call_id for each in deltas if isinstance(each, ToolCallDelta) and each.name]
    assert ids == ["functions.get_weather:0", "functions.paint:1"]


def _call(call: tuple[str, Any]) -> tuple[str, str]:
    return call[0], json.dumps(call[1])
