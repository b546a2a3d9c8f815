"""`POST /v1/messages` and `/v1/messages/count_tokens`, as Anthropic has them."""

from collections.abc import Sequence
from typing import Any

from fastapi import Response

from maskdial.bundle.texts import tokenizing_seconds
from maskdial.causal.chat.request import ChatRequest, ReplyReader
from maskdial.causal.events import TokenEvent
from maskdial.causal.generate import Completion
from maskdial.causal.model import WritingModel
from maskdial.causal.request import GenerationRequest
from maskdial.dialects.anthropic.blocks import Envelope, EventWriter, whole_message
from maskdial.dialects.anthropic.body import CountBody, MessagesBody
from maskdial.dialects.anthropic.errors import FORM, error_frame
from maskdial.dialects.anthropic.replies import AssistantMessage, TokenCount
from maskdial.dialects.call import Call
from maskdial.dialects.flow import Renderer, write
from maskdial.engine.offload import offload
from maskdial.errors import MaskdialError
from maskdial.http.replies import json_reply
from maskdial.http.sse import event_frame


async def messages(call: Call[MessagesBody]) -> Response:
    """Answers a conversation; with `"stream": true` as server-sent events."""
    body = call.body
    model = await call.writer()
    chat = body.request(model)
    generation = await call.generation(chat, model)
    (prompt,) = generation.prompts
    envelope = Envelope(model.name, prompt, body.max_tokens, body.shows_thinking)
    renderer = MessageRenderer(envelope, ReplyReader(chat, prompt, model))
    return await write(call, generation, renderer, streams=bool(body.stream))


class MessageRenderer(Renderer):
    """Writes a message, or its events.

    Args:
        envelope: of the reply.
        reader: tells the parts of the reply apart.
    """

    seconds_per_token = 1e-5  # to read one

    def __init__(self, envelope: Envelope, reader: ReplyReader) -> None:
        self._envelope = envelope
        self._reader = reader
        self._events = EventWriter(envelope, reader)

    def reply(self, completions: Sequence[Completion]) -> dict[str, Any]:
        ((text,),) = (completion.texts for completion in completions)
        return whole_message(self._envelope, self._reader, text.events)

    async def frames(self, index: int, event: TokenEvent) -> bytes:
        return b"".join(map(event_frame, self._events.events(event)))

    def error_frame(self, error: MaskdialError) -> bytes:
        return error_frame(error)


async def count_tokens(call: Call[CountBody]) -> Response:
    """Counts the tokens of a conversation, with its tools and its system prompt."""
    model = await call.writer()
    async with call.deadline.enforced():
        num_tokens = await _count(call.body.chat(GenerationRequest()), model)
    return json_reply({"input_tokens": num_tokens})


async def _count(chat: ChatRequest, model: WritingModel) -> int:
    conversation = chat.generation_for(model).conversation
    assert conversation is not None, "the prompt of a chat is a conversation"
    prompt = await conversation.render(model)
    encoding = await offload(
        lambda: model.tokenizer.encode(prompt, add_special_tokens=False),
        tokenizing_seconds([prompt]),
    )
    return len(encoding)


ROUTES = (
    FORM.route("/v1/messages", messages, MessagesBody, AssistantMessage, streams=True),
    FORM.route("/v1/messages/count_tokens", count_tokens, CountBody, TokenCount),
)
