"""The input of `/v1/decisions`: messages and tool calls as the lines of a transcript."""

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import model_validator

from maskdial.dialects.body import FieldError
from maskdial.dialects.lenient import Lenient

_NO_IMAGES = "images are not supported; describe them in words"


class Part(Lenient):
    """A part of a text. Images are refused."""

    habits = frozenset({"detail", "prompt_cache_breakpoint"})

    type: Literal["input_text", "input_json", "output_text", "refusal", "input_image"]
    text: str | None = None
    data: dict[str, Any] | list[Any] | None = None
    refusal: str | None = None
    image_url: str | None = None

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        if self.type == "input_image":
            raise FieldError("type", _NO_IMAGES)
        if self._value is None:
            raise FieldError(self._field, "this field is required")
        return self

    @property
    def as_text(self) -> str:
        """What a model reads of it: JSON in its most compact form."""
        if isinstance(self._value, str):
            return self._value
        return json.dumps(self._value, ensure_ascii=False, separators=(",", ":"))

    @property
    def _field(self) -> str:
        return {"input_json": "data", "refusal": "refusal"}.get(self.type, "text")

    @property
    def _value(self) -> str | dict[str, Any] | list[Any] | None:
        return {"data": self.data, "refusal": self.refusal, "text": self.text}[self._field]


def _as_parts(content: object) -> object:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


Parts = Annotated[
    list[Part],
    pydantic.BeforeValidator(_as_parts, json_schema_input_type=str | list[Part]),
]
"""A text, or a list of parts."""


def joined(parts: Iterable[Part]) -> str:
    """The text of all parts, joined by newlines."""
    return "\n".join(part.as_text for part in parts)


_ITEM_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
}
"""What each type of item must have."""


class Item(Lenient):
    """A message, a tool call, or what a tool returned."""

    habits = frozenset({"id", "namespace", "phase", "status"})

    type: Literal[
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
    ] = "message"
    role: Literal["user", "developer", "system", "assistant"] | None = None
    content: Parts | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: Parts | None = None

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        for field in _ITEM_FIELDS[self.type]:
            if getattr(self, field) is None:
                raise FieldError(field, "this field is required")
        return self

    @property
    def as_line(self) -> str:
        """The item as a line of a transcript."""
        if self.type == "message":
            return f"{self.role}: {joined(self.content or ())}"
        if self.output is not None:
            return f"tool: {joined(self.output)}"
        return f"assistant: {self.name}({self.arguments or self.input or ''})"
