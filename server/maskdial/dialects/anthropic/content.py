"""The content of Anthropic's messages: blocks, and the turns that chat templates read."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field, model_validator

from maskdial.causal.chat.message import ChatMessage, ToolCall
from maskdial.causal.tools import Tool
from maskdial.dialects.body import FieldError, without_images
from maskdial.dialects.lenient import Lenient
from maskdial.errors import shortened
from maskdial.http.ignored import note_field

Role = Literal["user", "assistant", "system"]

_BLOCK_FIELDS = {
    "text": "text",
    "thinking": "thinking",
    "tool_use": "input",
    "tool_result": "tool_use_id",
    "tool_reference": "tool_name",
}
"""The types of blocks that are served, and what each must have."""
_SENT = "text, thinking, tool_use, tool_result"
_IN_ROLE = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}
_HISTORY = frozenset(
    {
        *("redacted_thinking", "server_tool_use", "web_search_tool_result", "compaction"),
        *("web_fetch_tool_result", "code_execution_tool_result", "tool_search_tool_result"),
        *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result"),
        *("mcp_tool_use", "mcp_tool_result"),
    }
)
"""Types of blocks that Anthropic's own tools left in a conversation: they are left out, as their
texts are encrypted or its own."""
_ROLES = {"ctx": "user", "msg": "user"}  # as in vLLM


def _as_blocks(content: object) -> object:
    """The blocks of a text, or a list without those that say nothing here."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return content
    return [_plain(block) for block in content if not _is_history(block)]


def _is_history(block: object) -> bool:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str) or kind not in _HISTORY:
        return False
    note_field(kind, "messages.content")
    return True


def _plain(block: object) -> object:
    """A document of text as that text."""
    match block:
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return {"type": "text", "text": text}
        case {"type": "document", "source": {"type": "content", "content": str(text)}}:
            return {"type": "text", "text": text}
        case {"type": "search_result", "content": [*parts]} if all(map(_is_text, parts)):
            title = block.get("title", "") if isinstance(block, dict) else ""
            text = "\n".join(part["text"] for part in parts)
            return {"type": "text", "text": f"{title}\n{text}" if title else text}
    return block


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


class Block(Lenient):
    """A part of a message: text, thinking, a tool call, its result, or a tool by its name."""

    habits = frozenset({"caller", "citations", "signature", "toolset_name"})
    within = "messages.content"

    type: Literal["text", "thinking", "tool_use", "tool_result", "tool_reference"]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: "Blocks | None" = None
    is_error: bool | None = None
    cache_control: Any = Field(
        None, description="Another prompt begins with all up to here: a hint for the prefix cache."
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, block: object) -> object:
        if not isinstance(block, dict):
            return block
        kind, content = block.get("type"), block.get("content")
        if isinstance(kind, str) and kind not in _BLOCK_FIELDS:
            raise FieldError(
                "type", f"blocks of type {kind[:64]!r} are not supported; send {_SENT}"
            )
        if kind == "tool_result" and isinstance(content, list):
            return {**block, "content": without_images(content)}
        return block

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        required = [_BLOCK_FIELDS[self.type]]
        if self.type == "tool_use":
            required += ["id", "name"]
        for field in required:
            if getattr(self, field) is None:
                raise FieldError(field, "this field is required")
        if any(block.type not in ("text", "tool_reference") for block in self.content or ()):
            raise FieldError("content", "the result of a tool must be text")
        return self

    def result(self, tools: Mapping[str, Tool]) -> str:
        """The text of a tool result. Templates have no field for a failure, so the text says it."""
        text = joined(self.content or (), tools)
        return f"Error: {text}" if self.is_error else text


Blocks = Annotated[
    list[Block],
    pydantic.BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
]
"""A text, or a list of blocks."""


def joined(blocks: Iterable[Block], tools: Mapping[str, Tool] = MappingProxyType({})) -> str:
    """The text of the blocks that are text or tools by their names, joined by newlines."""
    texts: list[str] = []
    for block in blocks:
        if block.text is not None:
            texts.append(block.text)
        elif block.tool_name is not None:
            texts.append(_described(block.tool_name, tools))
    return "\n".join(texts)


def _described(name: str, tools: Mapping[str, Tool]) -> str:
    """A tool as the model reads it where a conversation refers to it."""
    if name not in tools:
        return f"There is no tool {shortened(name)}."
    function = tools[name].as_openai()["function"]
    return f"<function>{json.dumps(function, ensure_ascii=False)}</function>"


def referred(messages: Iterable["MessageBody"]) -> set[str]:
    """The names of the tools that a conversation refers to."""
    blocks = [block for message in messages for block in message.content]
    inner = [each for block in blocks for each in block.content or ()]
    return {block.tool_name for block in (*blocks, *inner) if block.tool_name is not None}


class MessageBody(Lenient):
    """One message of a conversation."""

    within = "messages"

    role: Annotated[
        Role,
        pydantic.BeforeValidator(
            lambda role: _ROLES.get(role, role) if isinstance(role, str) else role,
            json_schema_input_type=Role,
        ),
    ]
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


def conversation(
    system: Sequence[Block] | None, messages: Sequence[MessageBody], tools: Mapping[str, Tool]
) -> Iterator[ChatMessage]:
    """The turns of a conversation; consecutive messages of the same role become one.

    Args:
        system: the system prompt.
        messages: the conversation.
        tools: those that it may refer to, by their names.
    """
    if system:
        yield ChatMessage("system", joined(system))
    role, blocks = messages[0].role, list[Block]()
    for message in messages:
        if message.role != role:
            yield from _turn(role, blocks, tools)
            role, blocks = message.role, []
        blocks += message.content
    yield from _turn(role, blocks, tools)


def _turn(role: Role, blocks: Sequence[Block], tools: Mapping[str, Tool]) -> Iterator[ChatMessage]:
    """One turn as templates expect it: each tool result is a message of its own, of role tool."""
    for block in blocks:
        if block.tool_use_id is not None:
            marked = block.cache_control is not None
            text = block.result(tools)
            yield ChatMessage("tool", text, tool_call_id=block.tool_use_id, ends_prefix=marked)
    others = [block for block in blocks if block.tool_use_id is None]
    if others or not blocks:
        yield ChatMessage(
            role,
            joined(others, tools),
            reasoning="\n".join(each.thinking for each in others if each.thinking is not None),
            tool_calls=[
                ToolCall(each.id or "", each.name or "", json.dumps(each.input))
                for each in others
                if each.type == "tool_use"
            ],
            ends_prefix=any(each.cache_control is not None for each in others),
        )
