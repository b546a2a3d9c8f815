"""`POST /v1/messages` and `/v1/messages/count_tokens`, as Anthropic has them."""

from fastapi import Request, Response

from maskdial.bundle.texts import tokenizing_seconds
from maskdial.causal.chat.request import ChatRequest, ReplyReader
from maskdial.causal.generate import Generation, timings
from maskdial.causal.model import CausalModel
from maskdial.causal.request import GenerationRequest
from maskdial.dialects.anthropic.blocks import Envelope, EventWriter, whole_message
from maskdial.dialects.anthropic.body import CountBody, MessagesBody
from maskdial.dialects.anthropic.errors import (
    about_fields,
    anthropic_route,
    error_frame,
    event_frame,
)
from maskdial.dialects.anthropic.replies import AssistantMessage, TokenCount
from maskdial.dialects.body import read_body
from maskdial.dialects.call import causal_for
from maskdial.dialects.native.generate import GENERATE
from maskdial.engine.offload import offload
from maskdial.engine.timing import Deadline
from maskdial.http.context import server_context
from maskdial.http.disconnect import unless_gone
from maskdial.http.replies import json_reply, timing_headers, warnings_header
from maskdial.http.sse import Frames, stream_reply


async def messages(request: Request) -> Response:
    """Answers a conversation; with `"stream": true` as server-sent events."""
    server = server_context(request)
    body = await read_body(MessagesBody, await request.body())
    deadline = Deadline(body.timeout, server.config)
    model = await causal_for(request, GENERATE, body.choice(), deadline)
    chat = body.request(model)
    with about_fields(body.names()):
        generation = await unless_gone(
            request,
            Generation.prepare(chat.generation_for(model), model, server.config, deadline),
        )
        (prompt,) = generation.prompts
        envelope = Envelope(model.name, prompt, body.max_tokens, body.shows_thinking)
        if not body.stream:
            (completion,) = completions = await unless_gone(request, generation.complete())
    reader = ReplyReader(chat, prompt, model)
    warnings = warnings_header(generation.warnings)
    if body.stream:
        frames = _frames(generation, body, EventWriter(envelope, reader))
        return await stream_reply(request, frames, error_frame, warnings)
    (text,) = completion.texts
    message = whole_message(envelope, reader, text.events)
    return json_reply(message, headers=timing_headers(timings(completions)) | warnings)


async def _frames(generation: Generation, body: MessagesBody, writer: EventWriter) -> Frames:
    with about_fields(body.names()):
        async with generation.stream() as stream:
            async for _, event in stream:
                frames = b"".join(map(event_frame, writer.events(event)))
                if frames:
                    yield frames


async def count_tokens(request: Request) -> Response:
    """Counts the tokens of a conversation, with its tools and its system prompt."""
    server = server_context(request)
    body = await read_body(CountBody, await request.body())
    deadline = Deadline(body.timeout, server.config)
    model = await causal_for(request, GENERATE, body.choice(), deadline)
    with about_fields(body.names()):
        async with deadline.enforced():
            chat = body.chat(GenerationRequest())
            num_tokens = await _count(chat, model)
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
