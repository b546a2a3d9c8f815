"""Replies of Cohere's chat: a message, whole or as the events of a stream."""

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from maskdial.bundle.tokenizer import TokenSpeller
from maskdial.causal.chat.message import ToolCall
from maskdial.causal.chat.request import ReplyFinish, ReplyReader
from maskdial.causal.events import TokenEvent, Verdict
from maskdial.causal.generate import Completion
from maskdial.causal.prompts import Prompt
from maskdial.causal.tools import ContentDelta, ReasoningDelta, ReplyDelta, ToolCallDelta
from maskdial.dialects.cohere.errors import error_frame
from maskdial.dialects.flow import Renderer
from maskdial.errors import MaskdialError
from maskdial.http.sse import data_frame, event_frame

FinishReason = Literal["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "TOOL_CALL", "ERROR"]
_REASONS: dict[ReplyFinish, FinishReason] = {
    "eos_token": "COMPLETE",
    "stop_sequence": "STOP_SEQUENCE",
    "length": "MAX_TOKENS",
    "tool_calls": "TOOL_CALL",
    "content_filter": "ERROR",  # it has no other
}


_Part = tuple[Literal["content", "tool-call"], str, int]
"""A part of a message: what its events are called, its type, and its index."""


class CohereContent(TypedDict):
    """A text, or what the model thought."""

    type: Literal["text", "thinking"]
    text: NotRequired[str]
    thinking: NotRequired[str]


class CohereFunction(TypedDict):
    """A called function; the arguments are the text of a JSON object."""

    name: str
    arguments: str


class CohereToolCall(TypedDict):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CohereFunction


class CohereReplyMessage(TypedDict):
    """The assistant's message."""

    role: Literal["assistant"]
    content: NotRequired[list[CohereContent]]
    tool_plan: NotRequired[str]
    tool_calls: NotRequired[list[CohereToolCall]]


class CohereTokens(TypedDict):
    """Tokens that the model read, and those that it wrote."""

    input_tokens: int
    output_tokens: int


class CohereUsage(TypedDict):
    """Tokens that a request is charged for, and those that the model read and wrote."""

    billed_units: CohereTokens
    tokens: CohereTokens
    cached_tokens: int


class CohereLogprob(TypedDict):
    """A piece of text, with its tokens and their log-probabilities."""

    text: str
    token_ids: list[int]
    logprobs: list[float]


class CohereChatReply(TypedDict):
    """The reply of `/v2/chat`: the assistant's message, why it ended, its usage."""

    id: str
    finish_reason: FinishReason
    message: CohereReplyMessage
    usage: CohereUsage
    logprobs: NotRequired[list[CohereLogprob]]
    policy: NotRequired[list[Verdict]]


class ReplyRenderer(Renderer):
    """Writes a message, whole or as events: parts that start, grow and end, one after the other.

    Args:
        prompt: of the text.
        reader: tells the parts of the reply apart.
        speller: of tokens that are to be described; None: they are not.
        must_call: whether every text comes before a call, so that it is a plan.
    """

    seconds_per_token = 1e-5  # to read one

    def __init__(
        self, prompt: Prompt, reader: ReplyReader, speller: TokenSpeller | None, *, must_call: bool
    ) -> None:
        self._prompt = prompt
        self._reader = reader
        self._speller = speller
        self._must_call = must_call
        self._open: _Part | None = None
        self._num_contents = 0
        self._untold: list[CohereLogprob] = []
        """The tokens since the last event that described any."""

    def reply(self, completions: Sequence[Completion]) -> CohereChatReply:
        ((text,),) = (completion.texts for completion in completions)
        for event in text.events:
            self._reader.push(event)
        reply = self._reader.reply
        message: CohereReplyMessage = {"role": "assistant"}
        content: list[CohereContent] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning})
        if not reply.tool_calls:
            content.append({"type": "text", "text": reply.content})
        if content:
            message["content"] = content
        if reply.tool_calls:
            message["tool_calls"] = [_call(call) for call in reply.tool_calls]
            if reply.content:
                message["tool_plan"] = reply.content
        whole: CohereChatReply = {
            "id": str(uuid.uuid4()),
            "finish_reason": _REASONS[reply.finish_reason],
            "message": message,
            "usage": _usage(self._prompt, len(text.events)),
            **text.finish.policy,  # type: ignore[typeddict-item]
        }
        if self._speller is not None:
            whole["logprobs"] = [_logprob(self._speller, event) for event in text.events]
        return whole

    async def frames(self, index: int, event: TokenEvent) -> bytes:
        return b"".join(map(event_frame, self._events(event)))

    def end(self) -> bytes:
        return data_frame(b"[DONE]")

    def error_frame(self, error: MaskdialError) -> bytes:
        return error_frame(error)

    def _events(self, event: TokenEvent) -> Iterator[dict[str, Any]]:
        """The events for one token; the first token opens the message, the last one ends it."""
        if event.index == 1:
            message = {
                "role": "assistant",
                "content": [],
                "tool_plan": "",
                "tool_calls": [],
                "citations": [],
            }
            yield {
                "id": str(uuid.uuid4()),
                "type": "message-start",
                "delta": {"message": message},
            }
        if self._speller is not None:
            self._untold.append(_logprob(self._speller, event))
        for delta in self._reader.push(event):
            yield from self._grow(delta)
        reason = self._reader.finish_reason
        if reason is None or event.finish is None:
            return
        yield from self._close()
        usage = _usage(self._prompt, event.finish.generated_tokens)
        delta_of_end = {"finish_reason": _REASONS[reason], "usage": usage} | event.finish.policy
        yield {"type": "message-end", "delta": delta_of_end}

    def _grow(self, delta: ReplyDelta) -> Iterator[dict[str, Any]]:
        match delta:
            case ContentDelta(text) if self._must_call:
                yield from self._close()
                yield _event("tool-plan-delta", {"tool_plan": text})
            case ContentDelta(text):
                yield from self._grow_content("text", text)
            case ReasoningDelta(text):
                yield from self._grow_content("thinking", text)
            case ToolCallDelta():
                yield from self._grow_call(delta)

    def _grow_content(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        part: _Part = ("content", kind, self._num_contents - 1)
        if self._open != part:
            yield from self._close()
            self._num_contents += 1
            part = self._open = ("content", kind, self._num_contents - 1)
            yield _event("content-start", {"content": {"type": kind, kind: ""}}, part[2])
        event = _event("content-delta", {"content": {kind: text}}, part[2])
        if self._untold:
            event["logprobs"] = {
                "text": text,
                "token_ids": [each for token in self._untold for each in token["token_ids"]],
                "logprobs": [each for token in self._untold for each in token["logprobs"]],
            }
            self._untold = []
        yield event

    def _grow_call(self, delta: ToolCallDelta) -> Iterator[dict[str, Any]]:
        part: _Part = ("tool-call", "function", delta.index)
        if self._open != part:
            yield from self._close()
            self._open = part
            call = _call(ToolCall(delta.call_id or "", delta.name or "", ""))
            yield _event("tool-call-start", {"tool_calls": call}, delta.index)
        if delta.arguments:
            more = {"function": {"arguments": delta.arguments}}
            yield _event("tool-call-delta", {"tool_calls": more}, delta.index)

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            events, _, index = self._open
            yield {"type": f"{events}-end", "index": index}
        self._open = None


def _event(kind: str, message: dict[str, Any], index: int | None = None) -> dict[str, Any]:
    """What an event adds to the message."""
    place = {} if index is None else {"index": index}
    return {"type": kind, **place, "delta": {"message": message}}


def _call(call: ToolCall) -> CohereToolCall:
    function: CohereFunction = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def _logprob(speller: TokenSpeller, event: TokenEvent) -> CohereLogprob:
    text = speller.text(event.token_id)
    speller.advance(event.token_id)
    return {"text": text, "token_ids": [event.token_id], "logprobs": [event.logprob]}


def _usage(prompt: Prompt, num_generated: int) -> CohereUsage:
    tokens: CohereTokens = {"input_tokens": len(prompt.ids), "output_tokens": num_generated}
    return {"billed_units": tokens, "tokens": tokens, "cached_tokens": prompt.num_cached}
