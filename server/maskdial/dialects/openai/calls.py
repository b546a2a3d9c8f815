"""Calls of tools, as `/v1/chat/completions` writes them."""

from collections.abc import Collection
from typing import Any

from maskdial.causal.chat.message import ToolCall
from maskdial.causal.tools import ToolCallDelta, text_of


class CallWriter:
    """Writes calls, whole or piece by piece.

    Args:
        custom: the names of tools that take a text, which is known once all of it is there.
    """

    def __init__(self, custom: Collection[str]) -> None:
        self._custom = custom
        self._index = -1
        self._arguments: list[str] = []
        """Of a call of a custom tool that has not ended."""

    def whole(self, call: ToolCall) -> dict[str, Any]:
        """A call in a message."""
        if call.name in self._custom:
            custom = {"name": call.name, "input": text_of(call.arguments)}
            return {"id": call.call_id, "type": "custom", "custom": custom}
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call.call_id, "type": "function", "function": function}

    def push(self, delta: ToolCallDelta) -> list[dict[str, Any]]:
        """What a chunk of a stream says of a piece of a call."""
        if delta.name is not None:
            written = self.finish()
            if delta.name in self._custom:
                self._index, self._arguments = delta.index, [delta.arguments]
                delta = ToolCallDelta(delta.index, call_id=delta.call_id, name=delta.name)
            call = ToolCall(delta.call_id or "", delta.name or "", delta.arguments)
            return [*written, {"index": delta.index} | self.whole(call)]
        if delta.index == self._index:
            self._arguments.append(delta.arguments)
            return []
        return [{"index": delta.index, "function": {"arguments": delta.arguments}}]

    def finish(self) -> list[dict[str, Any]]:
        """What is left to say of the last call."""
        if self._index < 0:
            return []
        more = {"index": self._index, "custom": {"input": text_of("".join(self._arguments))}}
        self._index = -1
        return [more]
