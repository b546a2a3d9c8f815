"""ChatMessage: one message of a conversation, and the tool calls in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the model.

    ``arguments`` is the JSON text of an object, or its beginning if the reply was cut off.
    """

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        role: ``tool`` for the result of a call.
        content: the text, possibly empty.
        reasoning: the assistant's reasoning before its answer.
        tool_calls: the assistant's calls.
        tool_call_id: the call that a message of role ``tool`` is the result of.
        ends_prefix: whether the client says that another prompt will begin with all up to this one.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning: str = ""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    ends_prefix: bool = False
