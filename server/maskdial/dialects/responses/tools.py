"""The tools and the tool choice of `/v1/responses`, whose fields are not nested as in chat."""

from typing import Annotated, Any, Literal

import pydantic

from maskdial.bounds import Size
from maskdial.causal.tools import Tool, ToolChoice
from maskdial.dialects.openai.base import Lenient

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionTool(Lenient):
    """A function that the client can call. Arguments satisfy the schema, ``strict`` or not."""

    habits = frozenset({"output_schema"})
    neutral = {  # noqa: RUF012
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
    }

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = pydantic.Field(
        None, description="JSON schema of the arguments. Default: there are none."
    )
    strict: bool | None = None

    def to_tool(self) -> Tool:
        """As part of a dialect-neutral request."""
        parameters = _NO_PARAMETERS if self.parameters is None else self.parameters
        return Tool(self.name, parameters, self.description or "")


def _read_tool(value: object) -> FunctionTool:
    kind = value.get("type", "function") if isinstance(value, dict) else "function"
    if kind != "function":
        raise ValueError("only tools of type function are supported; OpenAI runs the others itself")
    return FunctionTool.model_validate(value)


Tools = list[
    Annotated[
        FunctionTool, pydantic.PlainValidator(_read_tool, json_schema_input_type=FunctionTool)
    ]
]


class NamedTool(Lenient):
    """A function, by its name."""

    type: Literal["function"]
    name: str


class AllowedTools(Lenient):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Size(1, 128, "tools")]


_Choice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


def _read_choice(value: object) -> _Choice:
    match value:
        case "none" | "auto" | "required":
            return value
        case {"type": "function"}:
            return NamedTool.model_validate(value)
        case {"type": "allowed_tools"}:
            return AllowedTools.model_validate(value)
    raise ValueError(
        'must be none, auto, required, {"type": "function", "name": ...} or '
        '{"type": "allowed_tools", "mode": ..., "tools": [...]}'
    )


Choice = Annotated[_Choice, pydantic.PlainValidator(_read_choice, json_schema_input_type=_Choice)]


def to_choice(choice: Choice) -> ToolChoice | None:
    """As part of a dialect-neutral request; None: no calls."""
    match choice:
        case "none":
            return None
        case "auto" | "required":
            return ToolChoice(choice)
        case NamedTool():
            return ToolChoice("required", [choice.name])
        case AllowedTools():
            return ToolChoice(choice.mode, [tool.name for tool in choice.tools])
