"""The messages and tools of Cohere's chat."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from maskdial.causal.chat.message import ChatMessage, ToolCall
from maskdial.causal.tools import Tool
from maskdial.dialects.body import IMAGES, FieldError
from maskdial.dialects.lenient import Lenient

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_IN_ROLE = {"thinking": "assistant", "document": "tool"}


class DocumentBody(Lenient):
    """A document that a tool found."""

    habits = frozenset({"id"})
    within = "messages.content.document"

    data: dict[str, Any]


class Part(Lenient):
    """A part of a message: a text, what the assistant thought, or a document of a tool."""

    habits = frozenset({"cache_control"})
    within = "messages.content"

    type: Literal["text", "thinking", "document"]
    text: str | None = Field(None, description="Belongs to the type text.")
    thinking: str | None = Field(None, description="Belongs to the type thinking.")
    document: DocumentBody | None = Field(None, description="Belongs to the type document.")

    @model_validator(mode="before")
    @classmethod
    def _refuse_images(cls, part: object) -> object:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in IMAGES:
            raise ValueError("is an image, and no model here reads images; send text")
        return part

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if getattr(self, self.type) is None:
            raise FieldError(self.type, "this field is required")
        return self

    @property
    def written(self) -> str:
        """The part as text."""
        if self.document is not None:
            return json.dumps(self.document.data, ensure_ascii=False)
        return self.text or ""


class CalledFunction(Lenient):
    """A function that was called; ``arguments`` is the text of a JSON object."""

    within = "messages.tool_calls.function"

    name: str
    arguments: str


class ToolCallBody(Lenient):
    """A call that the model made before."""

    within = "messages.tool_calls"

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_call(self) -> ToolCall:
        """The call of a dialect-neutral request."""
        return ToolCall(self.id, self.function.name, self.function.arguments)


_Parts = Annotated[
    list[Part],
    BeforeValidator(
        lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value,
        json_schema_input_type=str | list[Part],
    ),
]


class CohereMessage(Lenient):
    """One message of a conversation. The texts of its parts are joined by newlines."""

    habits = frozenset({"citations"})
    neutral = {"tool_calls": ([],)}  # noqa: RUF012
    within = "messages"

    role: Literal["system", "user", "assistant", "tool"]
    content: _Parts | None = Field(None, description="A text, or parts.")
    tool_calls: list[ToolCallBody] | None = Field(None, description="What the assistant called.")
    tool_plan: str | None = Field(None, description="What it wrote before it did.")
    tool_call_id: str | None = Field(None, description="The call that this is the result of.")

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise FieldError("content", "this field is required")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise FieldError("tool_call_id", "belongs to messages of role tool, and only to those")
        for name in ("tool_calls", "tool_plan"):
            if self.role != "assistant" and getattr(self, name):
                raise FieldError(name, "belongs to messages of role assistant")
        for index, part in enumerate(self.content or ()):
            role = _IN_ROLE.get(part.type, self.role)
            if role != self.role:
                raise FieldError(
                    "content", f"item {index} is a {part.type}, which belongs to the role {role}"
                )
        return self

    def to_message(self) -> ChatMessage:
        """The message of a dialect-neutral request."""
        parts = self.content or []
        texts = [part.written for part in parts if part.type != "thinking"]
        if self.tool_plan:
            texts = [self.tool_plan, *filter(None, texts)]
        return ChatMessage(
            self.role,
            "\n".join(texts),
            reasoning="\n".join(part.thinking for part in parts if part.thinking is not None),
            tool_calls=[call.to_call() for call in self.tool_calls or ()],
            tool_call_id=self.tool_call_id or "",
        )


class FunctionBody(Lenient):
    """A function that the model may call. Its arguments satisfy the schema."""

    within = "tools.function"

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of the arguments. Default: there are none."
    )


class ToolBody(Lenient):
    """A tool that the model may call."""

    within = "tools"

    type: Literal["function"] = "function"
    function: FunctionBody

    def to_tool(self) -> Tool:
        """The tool of a dialect-neutral request."""
        function = self.function
        parameters = _NO_PARAMETERS if function.parameters is None else function.parameters
        return Tool(function.name, parameters, function.description or "")
