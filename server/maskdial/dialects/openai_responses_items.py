"""The input items of `/v1/responses`, and the messages that they become."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic

from maskdial.dialects.openai_schema import Lenient
from maskdial.dialects.schema import Size

_ROLES = {"developer": "system"}  # templates know the role by its older name


class InputTextPart(Lenient):
    """A part of a message; a past answer's is ``output_text``."""

    habits = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text"]
    text: str


_PARTS = pydantic.TypeAdapter(Annotated[list[InputTextPart], Size(1, 1024, "parts")])


def _join_parts(content: object) -> str:
    """The text of a message in parts, joined by newlines, as in chat completions."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError('must be a string or a list of {"type": "input_text", "text": "..."}')
    return "\n".join(part.text for part in _PARTS.validate_python(content))


_Text = Annotated[
    str,
    pydantic.BeforeValidator(_join_parts, json_schema_input_type=str | list[InputTextPart]),
]


class InputMessage(Lenient):
    """A message of the conversation."""

    habits = frozenset({"id", "phase", "status"})

    type: Literal["message"] = "message"
    role: Literal["developer", "system", "user", "assistant"]
    content: _Text


InputItem = InputMessage
_ITEMS: Mapping[str, type[InputItem]] = {"message": InputMessage}


def _read_item(item: object) -> InputItem:
    """An item as the schema of its type: pydantic's union would put the type into error paths."""
    if not isinstance(item, dict):
        raise ValueError("must be an object, such as a message")
    kind = item.get("type", "message")
    if kind == "item_reference":
        raise ValueError("responses are not stored; send the item itself, not a reference to it")
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise ValueError(f"the type of an item must be one of {', '.join(_ITEMS)}")
    return _ITEMS[kind].model_validate(item)


_Item = Annotated[InputItem, pydantic.PlainValidator(_read_item)]
_LIST = pydantic.TypeAdapter(Annotated[list[_Item], Size(1, 4096, "items")])


def _read_input(value: object) -> list[InputItem]:
    if isinstance(value, str):
        return [InputMessage(role="user", content=value)]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of items")
    return _LIST.validate_python(value)


Input = Annotated[
    list[InputItem],
    pydantic.PlainValidator(_read_input, json_schema_input_type=str | list[InputItem]),
    pydantic.Field(description="A user message, or the items of a conversation."),
]


def conversation(instructions: str | None, items: Sequence[InputItem]) -> list[Mapping[str, Any]]:
    """The messages that the chat template renders."""
    messages: list[Mapping[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    messages += [
        {"role": _ROLES.get(item.role, item.role), "content": item.content} for item in items
    ]
    return messages
