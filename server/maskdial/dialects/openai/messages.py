"""The messages of a conversation, as `/v1/chat/completions` has them."""

from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field, model_validator

from maskdial.causal.chat import message
from maskdial.dialects.body import FieldError, join_parts
from maskdial.dialects.openai.base import Lenient
from maskdial.dialects.openai.tools import ToolCallBody


class TextPart(Lenient):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(Lenient):
    """One message of a conversation. Parts of its ``content`` are joined by newlines."""

    # litellm sends provider_specific_fields
    habits = frozenset({"annotations", "audio", "name", "provider_specific_fields", "refusal"})
    neutral = {"tool_calls": ([],)}  # noqa: RUF012

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: Annotated[
        str, pydantic.BeforeValidator(join_parts, json_schema_input_type=str | list[TextPart])
    ] = Field(description="May be null beside tool_calls or reasoning.")
    tool_calls: list[ToolCallBody] | None = Field(None, description="What the assistant called.")
    tool_call_id: str | None = Field(None, description="The call that this is the result of.")
    reasoning: str | None = Field(None, description="Extension: what the assistant thought.")
    reasoning_content: str | None = Field(None, description="Extension: another name for it.")

    @model_validator(mode="before")
    @classmethod
    def _fill_content(cls, message: object) -> object:
        beside = ("tool_calls", "reasoning", "reasoning_content")
        if (
            isinstance(message, dict)
            and message.get("content") is None
            and any(message.get(name) for name in beside)
        ):
            return {**message, "content": ""}
        return message

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise FieldError("tool_call_id", "belongs to messages of role tool, and only to those")
        for name in ("tool_calls", "reasoning", "reasoning_content"):
            if self.role != "assistant" and getattr(self, name):
                raise FieldError(name, "belongs to messages of role assistant")
        return self

    def to_message(self) -> message.ChatMessage:
        """The message of a dialect-neutral request."""
        return message.ChatMessage(
            # Templates know the role by its older name.
            "system" if self.role == "developer" else self.role,
            self.content,
            reasoning=self.reasoning or self.reasoning_content or "",
            tool_calls=[call.to_call() for call in self.tool_calls or ()],
            tool_call_id=self.tool_call_id or "",
        )


class PredictionBody(Lenient):
    """A text that the reply is expected to be like. Its parts are joined by newlines."""

    type: Literal["content"]
    content: Annotated[
        str, pydantic.BeforeValidator(join_parts, json_schema_input_type=str | list[TextPart])
    ]


def check_opening(add_generation_prompt: bool | None, continue_final_message: bool | None) -> None:
    """Refuses to open a turn and to go on with the final message as well, as vLLM does."""
    if add_generation_prompt and continue_final_message:
        raise FieldError(
            "add_generation_prompt",
            "a prompt cannot open a turn and go on with the final message; leave it out",
        )
