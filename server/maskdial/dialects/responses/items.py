"""The input items of `/v1/responses`, and the conversation that they become."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic

from maskdial.bounds import Size
from maskdial.causal.chat.message import ChatMessage, ToolCall
from maskdial.dialects.openai.base import Lenient


class InputText(Lenient):
    """A part of a message; a past answer's is ``output_text``."""

    habits = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text"]
    text: str


_PARTS = pydantic.TypeAdapter(Annotated[list[InputText], Size(1, 1024, "parts")])


def _join_parts(content: object) -> str:
    """The text of a message in parts, joined by newlines, as in chat completions."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError('must be a string or a list of {"type": "input_text", "text": "..."}')
    return "\n".join(part.text for part in _PARTS.validate_python(content))


_Text = Annotated[
    str, pydantic.BeforeValidator(_join_parts, json_schema_input_type=str | list[InputText])
]


class MessageItem(Lenient):
    """A message of the conversation."""

    habits = frozenset({"id", "phase", "status"})

    type: Literal["message"] = "message"
    role: Literal["developer", "system", "user", "assistant"]
    content: _Text

    def to_message(self) -> ChatMessage:
        return ChatMessage("system" if self.role == "developer" else self.role, self.content)


class FunctionCallItem(Lenient):
    """A call that the assistant made."""

    habits = frozenset({"caller", "id", "namespace", "status"})
    neutral = {"async": (False,)}  # noqa: RUF012

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = pydantic.Field(description="The text of a JSON object.")

    def to_message(self) -> ChatMessage:
        call = ToolCall(self.call_id, self.name, self.arguments)
        return ChatMessage("assistant", "", tool_calls=(call,))


class FunctionCallOutputItem(Lenient):
    """The result of a call."""

    habits = frozenset({"caller", "id", "name", "namespace", "status"})

    type: Literal["function_call_output"]
    call_id: str
    output: _Text

    def to_message(self) -> ChatMessage:
        return ChatMessage("tool", self.output, tool_call_id=self.call_id)


class ReasoningText(Lenient):
    """A part of the assistant's reasoning, or of a summary of it."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Lenient):
    """What the assistant thought. Reasoning that another provider encrypted is not readable."""

    habits = frozenset({"encrypted_content", "id", "status"})

    type: Literal["reasoning"]
    summary: list[ReasoningText] = pydantic.Field(default_factory=list)
    content: list[ReasoningText] = pydantic.Field(default_factory=list)

    def to_message(self) -> ChatMessage:
        parts = self.content or self.summary
        return ChatMessage("assistant", "", reasoning="\n".join(part.text for part in parts))


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
_SCHEMAS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}


def _read_item(item: object) -> Item:
    """An item as the schema of its type: pydantic's union would put the type into error paths."""
    if not isinstance(item, dict):
        raise ValueError("must be an object, such as a message")
    kind = "message" if item.get("type") is None else item["type"]
    if kind == "item_reference":
        raise ValueError("responses are not stored; send the item itself, not a reference to it")
    if not isinstance(kind, str) or kind not in _SCHEMAS:
        raise ValueError(f"the type of an item must be one of {', '.join(_SCHEMAS)}")
    return _SCHEMAS[kind].model_validate(item)


_ITEMS: pydantic.TypeAdapter[list[Item]] = pydantic.TypeAdapter(
    Annotated[list[Annotated[Item, pydantic.PlainValidator(_read_item)]], Size(1, 4096, "items")]
)


def _read_input(value: object) -> list[Item]:
    if isinstance(value, str):
        return [MessageItem(role="user", content=value)]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    return _ITEMS.validate_python(value)


def read_items(values: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Items that were input or output before."""
    return _ITEMS.validate_python(list(values))


def dumped(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Items in a form that `read_items` reads."""
    return [item.model_dump(mode="json", by_alias=True, exclude_none=True) for item in items]


Input = Annotated[
    list[Item], pydantic.PlainValidator(_read_input, json_schema_input_type=str | list[Item])
]


def conversation(instructions: str | None, items: Sequence[Item]) -> list[ChatMessage]:
    """The messages of a dialect-neutral request.

    The assistant's reasoning, text and calls are items of their own here; those that follow each
    other are one message there.
    """
    messages = [] if instructions is None else [ChatMessage("system", instructions)]
    for item in items:
        message = item.to_message()
        if messages and _same_turn(messages[-1], message):
            messages[-1] = _joined(messages[-1], message)
        else:
            messages.append(message)
    return messages


def _same_turn(before: ChatMessage, after: ChatMessage) -> bool:
    if not before.role == after.role == "assistant":
        return False
    if after.tool_calls:
        return True
    # Text may follow only reasoning, and so may more reasoning.
    return bool(before.reasoning) and not before.content and not before.tool_calls


def _joined(before: ChatMessage, after: ChatMessage) -> ChatMessage:
    return dataclasses.replace(
        before,
        content=before.content or after.content,
        reasoning="\n".join(filter(None, (before.reasoning, after.reasoning))),
        tool_calls=(*before.tool_calls, *after.tool_calls),
    )
