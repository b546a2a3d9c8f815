"""The output items of a response, and the stream events that report how each one grows."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from maskdial.causal.prompts import Prompt
from maskdial.causal.tools import (
    ContentDelta,
    ReasoningDelta,
    ReplyDelta,
    ToolCallDelta,
    text_of,
)
from maskdial.dialects.openai.replies import ResponseUsage
from maskdial.dialects.openai.responses.tools import Offered

Event = dict[str, Any]
"""A stream event without its sequence number."""

Status = Literal["in_progress", "completed", "incomplete"]


def usage(prompt: Prompt, num_generated: int, num_reasoning: int) -> ResponseUsage:
    """The token counts of a response."""
    return {
        "input_tokens": len(prompt.ids),
        "input_tokens_details": {"cached_tokens": prompt.num_cached, "cache_write_tokens": 0},
        "output_tokens": num_generated,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": len(prompt.ids) + num_generated,
    }


class ResponseOutput:
    """Collects a reply into items: reasoning, a message, function calls, in the order they come."""

    def __init__(self, tools: Mapping[str, Offered]) -> None:
        """``tools`` are those that may be called, by what the model calls them."""
        self._items: list[_Item] = []
        self._tools = tools

    def push(self, delta: ReplyDelta, logprobs: Sequence[Any] = ()) -> list[Event]:
        """Adds a part of the reply; returns the events to send for it.

        ``logprobs`` are those of its tokens, as the API writes them, for text.
        """
        match delta:
            case ContentDelta(text) | ReasoningDelta(text):
                growth = text
            case ToolCallDelta():
                growth = delta.arguments
        events = []
        last = self._items[-1] if self._items else None
        if last is None or not last.continues_with(delta):
            events += [*self.close("completed"), *self._open(self._new_item(delta))]
        return [*events, *self._items[-1].extend(growth, logprobs)]

    def finish(self, status: Status) -> list[Event]:
        """Closes the last item of a whole reply; one without any item is an empty message."""
        opened = [] if self._items else self._open(_Message(0))
        return [*opened, *self.close(status)]

    def close(self, status: Status) -> list[Event]:
        """Closes the last item, if there is one."""
        if not self._items:
            return []
        item = self._items[-1]
        item.status = status
        return list(item.close())

    def items(self) -> list[dict[str, Any]]:
        """The items so far, as the API writes them."""
        return [item.content() for item in self._items]

    def _new_item(self, delta: ReplyDelta) -> "_Item":
        index = len(self._items)
        match delta:
            case ContentDelta():
                return _Message(index)
            case ReasoningDelta():
                return _Reasoning(index)
            case ToolCallDelta():
                tool = self._tools.get(delta.name or "")
                kind = _CustomToolCall if tool is not None and tool.custom else _FunctionCall
                return kind(index, delta, tool)

    def _open(self, item: "_Item") -> list[Event]:
        self._items.append(item)
        return list(item.open())


class _Item(ABC):
    """One output item: ``text`` is its content, or the arguments of a call."""

    id_prefix: str

    def __init__(self, index: int) -> None:
        self.id = f"{self.id_prefix}_{uuid.uuid4().hex}"
        self.status: Status = "in_progress"
        self.text = ""
        self._index = index

    @abstractmethod
    def continues_with(self, delta: ReplyDelta) -> bool:
        """Whether a delta belongs to this item."""

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """The item as the API writes it."""

    def open(self) -> Iterable[Event]:
        yield self._item_event("response.output_item.added")

    def extend(self, text: str, logprobs: Sequence[Any]) -> Iterable[Event]:
        if text:
            self.text += text
            yield self._delta_event(text, logprobs)

    def close(self) -> Iterable[Event]:
        yield self._item_event("response.output_item.done")

    @abstractmethod
    def _delta_event(self, text: str, logprobs: Sequence[Any]) -> Event: ...

    def _item_event(self, kind: str) -> Event:
        return {"type": kind, "output_index": self._index, "item": self.content()}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.id, "output_index": self._index, **fields}


class _TextItem(_Item):
    """An item whose content is one part of text."""

    part_type: str

    def part(self) -> dict[str, Any]:
        return {"type": self.part_type, "text": self.text}

    def parts(self) -> list[dict[str, Any]]:
        """The SDK appends the part of ``content_part.added`` to those of ``output_item.added``."""
        return [] if self.status == "in_progress" else [self.part()]

    def open(self) -> Iterable[Event]:
        yield from super().open()
        yield self._part_event("response.content_part.added", part=self.part())

    def close(self) -> Iterable[Event]:
        yield self._done_event()
        yield self._part_event("response.content_part.done", part=self.part())
        yield from super().close()

    def _delta_event(self, text: str, logprobs: Sequence[Any]) -> Event:
        return self._part_event(f"response.{self.part_type}.delta", delta=text)

    def _done_event(self) -> Event:
        return self._part_event(f"response.{self.part_type}.done", text=self.text)

    def _part_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, content_index=0, **fields)


class _Message(_TextItem):
    id_prefix = "msg"
    part_type = "output_text"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs: list[Any] = []

    def continues_with(self, delta: ReplyDelta) -> bool:
        return isinstance(delta, ContentDelta)

    def part(self) -> dict[str, Any]:
        return {**super().part(), "annotations": [], "logprobs": [*self._logprobs]}

    def content(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": self.status,
            "content": self.parts(),
        }

    # The SDK requires a list of log-probabilities in both events, possibly empty.
    def _delta_event(self, text: str, logprobs: Sequence[Any]) -> Event:
        self._logprobs += logprobs
        return {**super()._delta_event(text, logprobs), "logprobs": logprobs}

    def _done_event(self) -> Event:
        return {**super()._done_event(), "logprobs": self._logprobs}


class _Reasoning(_TextItem):
    id_prefix = "rs"
    part_type = "reasoning_text"

    def continues_with(self, delta: ReplyDelta) -> bool:
        return isinstance(delta, ReasoningDelta)

    def content(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": self.status,
            "summary": [],
            "content": self.parts(),
        }


class _FunctionCall(_Item):
    id_prefix = "fc"

    def __init__(self, index: int, first: ToolCallDelta, tool: Offered | None) -> None:
        super().__init__(index)
        self._call = first
        self._tool = tool

    def continues_with(self, delta: ReplyDelta) -> bool:
        return isinstance(delta, ToolCallDelta) and delta.index == self._call.index

    def content(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            **self._called(),
            "arguments": self.text,
        }

    def _called(self) -> dict[str, Any]:
        """What is called, as the client knows it."""
        called: dict[str, Any] = {"call_id": self._call.call_id, "name": self._call.name}
        if self._tool is not None:
            called["name"] = self._tool.name
            if self._tool.namespace is not None:
                called["namespace"] = self._tool.namespace
        return called

    def close(self) -> Iterable[Event]:
        yield self._event("response.function_call_arguments.done", arguments=self.text)
        yield from super().close()

    def _delta_event(self, text: str, logprobs: Sequence[Any]) -> Event:
        return self._event("response.function_call_arguments.delta", delta=text)


class _CustomToolCall(_FunctionCall):
    """A call whose text is known once its arguments are: it is sent in one piece."""

    id_prefix = "ctc"

    def content(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "custom_tool_call",
            "status": self.status,
            **self._called(),
            "input": "" if self.status == "in_progress" else text_of(self.text),
        }

    def extend(self, text: str, logprobs: Sequence[Any]) -> Iterable[Event]:
        self.text += text
        return ()

    def close(self) -> Iterable[Event]:
        text = text_of(self.text)
        yield self._event("response.custom_tool_call_input.delta", delta=text)
        yield self._event("response.custom_tool_call_input.done", input=text)
        yield self._item_event("response.output_item.done")
