"""The messages of a conversation, as Ollama's `/api/chat` has them."""

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from maskdial.causal.chat.message import ChatMessage, ToolCall
from maskdial.causal.tools import Tool
from maskdial.dialects.body import FieldError
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.ollama.body import Images
from maskdial.dialects.tools import FunctionBody


class ToolBody(Lenient):
    """A function that the model may call."""

    type: Literal["function"] | None = None
    function: FunctionBody

    def to_tool(self) -> Tool:
        """The tool of a dialect-neutral request."""
        function = self.function
        return Tool(
            function.name,
            {"type": "object"} if function.parameters is None else function.parameters,
            function.description or "",
        )


class CalledFunction(Lenient):
    """A function that was called; its arguments are an object."""

    habits = frozenset({"index"})

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class ToolCallBody(Lenient):
    """A call that the model made before."""

    habits = frozenset({"index", "type"})

    id: str | None = None
    function: CalledFunction


class MessageBody(Lenient):
    """One message of a conversation."""

    habits = frozenset({"name"})
    neutral = {"images": ([],), "tool_calls": ([],)}  # noqa: RUF012

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = Field(None, description="What the assistant thought.")
    tool_calls: list[ToolCallBody] | None = Field(None, description="What the assistant called.")
    tool_name: str | None = Field(None, description="The function that this is the result of.")
    tool_call_id: str | None = Field(None, description="The call that this is the result of.")
    images: Images = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        for name in ("tool_calls", "thinking"):
            if self.role != "assistant" and getattr(self, name):
                raise FieldError(name, "belongs to messages of role assistant")
        return self


def conversation(messages: Sequence[MessageBody]) -> list[ChatMessage]:
    """The messages of a dialect-neutral request.

    Ollama's calls need no ids: a result is that of the first call without one that has its name.
    """
    found: list[ChatMessage] = []
    open_calls = _OpenCalls()
    num_calls = 0
    for message in messages:
        calls = []
        for each in message.tool_calls or ():
            call_id = each.id or f"call_{num_calls}"
            arguments = json.dumps(each.function.arguments)
            calls.append(ToolCall(call_id, each.function.name, arguments))
            open_calls.add(calls[-1])
            num_calls += 1
        call_id = ""
        if message.role == "tool":
            call_id = message.tool_call_id or open_calls.first(message.tool_name)
            open_calls.close(call_id)
        found.append(
            ChatMessage(
                message.role,
                message.content,
                reasoning=message.thinking or "",
                tool_calls=calls,
                tool_call_id=call_id,
            )
        )
    return found


class _OpenCalls:
    """The ids of calls that have no result yet, however many there are."""

    def __init__(self) -> None:
        self._named = defaultdict[str | None, deque[str]](deque)
        """In order, by name, and under None all of them; closed ones may be among them."""
        self._closed: set[str] = set()

    def add(self, call: ToolCall) -> None:
        for name in (None, call.name):
            self._named[name].append(call.call_id)
        self._closed.discard(call.call_id)

    def close(self, call_id: str) -> None:
        self._closed.add(call_id)

    def first(self, name: str | None) -> str:
        """The call that a result without an id belongs to, by name; empty if there is none."""
        ids = self._named.get(name)
        while ids and ids[0] in self._closed:
            ids.popleft()
        return ids[0] if ids else ""
