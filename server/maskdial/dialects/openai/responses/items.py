"""The input items of `/v1/responses`, and the conversation that they become."""

import base64
import dataclasses
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic

from maskdial.bounds import Size
from maskdial.causal.chat.message import ChatMessage, ToolCall
from maskdial.causal.tools import INPUT
from maskdial.dialects.body import IMAGES, without_images
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.openai.responses.tools import flat_name
from maskdial.http.ignored import note_field, noted

MAX_ITEMS = 16_384
_OWN = "maskdial."  # what a compaction of this server's begins with
_SUMMARY = "A summary of the conversation so far:\n\n"


class InputText(Lenient):
    """A part of a message; a past answer's is ``output_text``."""

    habits = frozenset({"annotations", "cache_control", "logprobs", "prompt_cache_breakpoint"})
    renamed = {"refusal": "text"}  # noqa: RUF012
    within = "input.content"

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str

    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_images(cls, part: object) -> object:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in IMAGES:
            raise ValueError("no model here reads images; send text")
        return part


_PARTS = pydantic.TypeAdapter(Annotated[list[InputText], Size(0, 1024, "parts")])


def _join_parts(content: object) -> str:
    """The text of a message in parts, joined by newlines, as in chat completions."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError('must be a string or a list of {"type": "input_text", "text": "..."}')
    return "\n".join(part.text for part in _PARTS.validate_python(content))


def _join_output(content: object) -> str:
    """The text of a tool's result; images in it are left out."""
    return _join_parts(without_images(content) if isinstance(content, list) else content)


_Text = Annotated[
    str, pydantic.BeforeValidator(_join_parts, json_schema_input_type=str | list[InputText])
]
_Output = Annotated[
    str, pydantic.BeforeValidator(_join_output, json_schema_input_type=str | list[InputText])
]


class MessageItem(Lenient):
    """A message of the conversation."""

    habits = frozenset({"id", "phase", "status"})
    within = "input"

    type: Literal["message"] = "message"
    role: Literal["developer", "system", "user", "assistant"]
    content: _Text

    @pydantic.model_validator(mode="before")
    @classmethod
    def _fill_content(cls, message: object) -> object:
        """An answer that was aborted may be empty."""
        if isinstance(message, dict) and message.get("role") == "assistant":
            return {**message, "content": message.get("content") or ""}
        return message

    def to_message(self) -> ChatMessage:
        return ChatMessage("system" if self.role == "developer" else self.role, self.content)


class FunctionCallItem(Lenient):
    """A call that the assistant made."""

    habits = frozenset({"caller", "id", "status"})
    neutral = {"async": (False,)}  # noqa: RUF012
    within = "input"

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = pydantic.Field(description="The text of a JSON object.")

    def to_message(self) -> ChatMessage:
        call = ToolCall(self.call_id, flat_name(self.namespace, self.name), self.arguments)
        return ChatMessage("assistant", "", tool_calls=(call,))


class CustomToolCallItem(Lenient):
    """A call of a custom tool that the assistant made."""

    habits = frozenset({"caller", "id", "status"})
    within = "input"

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str

    def to_message(self) -> ChatMessage:
        arguments = json.dumps({INPUT: self.input}, ensure_ascii=False)
        call = ToolCall(self.call_id, flat_name(self.namespace, self.name), arguments)
        return ChatMessage("assistant", "", tool_calls=(call,))


class FunctionCallOutputItem(Lenient):
    """The result of a call."""

    habits = frozenset({"caller", "id", "name", "namespace", "status"})
    within = "input"

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: _Output

    def to_message(self) -> ChatMessage:
        return ChatMessage("tool", self.output, tool_call_id=self.call_id)


class ReasoningText(Lenient):
    """A part of the assistant's reasoning, or of a summary of it."""

    within = "input.content"

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Lenient):
    """What the assistant thought. Reasoning that another provider encrypted is not readable."""

    habits = frozenset({"encrypted_content", "id", "status"})
    within = "input"

    type: Literal["reasoning"]
    summary: list[ReasoningText] = pydantic.Field(default_factory=list)
    content: list[ReasoningText] = pydantic.Field(default_factory=list)

    def to_message(self) -> ChatMessage:
        parts = self.content or self.summary
        return ChatMessage("assistant", "", reasoning="\n".join(part.text for part in parts))


class CompactionItem(Lenient):
    """What `/v1/responses/compact` made of the conversation before. Those of others, which are
    encrypted, are left out.
    """

    habits = frozenset({"created_by", "id", "status"})
    within = "input"

    type: Literal["compaction"]
    encrypted_content: str

    @classmethod
    def written(cls, summary: str) -> dict[str, Any]:
        """A summary as an item. It is encoded, not encrypted."""
        content = _OWN + base64.b64encode(summary.encode()).decode()
        return {
            "id": f"cmp_{uuid.uuid4().hex}",
            "type": "compaction",
            "encrypted_content": content,
        }

    @pydantic.field_validator("encrypted_content")
    @classmethod
    def _check_content(cls, content: str) -> str:
        _decoded(content)
        return content

    def to_message(self) -> ChatMessage:
        return ChatMessage("user", _SUMMARY + _decoded(self.encrypted_content))


def _decoded(content: str) -> str:
    try:
        return base64.b64decode(content.removeprefix(_OWN), validate=True).decode()
    except ValueError as error:
        raise ValueError("is not as this server wrote it; send the item as it came") from error


Item = (
    MessageItem
    | FunctionCallItem
    | CustomToolCallItem
    | FunctionCallOutputItem
    | ReasoningItem
    | CompactionItem
)
_SCHEMAS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "custom_tool_call": CustomToolCallItem,
    "function_call_output": FunctionCallOutputItem,
    "custom_tool_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
    "compaction": CompactionItem,
}
_OTHERS = frozenset(
    {
        *("apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction"),
        *("compaction_trigger", "computer_call", "computer_call_output", "file_search_call"),
        *("image_generation_call", "local_shell_call", "local_shell_call_output", "mcp_call"),
        *("mcp_approval_request", "mcp_approval_response", "mcp_list_tools", "program"),
        *("shell_call", "shell_call_output", "tool_search_call", "tool_search_output"),
        *("web_search_call",),
    }
)
"""Types of items of OpenAI's own tools, in conversations that went on there: they are left out."""


def _is_other(item: object) -> bool:
    kind = item.get("type") if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind not in _OTHERS or noted() is None:
        return False
    assert isinstance(item, dict)
    if kind == "compaction" and str(item.get("encrypted_content")).startswith(_OWN):
        return False
    note_field(kind, "input")
    return True


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
    Annotated[
        list[Annotated[Item, pydantic.PlainValidator(_read_item)]], Size(1, MAX_ITEMS, "items")
    ]
)


def _read_input(value: object) -> list[Item]:
    if isinstance(value, str):
        return [MessageItem(role="user", content=value)]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    kept = [item for item in value if not _is_other(item)]
    if value and not kept:
        raise ValueError("has no item that is read here; send a message")
    return _ITEMS.validate_python(kept)


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
    turns = [] if instructions is None else [[ChatMessage("system", instructions)]]
    for item in items:
        message = item.to_message()
        if turns and _same_turn(turns[-1], message):
            turns[-1].append(message)
        else:
            turns.append([message])
    return [_joined(turn) for turn in turns]


def _same_turn(turn: Sequence[ChatMessage], after: ChatMessage) -> bool:
    before = turn[-1]
    if not before.role == after.role == "assistant":
        return False
    if after.tool_calls:
        return True
    # Text may follow only reasoning, and so may more reasoning.
    return not before.content and not before.tool_calls and any(each.reasoning for each in turn)


def _joined(turn: Sequence[ChatMessage]) -> ChatMessage:
    if len(turn) == 1:
        return turn[0]
    return dataclasses.replace(
        turn[0],
        content=next((each.content for each in turn if each.content), ""),
        reasoning="\n".join(each.reasoning for each in turn if each.reasoning),
        tool_calls=tuple(call for each in turn for call in each.tool_calls),
    )
