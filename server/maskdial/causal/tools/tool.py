"""Tool and ToolChoice: what a model may call, and whether it must."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import from_json

from maskdial.errors import ValidationError

MAX_TOOLS = 1024  # OpenAI's limit is 128, and agents with several servers of tools pass it
INPUT = "input"
"""The only argument of a function that stands for a tool which takes a text."""
_NAME = re.compile(r"[a-zA-Z0-9_./:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Attributes:
        name: up to 128 letters, digits, ``_``, ``-``, ``.``, ``/`` or ``:``.
        parameters: the JSON schema of its arguments, of type object.
        description: what it does, for the model.
        lark: a Lark grammar of its only argument, `INPUT`, a text; empty for none.
    """

    name: str
    parameters: Mapping[str, Any]
    description: str = ""
    lark: str = ""

    @classmethod
    def of_text(
        cls, name: str, description: str, syntax: Literal["lark", "regex"] | None, definition: str
    ) -> "Tool":
        """A tool that takes a text, as a function with the argument `INPUT`.

        Args:
            name: as above.
            description: as above; a Lark grammar is told to the model as well.
            syntax: of what the text must match; None for any text.
            definition: what it must match.
        """
        text: dict[str, Any] = {"type": "string"}
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        lark = definition if syntax == "lark" else ""
        if lark:
            description += f"\n\n{INPUT} must match this grammar:\n{lark}"
        schema = {
            "type": "object",
            "properties": {INPUT: text},
            "required": [INPUT],
            "additionalProperties": False,
        }
        return cls(name, schema, description, lark)

    def as_openai(self) -> dict[str, Any]:
        """The tool in the form that chat templates read."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether a model must call a tool, and which tools it may call.

    Attributes:
        mode: ``auto`` allows text, calls, or text followed by calls; ``required`` calls only.
        names: the tools that may be called, None for all. ``required`` with a single name is
            OpenAI's named choice.
    """

    mode: Literal["auto", "required"] = "auto"
    names: Sequence[str] | None = None

    def select(self, tools: Sequence[Tool]) -> list[Tool]:
        """The tools that may be called.

        Raises:
            ValidationError: the choice names no tool, or an unknown one.
        """
        if self.names is None:
            return list(tools)
        known = {tool.name: tool for tool in tools}
        for name in self.names:
            if name not in known:
                raise ValidationError(
                    f"no tool is named {name!r}; the tools are {', '.join(known) or 'none'}",
                    field="tool_choice",
                )
        if not self.names:
            raise ValidationError("name at least one allowed tool", field="tool_choice")
        return [tool for tool in tools if tool.name in self.names]


def text_of(arguments: str) -> str:
    """The text that a tool was called with, of its arguments in JSON, which may be cut off."""
    try:
        read = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return arguments
    return str(read.get(INPUT, "")) if isinstance(read, dict) else arguments


def check_tools(tools: Sequence[Tool]) -> None:
    """Checks the names and number of tools, and that each has an object schema.

    Raises:
        ValidationError: a tool is unusable; ``index`` says which.
    """
    if not tools:
        raise ValidationError("the list of tools is empty; send at least one", field="tools")
    if len(tools) > MAX_TOOLS:
        raise ValidationError(
            f"the request has {len(tools)} tools; it may have at most {MAX_TOOLS}", field="tools"
        )
    names: set[str] = set()
    for index, tool in enumerate(tools):
        reason = _reason_against(tool, names)
        if reason is not None:
            raise ValidationError(reason, field="tools", index=index)
        names.add(tool.name)


def _reason_against(tool: Tool, names: set[str]) -> str | None:
    if not _NAME.fullmatch(tool.name):
        return (
            "a tool name must be 1 to 128 letters, digits, '_', '-', '.', '/' or ':', not "
            f"{tool.name!r}"
        )
    if tool.name in names:
        return f"two tools are named {tool.name!r}"
    parameters: object = tool.parameters
    if not isinstance(parameters, Mapping):
        return (
            f"tool {tool.name!r} has no schema; set parameters, to "
            '{"type": "object", "properties": {}} if it takes no arguments'
        )
    if parameters.get("type", "object") != "object":
        return f"the arguments of tool {tool.name!r} must be of type object"
    return None
