"""The tools of Anthropic's API, and the choice between them."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from maskdial.causal.tools import Tool, ToolChoice
from maskdial.dialects.body import FieldError
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.tools import left_out

_SEARCHES = "tool_search_tool_"


class ToolBody(Lenient):
    """A tool that the model may call. Its input satisfies the schema, ``strict`` or not."""

    habits = frozenset({"allowed_callers", "cache_control", "eager_input_streaming", "strict"})
    within = "tools"

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    defer_loading: bool | None = Field(
        None,
        description="Leave the tool out of the prompt until a tool_reference names it. "
        "Default: false.",
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_server_tools(cls, tool: object) -> object:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind is not None and kind != "custom":
            raise FieldError("type", "server tools are not supported; send tools of type 'custom'")
        return tool

    def to_tool(self) -> Tool:
        """The tool of a dialect-neutral request."""
        return Tool(self.name, self.input_schema, self.description or "")


def _read_tools(tools: object) -> object:
    """The tools that clients run. Those that Anthropic runs are noted; without its search, nobody
    finds those that wait for it.
    """
    kept = left_out(tools, ["custom"])
    if not isinstance(tools, list) or not isinstance(kept, list):
        return tools
    kinds = [tool.get("type") for tool in tools if isinstance(tool, dict)]
    if any(isinstance(kind, str) and kind.startswith(_SEARCHES) for kind in kinds):
        return [
            {**tool, "defer_loading": None} if isinstance(tool, dict) else tool for tool in kept
        ]
    return kept


Tools = Annotated[
    list[ToolBody],
    BeforeValidator(_read_tools, json_schema_input_type=list[ToolBody]),
]


class ToolChoiceBody(Lenient):
    """Whether the model has to call a tool, and which."""

    within = "tool_choice"

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="The tool to call, for the type tool.")
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise FieldError("name", "belongs to the type 'tool', and only to that")
        return self

    def to_choice(self) -> ToolChoice | None:
        """The choice of a dialect-neutral request; None for none."""
        if self.name is not None:
            return ToolChoice("required", [self.name])
        if self.type == "none":
            return None
        return ToolChoice("required" if self.type == "any" else "auto")
