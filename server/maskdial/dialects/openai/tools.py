"""Tools, calls and the choice between them, as `/v1/chat/completions` has them."""

import json
from collections.abc import Mapping
from typing import Annotated, Literal, Protocol, Self, TypeVar

import pydantic
from pydantic import model_validator

from maskdial.bounds import Size
from maskdial.causal.chat.message import ToolCall
from maskdial.causal.tools import INPUT, Tool, ToolChoice
from maskdial.dialects.body import FieldError
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.tools import FunctionBody, left_out
from maskdial.grammar.source import MAX_TEXT_BYTES

_KINDS = {"function": "function", "custom": "custom"}
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class _Typed(Protocol):
    @property
    def type(self) -> str: ...


_Body = TypeVar("_Body", bound=_Typed)


class GrammarBody(Lenient):
    """What a text must match."""

    within = "tools.custom.format.grammar"

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Size(1, MAX_TEXT_BYTES, "characters")]


class TextFormatBody(Lenient):
    """What the text for a custom tool must be."""

    within = "tools.custom.format"

    type: Literal["text", "grammar"]
    grammar: GrammarBody | None = None

    @model_validator(mode="after")
    def _check_grammar(self) -> Self:
        return _only(self, {"grammar": "grammar"})


class CustomBody(Lenient):
    """A tool that takes a text. Its grammar is enforced; one in Lark is told to the model, too."""

    within = "tools.custom"

    name: str
    description: str | None = None
    format: TextFormatBody | None = None


def _only(body: _Body, names: Mapping[str, str]) -> _Body:
    """Refuses what belongs to another type than the body's, or lacks what belongs to it.

    ``names`` are the fields that belong to one, by that type.
    """
    for kind, name in names.items():
        if body.type == kind and getattr(body, name) is None:
            raise FieldError(name, "this field is required")
        if body.type != kind and getattr(body, name) is not None:
            raise FieldError(name, f"belongs to the type {kind!r}, and only to that")
    return body


class ToolBody(Lenient):
    """A tool that the model may call."""

    habits = frozenset({"cache_control"})
    within = "tools"

    type: Literal["function", "custom"]
    function: FunctionBody | None = None
    custom: CustomBody | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        return _only(self, _KINDS)

    def to_tool(self) -> Tool:
        """The tool of a dialect-neutral request."""
        if (custom := self.custom) is not None:
            grammar = custom.format and custom.format.grammar
            syntax, definition = (grammar.syntax, grammar.definition) if grammar else (None, "")
            return Tool.of_text(custom.name, custom.description or "", syntax, definition)
        function = self.function
        assert function is not None
        parameters = _NO_PARAMETERS if function.parameters is None else function.parameters
        return Tool(function.name, parameters, function.description or "")


Tools = Annotated[
    list[ToolBody],
    pydantic.BeforeValidator(
        lambda tools: left_out(tools, _KINDS), json_schema_input_type=list[ToolBody]
    ),
]


class FunctionName(Lenient):
    """A function by its name."""

    name: str


class NamedTool(Lenient):
    """A tool by its name."""

    type: Literal["function", "custom"]
    function: FunctionName | None = None
    custom: FunctionName | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        return _only(self, _KINDS)

    @property
    def name(self) -> str:
        """The function's name, by which a call refers to the tool."""
        named = self.function or self.custom
        assert named is not None
        return named.name


class AllowedTools(Lenient):
    """Some of the tools, which alone may be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolChoiceBody(Lenient):
    """Whether the model has to call a tool, and which it may call."""

    type: Literal["none", "auto", "required", "function", "custom", "allowed_tools"]
    function: FunctionName | None = None
    custom: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        return _only(self, {**_KINDS, "allowed_tools": "allowed_tools"})

    def to_choice(self) -> ToolChoice | None:
        """The choice of a dialect-neutral request; None for none."""
        if (named := self.function or self.custom) is not None:
            return ToolChoice("required", [named.name])
        if self.allowed_tools is not None:
            names = [tool.name for tool in self.allowed_tools.tools]
            return ToolChoice(self.allowed_tools.mode, names)
        return None if self.type == "none" else ToolChoice(_MODES[self.type])


_MODES: dict[str, Literal["auto", "required"]] = {"auto": "auto", "required": "required"}

ToolChoiceInput = Annotated[
    ToolChoiceBody,
    pydantic.BeforeValidator(
        lambda value: (
            {"type": "required" if value == "any" else value} if isinstance(value, str) else value
        ),
        json_schema_input_type=Literal["none", "auto", "required", "any"] | ToolChoiceBody,
    ),
]


class CalledFunction(Lenient):
    """A function that was called; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


class CalledText(Lenient):
    """A custom tool that was called with a text."""

    name: str
    input: str


class ToolCallBody(Lenient):
    """A call that the model made before."""

    habits = frozenset({"cache_control", "extra_content", "index", "provider_specific_fields"})
    within = "messages.tool_calls"

    id: str
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CalledText | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        return _only(self, _KINDS)

    def to_call(self) -> ToolCall:
        """The call of a dialect-neutral request."""
        if self.function is not None:
            return ToolCall(self.id, self.function.name, self.function.arguments)
        assert self.custom is not None
        arguments = json.dumps({INPUT: self.custom.input}, ensure_ascii=False)
        return ToolCall(self.id, self.custom.name, arguments)
