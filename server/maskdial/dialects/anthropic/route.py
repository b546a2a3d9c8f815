"""`POST /v1/messages` and `/v1/messages/count_tokens`, as Anthropic has them."""

from fastapi import Response

from maskdial.bundle.texts import tokenizing_seconds
from maskdial.causal.chat.request import ChatRequest, ReplyReader
from maskdial.causal.generate import Generation, timings
from maskdial.causal.model import CausalModel
from maskdial.causal.request import GenerationRequest
from maskdial.dialects.anthropic.blocks import Envelope, EventWriter, whole_message
from maskdial.dialects.anthropic.body import CountBody, MessagesBody
from maskdial.dialects.anthropic.errors import (
    anthropic_route,
    error_frame,
    event_frame,
)
from maskdial.dialects.anthropic.replies import AssistantMessage, TokenCount
from maskdial.dialects.call import Call
from maskdial.dialects.native.generate import GENERATE
from maskdial.engine.offload import offload
from maskdial.http.replies import json_reply, timing_headers, warnings_header
from maskdial.http.sse import Frames


async def messages(call: Call[MessagesBody]) -> Response:
    """Answers a conversation; with `"stream": true` as server-sent events."""
    body = call.body
    model = await call.causal(GENERATE)
    chat = body.request(model)
    generation = await call.generation(chat.generation_for(model), model)
    (prompt,) = generation.prompts
    envelope = Envelope(model.name, prompt, body.max_tokens, body.shows_thinking)
    reader = ReplyReader(chat, prompt, model)
    warnings = warnings_header(generation.warnings)
    if body.stream:
        frames = _frames(generation, EventWriter(envelope, reader))
        return await call.stream(frames, error_frame, warnings)
    (completion,) = completions = await generation.complete()
    (text,) = completion.texts
    message = whole_message(envelope, reader, text.events)
    return json_reply(message, headers=timing_headers(timings(completions)) | warnings)


async def _frames(generation: Generation, writer: EventWriter) -> Frames:
    async with generation.stream() as stream:
        async for _, event in stream:
            frames = b"".join(map(event_frame, writer.events(event)))
            if frames:
                yield frames


async def count_tokens(call: Call[CountBody]) -> Response:
    """Counts the tokens of a conversation, with its tools and its system prompt."""
    model = await call.causal(GENERATE)
    async with call.deadline.enforced():
        num_tokens = await _count(call.body.chat(GenerationRequest()), model)
    return json_reply({"input_tokens": num_tokens})


async def _count(chat: ChatRequest, model: CausalModel) -> int:
    conversation = chat.generation_for(model).conversation
    assert conversation is not None, "the prompt of a chat is a conversation"
    prompt = await conversation.render(model)
    encoding = await offload(
        lambda: model.tokenizer.encode(prompt, add_special_tokens=False),
        tokenizing_seconds([prompt]),
    )
    return len(encoding)


ROUTES = (
    anthropic_route("/v1/messages", messages, MessagesBody, AssistantMessage, streams=True),
    anthropic_route("/v1/messages/count_tokens", count_tokens, CountBody, TokenCount),
)
