"""Tools, calls and the choice between them, as `/v1/chat/completions` has them."""

from typing import Annotated, Literal, Self

import pydantic
from pydantic import model_validator

from maskdial.causal.chat.message import ToolCall
from maskdial.causal.tools import Tool, ToolChoice
from maskdial.dialects.body import FieldError
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.tools import FunctionBody, left_out

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class ToolBody(Lenient):
    """A tool that the model may call."""

    habits = frozenset({"cache_control"})
    within = "tools"

    type: Literal["function"]
    function: FunctionBody

    def to_tool(self) -> Tool:
        """The tool of a dialect-neutral request."""
        function = self.function
        parameters = _NO_PARAMETERS if function.parameters is None else function.parameters
        return Tool(function.name, parameters, function.description or "")


Tools = Annotated[
    list[ToolBody],
    pydantic.BeforeValidator(
        lambda tools: left_out(tools, ["function"]), json_schema_input_type=list[ToolBody]
    ),
]


class FunctionName(Lenient):
    """A function by its name."""

    name: str


class NamedTool(Lenient):
    """A tool by its name."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Lenient):
    """Some of the tools, which alone may be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolChoiceBody(Lenient):
    """Whether the model has to call a tool, and which it may call."""

    type: Literal["none", "auto", "required", "function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        for name in ("function", "allowed_tools"):
            if (self.type == name) != (getattr(self, name) is not None):
                raise FieldError(name, f"belongs to the type {name!r}, and only to that")
        return self

    def to_choice(self) -> ToolChoice | None:
        """The choice of a dialect-neutral request; None for none."""
        if self.function is not None:
            return ToolChoice("required", [self.function.name])
        if self.allowed_tools is not None:
            names = [tool.function.name for tool in self.allowed_tools.tools]
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


class ToolCallBody(Lenient):
    """A call that the model made before."""

    habits = frozenset({"cache_control", "extra_content", "index", "provider_specific_fields"})
    within = "messages.tool_calls"

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_call(self) -> ToolCall:
        """The call of a dialect-neutral request."""
        return ToolCall(self.id, self.function.name, self.function.arguments)
