"""Grammars of tool calls: what they allow, and that whatever they allow can be read."""

import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

import maskdial
from maskdial.causal.chat.template import ChatTemplate
from maskdial.causal.tools import (
    ContentDelta,
    ReasoningDelta,
    ReplyParser,
    ThinkingMarks,
    Tool,
    ToolCallDelta,
    ToolChoice,
    ToolFormat,
    derive_format,
    write_grammar,
)
from maskdial.causal.tools.format import JSON_TYPES, ArgumentList
from maskdial.causal.tools.tool import MAX_TOOLS
from maskdial.errors import ValidationError
from maskdial.grammar.compiler import GrammarCompiler
from maskdial.grammar.matcher import GrammarMatcher

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
STARTER_TOKENIZER = Path(maskdial.__file__).parent / "starter" / "hybrid" / "tokenizer.json"
FORMATS = [
    *("hermes", "llama", "mistral_old", "mistral_new", "magistral", "phi4_mini"),
    *("function_gemma", "qwen3_coder", "lfm2", "glm", "minimax", "minicpm5", "deepseek"),
]
# Tags that are single tokens, which no text can spell, as in these models' own vocabularies.
EOS = 256
SPECIAL_TOKENS = [
    *("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<|python_tag|>", "<escape>"),
    *("<start_function_call>", "<end_function_call>", "<｜tool▁calls▁begin｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
]
SPECIAL = {text: EOS + 1 + index for index, text in enumerate(SPECIAL_TOKENS)}
VOCABULARY = [*(bytes([byte]) for byte in range(256)), b"<eos>", *(t.encode() for t in SPECIAL)]

NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "number", "minimum": -10, "maximum": 10},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
    },
    "required": ["value"],
    "additionalProperties": False,
}
SEARCH = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "minLength": 1, "maxLength": 12},
        "limit": {"type": "integer", "minimum": 1, "maximum": 20},
        "exact": {"type": "boolean"},
        "unit": {"enum": ["c", "f"]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"},
        "hint": {"anyOf": [{"type": "string", "maxLength": 6}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "list": {"$ref": "#/$defs/node"},
    },
    "required": ["exact", "query"],
    "additionalProperties": False,
    "$defs": {"node": NODE},
}
EMPTY: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
PATH = {
    "type": "object",
    "properties": {"path": {"type": "string", "maxLength": 30}},
    "required": ["path"],
    "additionalProperties": False,
}
# One name begins with another.
TOOLS = [Tool("search", SEARCH), Tool("search_now", EMPTY), Tool("open-file", PATH)]
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}


class ByteTokenizer:
    """A tokenizer whose tokens are bytes, and some special ones."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = VOCABULARY
    special_token_ids = (EOS, *SPECIAL.values())

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


TOKENIZER = LLTokenizer(TokenizerWrapper(ByteTokenizer()))


def template(name: str) -> ChatTemplate:
    source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, name=name, tokens={"bos_token": "<s>", "eos_token": "</s>"})


@cache  # a child process renders the templates
def derive(name: str) -> ToolFormat:
    ends = ["</s>", "<start_function_response>"]
    found = derive_format(template(name), end_tokens=ends)
    assert found is not None
    return found.with_special(SPECIAL)


@cache
def marks_of(name: str) -> ThinkingMarks:
    marks = ThinkingMarks.derive(template(name))
    assert marks is not None
    return marks.with_special(SPECIAL)


@cache
def _compiled(grammar: str) -> LLMatcher:
    return LLMatcher(TOKENIZER, grammar, log_level=0)


def matcher_of(grammar: str) -> LLMatcher:
    matcher = _compiled(grammar).deep_copy()
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def tokens_of(text: str) -> Iterator[int]:
    """The tokens of a text, its special ones wherever it spells one."""
    while text:
        special = next((tag for tag in SPECIAL if text.startswith(tag)), None)
        if special is not None:
            yield SPECIAL[special]
        else:
            yield from text[0].encode()
        text = text[len(special or text[0]) :]


def accepts(grammar: str, text: str) -> bool | None:
    """Whether a whole text matches; None where it may go on to."""
    matcher = matcher_of(grammar)
    for token in tokens_of(text):
        if not matcher.consume_token(token):
            return False
    return True if matcher.is_accepting() else None


def write(name: str, mode: Any = "auto", names: Sequence[str] | None = None, **kwargs: Any) -> str:
    return write_grammar(derive(name), TOOLS, ToolChoice(mode, names), **kwargs).text


CALLS = {
    "hermes": (
        '<tool_call>\n{"name": "open-file", "arguments": {"path": "a\\nb"}}\n</tool_call>',
        "\n",
    ),
    "llama": ('{"name": "open-file", "parameters": {"path": "a\\nb"}}', None),
    "mistral_new": ('[TOOL_CALLS]open-file{"path": "a\\nb"}', ""),
    "magistral": ('[TOOL_CALLS]open-file[CALL_ID]a1B2c3D4e[ARGS]{"path": "a\\nb"}', ""),
    "function_gemma": (
        "<start_function_call>call:open-file{path:<escape>a\nb<escape>}<end_function_call>",
        "",
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=open-file>\n<parameter=path>\na\nb\n</parameter>\n</function>\n"
        "</tool_call>",
        "\n",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_written_as_the_model_writes_it(name: str) -> None:
    call, separator = CALLS[name]
    for grammar in (write(name, "required"), write(name)):
        assert accepts(grammar, call)
        assert accepts(grammar, call.removesuffix("<end_function_call>")[:-1]) is None
        assert accepts(grammar, call.replace("path", "pafh")) is False
        assert accepts(grammar, call.replace("open-file", "open-fire")) is False
        assert accepts(grammar, call + " and then") is False
    both = call + (separator or "") + call
    assert accepts(write(name, "required"), both) is (separator is not None)
    assert accepts(write(name, "required", parallel=False), both) is False


@pytest.mark.parametrize("name", ["mistral_old", "phi4_mini", "lfm2"])
def test_calls_in_a_section(name: str) -> None:
    begin, call, end = {
        "mistral_old": (
            "[TOOL_CALLS] [",
            '{"name": "open-file", "arguments": {"path": "a"}, "id": "a1B2c3D4e"}',
            "]",
        ),
        "phi4_mini": (
            "<|tool_call|>[",
            '{"name": "open-file", "arguments": {"path": "a"}}',
            "]<|/tool_call|>",
        ),
        "lfm2": ("<|tool_call_start|>[", 'open-file(path="a")', "]<|tool_call_end|>"),
    }[name]
    grammar = write(name)
    assert accepts(grammar, f"Well, {begin}{call}{end}")
    assert accepts(grammar, f"{begin}{call}, {call}{end}")
    assert accepts(grammar, f"{begin}{call}, {end}") is False
    assert accepts(write(name, parallel=False), f"{begin}{call}, {call}{end}") is False


@pytest.mark.parametrize("name", ["hermes", "mistral_new", "function_gemma"])
def test_auto_is_free_until_a_call_begins(name: str) -> None:
    grammar, tag = write(name), derive(name).trigger
    assert accepts(grammar, "")
    assert accepts(grammar, f"Any <text, [of] {{any}} kind\n{tag[:-1]} é")
    assert accepts(grammar, f"Then: {tag}") is None
    assert accepts(grammar, f"Then: {tag} or not") is False
    assert accepts(grammar, f"Then: {CALLS[name][0]}")


def test_a_tag_counts_as_well_if_it_is_spelled_as_text() -> None:
    matcher = matcher_of(write("mistral_new"))
    assert matcher.consume_tokens(list(b"Then [TOOL_CALLS]"))
    assert not matcher.consume_tokens(list(b" or not"))


def test_special_tokens_are_only_where_they_belong() -> None:
    assert accepts(write("function_gemma"), "Hi <escape>") is False
    assert accepts(write("mistral_new", "required"), "[TOOL_CALLS][THINK]") is False


def test_calls_without_a_tag_are_at_the_beginning_or_nowhere() -> None:
    grammar, call = write("llama"), CALLS["llama"][0]
    assert accepts(grammar, call)
    assert accepts(grammar, f"<|python_tag|>{call}")
    assert accepts(grammar, f"Well <|python_tag|>{call}")
    assert accepts(grammar, f"As in {call}, or so")
    assert accepts(grammar, '{"names": 1}')
    # What only looks like a call would be taken for one.
    assert accepts(grammar, '{ "name" : "me"}') is False


def test_required_has_no_text_and_a_named_tool_no_others() -> None:
    call = CALLS["hermes"][0]
    assert accepts(write("hermes", "required"), f"Well {call}") is False
    assert accepts(write("hermes", "required", ["open-file"]), call)
    assert accepts(write("hermes", "required", ["search", "search_now"]), call) is False
    assert accepts(write("hermes", "auto", ["search"]), call) is False
    assert accepts(write("hermes", "auto", ["search"]), "Well")


def test_a_model_that_knows_no_tools_writes_json_of_a_call() -> None:
    grammar = write_grammar(None, TOOLS, ToolChoice("required")).text
    assert accepts(grammar, '{"name": "search_now", "arguments": {}}')
    with pytest.raises(
        ValidationError, match=r"not support tools.*tool_choice to required"
    ) as caught:
        write_grammar(None, TOOLS, ToolChoice("auto"))
    assert caught.value.field == "tool_choice"


@pytest.mark.parametrize("name", ["qwen3", "magistral"])
def test_a_model_may_think_first(name: str) -> None:
    marks = marks_of(name)
    call = CALLS["hermes" if name == "qwen3" else name][0]
    thought = f"{marks.begin}\nIs it {call[:11]}?{marks.end}\n\n".replace("[TOOL_CALLS]", "")
    for mode in ("auto", "required"):
        grammar = write(name, mode, thinking=marks)
        assert accepts(grammar, thought + call)
        assert accepts(grammar, call)
        assert accepts(grammar, thought[:-4]) is None
        assert accepts(write(name, mode), thought + call) is False
    assert accepts(write(name, thinking=marks), thought + "So it is.")


def test_thinking_that_the_prompt_began_must_end() -> None:
    marks, call = marks_of("qwq"), CALLS["hermes"][0]
    grammar = write("qwq", "required", thinking=marks, thinking_opened=True)
    assert accepts(grammar, f"Hm.\n</think>\n\n{call}")
    assert accepts(grammar, call) is None


def weight(token: int) -> float:
    if token >= EOS or chr(token) in '"}])>nt':
        return 20
    return 3 if 32 <= token < 127 else 0.3


WEIGHTS = [weight(token) for token in range(len(VOCABULARY))]


class Sampler:
    """A model of random weights: any allowed token, so that texts end sooner or later."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def text(self, grammar: str, begin: str = "", most: int = 2000) -> str:
        """A whole random text that begins with ``begin``."""
        matcher = matcher_of(grammar)
        tokens = list(tokens_of(begin))
        assert matcher.consume_tokens(tokens), matcher.get_error()
        while len(tokens) < most:
            mask = matcher.compute_bitmask()
            assert not matcher.is_error(), matcher.get_error()
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: len(VOCABULARY)]).tolist()
            (token,) = self._random.choices(allowed, [WEIGHTS[i] for i in allowed])
            if token == EOS:
                return b"".join(VOCABULARY[i] for i in tokens).decode()
            assert matcher.consume_token(token)
            tokens.append(token)
        raise AssertionError(f"no end: {tokens}")

    def pieces(self, text: str) -> list[str]:
        """The text cut at random."""
        cuts = sorted(self._random.choices(range(len(text) + 1), k=self._random.randint(0, 40)))
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read(parser: ReplyParser, pieces: Sequence[str]) -> tuple[str, str, list[list[str]]]:
    """Content, reasoning and calls (id, name, arguments) of a reply."""
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    calls: list[list[str]] = []
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            if delta.name is not None:
                assert delta.index == len(calls)
                assert delta.call_id is not None
                calls.append([delta.call_id, delta.name, ""])
            calls[delta.index][2] += delta.arguments
    return content, reasoning, calls


@cache  # `jsonschema.validate` checks the schema, too, each time
def validator(name: str) -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    return jsonschema.Draft202012Validator(SCHEMAS[name])


def check_calls(calls: list[list[str]]) -> None:
    assert len({call_id for call_id, _, _ in calls}) == len(calls)
    for _, name, arguments in calls:
        validator(name).validate(json.loads(arguments))


# 12 formats, 48 replies each: 576 calls at least, since a reply may have several.
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_random_weights_call_tools_correctly(name: str, mode: Any) -> None:
    form = derive(name)
    grammar = write(name, mode)
    sampler = Sampler(seed=len(name))
    # A model of random weights would hardly ever begin a call.
    begin = ("Well \n" if form.trigger else "") + form.opening if mode == "auto" else ""
    for _ in range(24):
        text = sampler.text(grammar, begin)
        parser = ReplyParser(form, TOOLS)
        content, reasoning, calls = read(parser, [text])
        assert calls, text
        assert parser.num_calls == len(calls)
        assert not parser.incomplete
        assert (content, reasoning) == ("Well" if begin.startswith("Well") else "", "")
        check_calls(calls)
        again = read(ReplyParser(form, TOOLS), sampler.pieces(text))
        assert again[0] == content
        assert [call[1:] for call in again[2]] == [call[1:] for call in calls]


@pytest.mark.parametrize("name", ["qwen3", "magistral"])
def test_random_weights_think_before_they_call(name: str) -> None:
    form, marks = derive(name), marks_of(name)
    grammar = write(name, "required", thinking=marks)
    sampler = Sampler(seed=7)
    for _ in range(10):
        text = sampler.text(grammar, f"{marks.begin}One, {{two}} <three>.\n{marks.end}")
        parser = ReplyParser(form, TOOLS, thinking=marks)
        content, reasoning, calls = read(parser, sampler.pieces(text))
        assert (content, reasoning) == ("", "One, {two} <three>.")
        check_calls(calls)


@pytest.mark.parametrize("name", FORMATS)
def test_half_a_reply_is_told(name: str) -> None:
    form, sampler = derive(name), Sampler(seed=3)
    grammar = write(name, "required", ["open-file"], parallel=False)
    whole = sampler.text(grammar)
    complete = whole.removesuffix(form.section_end)
    (*_, arguments), *_ = read(ReplyParser(form, TOOLS), [whole])[2]
    for length in range(whole.index(form.opening) + len(form.opening), len(complete)):
        parser = ReplyParser(form, TOOLS)
        content, _, calls = read(parser, [whole[:length]])
        assert content == ""
        assert parser.incomplete
        assert all(arguments.startswith(call[2]) for call in calls)


@pytest.mark.parametrize("name", ["qwen3_coder", "function_gemma", "lfm2", "minimax"])
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string"}, ["", "a\n<b> {c}, 'd'", "12"], []),
        ({"type": "string", "maxLength": 2}, ["ab"], ["abc"]),
        ({"type": "string", "pattern": "b+$"}, ["xbb"], ["bbx"]),
        ({"type": "string", "format": "date"}, ["2026-01-02"], []),
        ({"enum": ["a b", "c"]}, ["a b"], ["a"]),
        ({"const": "x"}, ["x"], ["y"]),
        ({"type": "string", "enum": ["a", None]}, ["a"], [None]),
        ({"type": "integer", "maximum": 5}, [5, -3], [6, 1.5]),
        ({"type": "boolean"}, [True, False], []),
        ({"type": ["string", "null"]}, [None, "nil"], []),
        ({"enum": [1, "one", None]}, [1, "one", None], [2]),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, [[1, 2]], [[1]]),
        ({"type": "array", "items": {"type": "string"}, "maxItems": 1}, [[], ["a"]], [["a", "b"]]),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "boolean"}, "b": {"type": "string"}},
                "required": ["b"],
                "additionalProperties": False,
            },
            [{"b": "x"}, {"a": True, "b": "y"}],
            [{"a": True}],
        ),
        ({"$ref": "#/$defs/node"}, [{"value": 1, "next": {"value": 2}}], [{"value": "1"}]),
        ({}, ["x", 1, True, None], []),
    ],
)
def test_arguments_one_by_one_satisfy_their_schema(
    name: str, schema: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    form = derive(name)
    parameters = {"type": "object", "properties": {"k": schema}, "required": ["k"]}
    tool = Tool("f", {**parameters, "$defs": {"node": NODE}})
    grammar = write_grammar(form, [tool], ToolChoice("required")).text
    for value in right + wrong:
        text = form.opening + "f" + form.call.partition("$NAME")[2]
        text = text.replace("$ARGUMENTS", spelled(form, schema, value)) + form.section_end
        assert bool(accepts(grammar, text)) is (value in right), text
        _, _, calls = read(ReplyParser(form, [tool]), list(text))
        if value in right:
            assert json.loads(calls[0][2]) == {"k": value}


def spelled(form: ToolFormat, schema: dict[str, Any], value: Any) -> str:
    """One argument ``k`` as the model writes it."""
    notation = form.arguments
    assert notation is not None
    text = written(value, notation.quote, python=notation.python)
    # What may be of another type than a string, and not null, has quotes.
    if (
        not notation.quote
        and isinstance(value, str)
        and (not schema or 1 in schema.get("enum", []))
    ):
        text = json.dumps(value)
    return notation.parameter.replace("$KEY", "k").replace("$VALUE", text)


def written(value: Any, quote: str, *, python: bool) -> str:
    if quote == "":
        return value if isinstance(value, str) else json.dumps(value)
    if quote == '"':
        constants = [constant for constant in (True, False, None) if value is constant]
        return repr(value) if constants and python else json.dumps(value)
    match value:
        case str():
            return quote + value + quote
        case dict():
            items = (f"{key}:{written(item, quote, python=python)}" for key, item in value.items())
            return "{" + ",".join(items) + "}"
        case list():
            return "[" + ",".join(written(item, quote, python=python) for item in value) + "]"
    return json.dumps(value)


LOOP = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/a"}},
    "required": ["a"],
    "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "function_gemma", "lfm2"])
@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        (Tool("f", None), "no schema.*properties"),  # type: ignore[arg-type]
        (Tool("f", {"type": "array"}), "must be of type object"),
        (Tool("f g", EMPTY), "tool name must be"),
        (Tool("", EMPTY), "tool name must be"),
        (Tool("x" * 129, EMPTY), "tool name must be"),
        (Tool("search", EMPTY), "two tools are named"),
        (Tool("f", LOOP), "infinitely recursive"),
        (
            Tool("f", {"required": ["a"], "properties": {"a": {"$ref": "#"}}}),
            "infinitely recursive",
        ),
        (
            Tool("f", {"properties": {"a": {"$ref": "#/b"}}, "required": ["a"]}),
            "does not exist in it",
        ),
        (
            Tool("f", {"properties": {"a": {"enum": ["x" * 1_100_000]}}}),
            "string of|bytes; the limit",
        ),
        (Tool("f", {"properties": {"a": {"enum": ["x" * 199] * 9999}}}), "bytes; the limit is"),
        (Tool("f", {"required": 3}), "not a valid JSON schema"),
        (Tool("f", {"properties": {"a": {"anyOf": 3}}, "required": ["a"]}), "JSON schema"),
    ],
)
def test_a_tool_that_cannot_be_used_is_refused(name: str, tool: Tool, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason) as caught:
        write_grammar(derive(name), [TOOLS[0], tool], ToolChoice("required"))
    assert caught.value.field == "tools"


@pytest.mark.parametrize("kind", ["foo", ["string", "foo"], 5, {"a": 1}, [["string"]]])
def test_a_type_that_json_does_not_have_is_refused(kind: Any) -> None:
    """Here, where the format names the type of each value; elsewhere llguidance refuses it."""
    types = {each: each for each in JSON_TYPES}
    form = ToolFormat(
        "<f $NAME>$ARGUMENTS</f>",
        arguments=ArgumentList("<$KEY $TYPE>$VALUE</>", "", types=types),
        separator="",
    )
    tool = Tool("f", {"properties": {"a": {"type": kind}}, "required": ["a"]})
    with pytest.raises(ValidationError, match="schema of tool 'f' cannot be used"):
        write_grammar(form, [tool], ToolChoice("required"))


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "function_gemma", "lfm2"])
def test_a_schema_nested_too_deeply_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=r"nest|levels deep"):
        write_grammar(derive(name), [Tool("f", nested(5000))], ToolChoice("required"))


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"properties": {"a b": {}}}, "not 'a b'"),
        ({"properties": {"a": {"allOf": [{}, {}]}}}, "'allOf'"),
        ({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "pattern"),
        ({"properties": {"a": {"enum": ["<escape>"]}}}, "ends a value"),
        ({"anyOf": [{"required": ["a"]}]}, "'anyOf'"),
    ],
)
def test_what_a_notation_cannot_hold_to_is_refused(parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        write_grammar(derive("function_gemma"), [Tool("f", parameters)], ToolChoice("required"))


def test_a_choice_names_tools_that_are_there() -> None:
    with pytest.raises(ValidationError, match="no tool is named 'fly'; the tools are") as caught:
        write("hermes", "required", ["fly"])
    assert caught.value.field == "tool_choice"
    with pytest.raises(ValidationError, match="at least one"):
        write("hermes", "auto", [])
    with pytest.raises(ValidationError, match="list of tools is empty"):
        write_grammar(derive("hermes"), [], ToolChoice("auto"))
    with pytest.raises(ValidationError, match=f"2000 tools.*at most {MAX_TOOLS}"):
        write_grammar(derive("hermes"), [TOOLS[0]] * 2000, ToolChoice("auto"))


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    """A compiler for the starter's tokenizer with some tags as special tokens."""
    tokenizer = tokenizers.Tokenizer.from_file(str(STARTER_TOKENIZER))
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "<other>"])
    compiler = GrammarCompiler(
        tokenizer.to_str(), vocab_size=tokenizer.get_vocab_size(), eos_token_ids=[0]
    )
    yield compiler
    compiler.close()


def test_the_compiler_lets_a_grammar_name_special_tokens(compiler: GrammarCompiler) -> None:
    vocab = tokenizers.Tokenizer.from_file(str(STARTER_TOKENIZER))
    tag = vocab.get_vocab_size()
    form = derive_format(template("mistral_new"))
    assert form is not None
    form = form.with_special({"[TOOL_CALLS]": tag})
    many = [Tool(f"tool_{i}", SEARCH) for i in range(MAX_TOOLS)]
    source = write_grammar(form, many, ToolChoice("auto")).text
    matcher: GrammarMatcher = compiler.submit("structural", source).result().matcher()
    for token in vocab.encode("Well", add_special_tokens=False).ids:
        assert matcher.allowed()[token]
        matcher.accept(token)
    allowed = matcher.allowed()
    assert allowed[tag]
    assert not allowed[tag + 1]
    matcher.accept(tag)
    assert not matcher.allowed()[0]
    for token in vocab.encode("tool_77{", add_special_tokens=False).ids:
        assert matcher.allowed()[token]
        matcher.accept(token)


@pytest.mark.parametrize("name", ["hermes", "llama", "qwen3_coder"])
def test_many_tools_of_several_parameters(name: str, compiler: GrammarCompiler) -> None:
    names = [[f"{kind}_{index}" for kind in ("path", "mode", "text")] for index in range(MAX_TOOLS)]
    many = [
        Tool(f"tool_{index}", {"properties": {key: {"type": "string"} for key in keys},
                               "required": keys[:1]})
        for index, keys in enumerate(names)
    ]  # fmt: skip
    source = write_grammar(derive(name).with_special({}), many, ToolChoice("required")).text
    matcher = compiler.submit("structural", source).result().matcher()
    assert matcher.allowed().any()


def test_no_other_grammar_may_name_special_tokens(compiler: GrammarCompiler) -> None:
    tag = tokenizers.Tokenizer.from_file(str(STARTER_TOKENIZER)).get_vocab_size()
    matcher = compiler.submit("lark", f'start: "a" | <[{tag}]>').result().matcher()
    assert not matcher.allowed()[tag]
