"""The messages of a conversation, as `/v1/chat/completions` has them."""

from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field, model_validator

from maskdial.causal.chat import request
from maskdial.dialects.body import FieldError, join_parts, without_images
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.openai.tools import ToolCallBody


class TextPart(Lenient):
    """A part of a message."""

    within = "messages.content"

    type: Literal["text"]
    text: str


class Message(Lenient):
    """One message of a conversation. Parts of its ``content`` are joined by newlines."""

    # What gateways and editors keep of other providers' replies, and of their caches
    habits = frozenset(
        {
            *("annotations", "audio", "cache_control", "copilot_cache_control", "cot_id", "name"),
            *("provider_specific_fields", "reasoning_details", "reasoning_opaque", "refusal"),
            *("thinking_blocks",),
        }
    )
    neutral = {"tool_calls": ([],)}  # noqa: RUF012
    renamed = {"reasoning_text": "reasoning"}  # noqa: RUF012
    within = "messages"

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: Annotated[
        str, pydantic.BeforeValidator(join_parts, json_schema_input_type=str | list[TextPart])
    ] = Field(description="May be null in messages of the assistant.")
    tool_calls: list[ToolCallBody] | None = Field(None, description="What the assistant called.")
    tool_call_id: str | None = Field(None, description="The call that this is the result of.")
    reasoning: str | None = Field(None, description="Extension: what the assistant thought.")
    reasoning_content: str | None = Field(None, description="Extension: another name for it.")

    @model_validator(mode="before")
    @classmethod
    def _fill_content(cls, message: object) -> object:
        """Histories of agents have replies that were aborted, or empty, and pictures of screens."""
        if not isinstance(message, dict):
            return message
        role, content = message.get("role"), message.get("content")
        if role == "assistant" and (content is None or content == []):
            return {**message, "content": ""}
        if role == "tool" and isinstance(content, list):
            return {**message, "content": without_images(content) or ""}
        return message

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise FieldError("tool_call_id", "belongs to messages of role tool, and only to those")
        for name in ("tool_calls", "reasoning", "reasoning_content"):
            if self.role != "assistant" and getattr(self, name):
                raise FieldError(name, "belongs to messages of role assistant")
        return self

    def to_message(self) -> request.ChatMessage:
        """The message of a dialect-neutral request."""
        return request.ChatMessage(
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
