"""The content of Anthropic's messages: blocks, and the turns that chat templates read."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import model_validator

from maskdial.causal.chat.message import ChatMessage, ToolCall
from maskdial.dialects.body import FieldError
from maskdial.dialects.openai.base import Lenient

Role = Literal["user", "assistant", "system"]

_BLOCK_FIELDS = {
    "text": "text",
    "thinking": "thinking",
    "tool_use": "input",
    "tool_result": "tool_use_id",
}
"""The types of blocks that are served, and what each must have."""
_IN_ROLE = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}


def _as_blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Block(Lenient):
    """A part of a message: text, thinking, a tool call, or a tool result."""

    habits = frozenset({"cache_control", "caller", "citations", "signature", "toolset_name"})

    type: Literal["text", "thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "Blocks | None" = None
    is_error: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, block: object) -> object:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in _BLOCK_FIELDS:
            raise FieldError(
                "type",
                f"blocks of type {kind[:64]!r} are not supported; send {', '.join(_BLOCK_FIELDS)}",
            )
        return block

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        required = [_BLOCK_FIELDS[self.type]]
        if self.type == "tool_use":
            required += ["id", "name"]
        for field in required:
            if getattr(self, field) is None:
                raise FieldError(field, "this field is required")
        if any(block.type != "text" for block in self.content or ()):
            raise FieldError("content", "the result of a tool must be text")
        return self

    @property
    def result(self) -> str:
        """The text of a tool result. Templates have no field for a failure, so the text says it."""
        text = joined(self.content or ())
        return f"Error: {text}" if self.is_error else text


Blocks = Annotated[
    list[Block],
    pydantic.BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
]
"""A text, or a list of blocks."""


def joined(blocks: Iterable[Block]) -> str:
    """The text of the blocks that are text, joined by newlines."""
    return "\n".join(block.text for block in blocks if block.text is not None)


class MessageBody(Lenient):
    """One message of a conversation."""

    role: Role
    content: Blocks

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        for index, block in enumerate(self.content):
            if _IN_ROLE.get(block.type, self.role) != self.role:
                raise FieldError(
                    "content",
                    f"block {index} is a {block.type}, which no message of role {self.role} has",
                )
        return self


def check_results(messages: Iterable[MessageBody]) -> None:
    """Refuses a tool result whose call is not in a message before it.

    Raises:
        FieldError: there is one.
    """
    calls: set[str | None] = set()
    for index, message in enumerate(messages):
        for block in message.content:
            if block.type == "tool_result" and block.tool_use_id not in calls:
                raise FieldError(
                    "messages",
                    f"message {index} has a tool_result without a tool_use before it",
                )
            if block.type == "tool_use":
                calls.add(block.id)


def conversation(system: Sequence[Block], messages: Sequence[MessageBody]) -> Iterator[ChatMessage]:
    """The turns of a conversation; consecutive messages of the same role become one."""
    if system:
        yield ChatMessage("system", joined(system))
    role, blocks = messages[0].role, list[Block]()
    for message in messages:
        if message.role != role:
            yield from _turn(role, blocks)
            role, blocks = message.role, []
        blocks = [*blocks, *message.content]
    yield from _turn(role, blocks)


def _turn(role: Role, blocks: Sequence[Block]) -> Iterator[ChatMessage]:
    """One turn as templates expect it: each tool result is a message of its own, of role tool."""
    for block in blocks:
        if block.tool_use_id is not None:
            yield ChatMessage("tool", block.result, tool_call_id=block.tool_use_id)
    others = [block for block in blocks if block.tool_use_id is None]
    if others or not blocks:
        yield ChatMessage(
            role,
            joined(others),
            reasoning="\n".join(each.thinking for each in others if each.thinking is not None),
            tool_calls=[
                ToolCall(each.id or "", each.name or "", json.dumps(each.input))
                for each in others
                if each.type == "tool_use"
            ],
        )
