"""Replies of Anthropic's API: blocks of a message, whole or as the events of a stream."""

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from pydantic_core import from_json

from maskdial.causal.chat.request import ReplyReader
from maskdial.causal.events import Finish, TokenEvent
from maskdial.causal.prompts import Prompt
from maskdial.causal.tools import ContentDelta, ReasoningDelta, ReplyDelta, ToolCallDelta

_Kind = tuple[Literal["text", "thinking", "tool_use"], int]
"""The type of a block, and which call of the reply it is."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What the parts of a reply have in common.

    ``max_tokens`` is the limit that the client set. Without ``shows_thinking``, blocks of thinking
    are empty.
    """

    model_name: str
    prompt: Prompt
    max_tokens: int
    shows_thinking: bool


def whole_message(
    envelope: Envelope, reader: ReplyReader, events: Iterable[TokenEvent]
) -> dict[str, Any]:
    """A finished reply as a message: the blocks that a stream of it would have."""
    content = []
    finish = None
    deltas: list[ReplyDelta] = []
    for event in events:
        deltas += reader.push(event)
        finish = event.finish
    assert finish is not None, "the last event of a text has its finish"
    for kind, group in groupby(deltas, _kind):
        parts = list(group)
        block = _block(parts[0])
        text = "".join(map(_text, parts))
        if kind[0] == "tool_use":
            # A call cut off by max_tokens keeps the input that was complete, as in the SDK.
            block["input"] = from_json(text or "{}", allow_partial=True)
        elif kind[0] == "text" or envelope.shows_thinking:
            block[kind[0]] = text
        content.append(block)
    return {
        **_message(envelope.model_name, content),
        **_ending(reader, finish, envelope.max_tokens),
        "usage": _usage(envelope.prompt, finish.generated_tokens, reader.num_reasoning),
        **finish.policy,
    }


class EventWriter:
    """Writes the events of a stream: blocks that open, grow and close, one after the other.

    Args:
        envelope: of the reply.
        reader: tells the parts of the reply apart.
    """

    def __init__(self, envelope: Envelope, reader: ReplyReader) -> None:
        self._envelope = envelope
        self._reader = reader
        self._num_blocks = 0
        self._open: _Kind | None = None

    def events(self, event: TokenEvent) -> Iterator[dict[str, Any]]:
        """The events for one token; the first token opens the message, the last one ends it."""
        if event.index == 1:
            usage = _usage(self._envelope.prompt, 0, 0)
            message = {**_message(self._envelope.model_name, []), "usage": usage}
            yield {"type": "message_start", "message": message}
            yield {"type": "ping"}
        for delta in self._reader.push(event):
            yield from self._grow(delta)
        finish = event.finish
        if finish is None:
            return
        yield from self._close()
        num_generated, num_reasoning = finish.generated_tokens, self._reader.num_reasoning
        yield {
            "type": "message_delta",
            "delta": _ending(self._reader, finish, self._envelope.max_tokens),
            "usage": _usage(self._envelope.prompt, num_generated, num_reasoning),
            **finish.policy,
        }
        yield {"type": "message_stop"}

    def _grow(self, delta: ReplyDelta) -> Iterator[dict[str, Any]]:
        kind, text = _kind(delta), _text(delta)
        if kind != self._open:
            yield from self._close()
            self._open = kind
            block = _block(delta)
            yield {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        if kind[0] == "text":
            yield self._delta({"type": "text_delta", "text": text})
        elif kind[0] == "tool_use":
            yield self._delta({"type": "input_json_delta", "partial_json": text})
        elif self._envelope.shows_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is None:
            return
        if self._open[0] == "thinking":
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": self._num_blocks}
        self._num_blocks += 1
        self._open = None

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}


def _message(model_name: str, content: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model_name,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
    }


def _kind(delta: ReplyDelta) -> _Kind:
    match delta:
        case ContentDelta():
            return "text", 0
        case ReasoningDelta():
            return "thinking", 0
        case ToolCallDelta(index):
            return "tool_use", index


def _text(delta: ReplyDelta) -> str:
    return delta.arguments if isinstance(delta, ToolCallDelta) else delta.text


def _block(delta: ReplyDelta) -> dict[str, Any]:
    """The block that begins with a delta, still empty."""
    match delta:
        case ContentDelta():
            return {"type": "text", "text": "", "citations": None}
        case ReasoningDelta():
            # Nothing is signed; thinking blocks that come back are accepted unchanged.
            return {"type": "thinking", "thinking": "", "signature": ""}
        case ToolCallDelta(call_id=call_id, name=name):
            return {
                "type": "tool_use",
                "id": call_id,
                "name": name,
                "input": {},
                "caller": {"type": "direct"},
            }


def _ending(reader: ReplyReader, finish: Finish, max_tokens: int) -> dict[str, Any]:
    """Why a reply ended, and which stop sequence it was."""
    if reader.finish_reason == "tool_calls":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if finish.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop}
    reason = "refusal" if finish.reason == "content_filter" else "end_turn"
    if finish.reason == "length":
        is_limit = finish.generated_tokens >= max_tokens
        reason = "max_tokens" if is_limit else "model_context_window_exceeded"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(prompt: Prompt, num_generated: int, num_reasoning: int) -> dict[str, Any]:
    """Token counts; those from the prefix cache are counted apart from the other input."""
    return {
        "input_tokens": len(prompt.ids) - prompt.num_cached,
        "cache_creation": {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0},
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": prompt.num_cached,
        "output_tokens": num_generated,
        "output_tokens_details": {"thinking_tokens": num_reasoning},
        "inference_geo": None,
        "server_tool_use": None,
        "service_tier": "standard",
    }
