"""The tools and the tool choice of `/v1/responses`, whose fields are not nested as in chat."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field

from maskdial.bounds import Size
from maskdial.causal.tools import Tool, ToolChoice
from maskdial.dialects.body import FieldError
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.tools import left_out
from maskdial.errors import shortened

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_SERVED = ("function", "custom", "namespace")


class FunctionTool(Lenient):
    """A function that the client can call. Arguments satisfy the schema, ``strict`` or not."""

    # Nothing searches for tools here, so that those that wait to be found are there at once.
    habits = frozenset({"allowed_callers", "defer_loading", "output_schema"})
    neutral = {"async": (False,)}  # noqa: RUF012
    within = "tools"

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of the arguments. Default: there are none."
    )
    strict: bool | None = None

    def to_tool(self, name: str, about: str = "") -> Tool:
        """As part of a dialect-neutral request, where it may have another name."""
        parameters = _NO_PARAMETERS if self.parameters is None else self.parameters
        return Tool(name, parameters, about + (self.description or ""))


class CustomFormat(Lenient):
    """What the text for a custom tool must be."""

    within = "tools.format"

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @pydantic.model_validator(mode="after")
    def _check_grammar(self) -> Self:
        for name in ("syntax", "definition"):
            if (self.type == "grammar") != bool(getattr(self, name)):
                raise FieldError(name, "belongs to the type grammar, and only to that")
        return self


class CustomTool(Lenient):
    """A tool that takes a text. Its grammar is enforced; one in Lark is told to the model, too."""

    habits = frozenset({"allowed_callers", "defer_loading"})
    within = "tools"

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = None

    def to_tool(self, name: str, about: str = "") -> Tool:
        """As a function of one text."""
        form = self.format or CustomFormat(type="text")
        about += self.description or ""
        return Tool.of_text(name, about, form.syntax, form.definition or "")


def _read_single(value: object) -> FunctionTool | CustomTool:
    kind = value.get("type", "function") if isinstance(value, dict) else "function"
    if kind == "custom":
        return CustomTool.model_validate(value)
    if kind != "function":
        raise ValueError("only tools of type function are supported; OpenAI runs the others itself")
    return FunctionTool.model_validate(value)


_Single = Annotated[
    FunctionTool | CustomTool,
    pydantic.PlainValidator(_read_single, json_schema_input_type=FunctionTool | CustomTool),
]


class Namespace(Lenient):
    """Tools with a name in common, such as those of a server of tools."""

    within = "tools"

    type: Literal["namespace"]
    name: Annotated[str, Size(1, 64, "characters")]
    description: str | None = None
    tools: Annotated[
        list[_Single],
        pydantic.BeforeValidator(lambda tools: left_out(tools, ("function", "custom"))),
    ]


def _read_tool(value: object) -> FunctionTool | CustomTool | Namespace:
    if isinstance(value, dict) and value.get("type") == "namespace":
        return Namespace.model_validate(value)
    return _read_single(value)


Tools = Annotated[
    list[
        Annotated[
            FunctionTool | CustomTool | Namespace,
            pydantic.PlainValidator(
                _read_tool, json_schema_input_type=FunctionTool | CustomTool | Namespace
            ),
        ]
    ],
    pydantic.BeforeValidator(lambda tools: left_out(tools, _SERVED)),
]


def flat_name(namespace: str | None, name: str) -> str:
    """What the model calls a tool of a namespace."""
    if namespace is None:
        return name
    return namespace + ("" if namespace.endswith("__") else "__") + name


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool as the model knows it, and as the client does."""

    tool: Tool
    name: str
    namespace: str | None
    custom: bool


def offered(tools: Sequence[FunctionTool | CustomTool | Namespace]) -> list[Offered]:
    """All tools. The first of a namespace begins with the description of that."""
    return [
        Offered(
            each.to_tool(flat_name(namespace, each.name), about),
            each.name,
            namespace,
            isinstance(each, CustomTool),
        )
        for each, namespace, about in _flat(tools)
    ]


def _flat(
    tools: Sequence[FunctionTool | CustomTool | Namespace],
) -> Iterator[tuple[FunctionTool | CustomTool, str | None, str]]:
    for tool in tools:
        if not isinstance(tool, Namespace):
            yield tool, None, ""
            continue
        about = f"{tool.description}\n\n" if tool.description else ""
        for each in tool.tools:
            yield each, tool.name, about
            about = ""


class NamedTool(Lenient):
    """A function or a custom tool, by its name."""

    within = "tool_choice"

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    @property
    def flat_name(self) -> str:
        """What the model calls it."""
        return flat_name(self.namespace, self.name)


class AllowedTools(Lenient):
    """Some of the tools."""

    within = "tool_choice"

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[NamedTool],
        Size(1, 1024, "tools"),
        pydantic.BeforeValidator(lambda tools: left_out(tools, ("function", "custom"))),
    ]


_Choice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


def _read_choice(value: object) -> _Choice:
    match value:
        case "none" | "auto" | "required":
            return value
        case {"type": "function" | "custom"}:
            return NamedTool.model_validate(value)
        case {"type": "allowed_tools"}:
            return AllowedTools.model_validate(value)
        case {"type": str(kind)}:
            raise ValueError(
                f"this server does not run {shortened(kind)} itself, so it cannot be required; "
                "send a function for it"
            )
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
            return ToolChoice("required", [choice.flat_name])
        case AllowedTools():
            return ToolChoice(choice.mode, [tool.flat_name for tool in choice.tools])


def by_model_name(tools: Sequence[Offered]) -> Mapping[str, Offered]:
    """Tools by what the model calls them."""
    return {each.tool.name: each for each in tools}
