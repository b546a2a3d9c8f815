"""`/v1/completions` and `/v1/chat/completions` where a text is unmasked or written in canvases."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Response

from maskdial.causal.sampling.params import DEFAULTS
from maskdial.dialects.call import Call
from maskdial.dialects.diffusion import (
    UnmaskingFields,
    UnmaskingModel,
    Written,
    parts,
    refuse_others,
)
from maskdial.dialects.openai.errors import error_frame
from maskdial.dialects.openai.generation import DONE, reply_header
from maskdial.dialects.openai.sampling import GenerationBody
from maskdial.engine.timing import Timed, Timings
from maskdial.http.replies import encode_json, json_reply, timing_headers
from maskdial.http.sse import Frames, data_frame
from maskdial.unmasking.text import TextPlan, TextPrompt, TextSoFar
from maskdial.unmasking.unmasker import Unmasking

_TAKEN = (
    *("model", "mask", "timeout", "prompt", "messages", "chat_template_kwargs"),
    *("max_tokens", "max_completion_tokens", "temperature", "seed", "stream", "stream_options"),
    *UnmaskingFields.model_fields,
)
_NOTHING: dict[str, object] = {**DEFAULTS, "n": 1, "add_generation_prompt": True}
"""By field, what asks for nothing; false does so in any."""

BodyT = TypeVar("BodyT", bound=GenerationBody)


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """What the replies of one route are like."""

    id_prefix: str
    object: str
    chunk_object: str
    chat: bool

    def whole(self, text: str) -> dict[str, Any]:
        """A finished text as a choice has it."""
        if self.chat:
            known: dict[str, Any] = {"refusal": None, "annotations": []}
            return {"message": {"role": "assistant", "content": text} | known}
        return {"text": text}

    def part(self, text: str, *, first: bool) -> dict[str, Any]:
        """A part of a text as a chunk's choice has it."""
        if not self.chat:
            return {"text": text}
        delta = {"content": text} if text else {}
        return {"delta": {"role": "assistant", **delta} if first else delta}


COMPLETION = ReplyForm("cmpl", "text_completion", "text_completion", chat=False)
CHAT = ReplyForm("chatcmpl", "chat.completion", "chat.completion.chunk", chat=True)


def plan(body: GenerationBody, num_tokens: int, model: UnmaskingModel) -> TextPlan:
    """How a text is written, by the body.

    Raises:
        ValidationError: it asks for what only causal models do.
    """
    body.check_shown(stream=bool(body.stream))
    given = body.given(*type(body).model_fields)
    idle = (name for name in given if given[name] is False or given[name] == _NOTHING.get(name))
    refuse_others(body, _TAKEN, model, frozenset(idle))
    return TextPlan(
        num_tokens,
        unmasking=Unmasking(body.order or "confidence", body.threshold, body.temperature or 0.0),
        each_pass=bool(body.stream_unmasking),
        **body.given("block_length", "steps", "seed"),
    )


async def answer(
    call: Call[BodyT],
    form: ReplyForm,
    prompt: TextPrompt,
    num_tokens: int,
    model: UnmaskingModel,
) -> Response:
    """Answers a body as one reply, or as a stream whose chunks have a finished block each."""
    texts = parts(call, model, prompt, plan(call.body, num_tokens, model))
    if call.body.stream:
        first = await anext(texts)  # what cannot be done is told before the stream begins
        return await call.stream(_frames(call.body, form, model, first, texts), error_frame, {})
    timings = Timings(0.0, 0.0, 0)
    async for part in texts:
        timings += part.timings
    written = Written(model)
    for _ in written.push(part.content):
        pass
    written.finish()
    reply = reply_header(form.id_prefix, form.object, model.name)
    choice = form.whole(written.text) | {"logprobs": None, "finish_reason": _reason(part.content)}
    reply["choices"] = [{"index": 0} | choice]
    reply["usage"] = _usage(part.content)
    return json_reply(reply, headers=timing_headers(timings))


async def _frames(
    body: GenerationBody,
    form: ReplyForm,
    model: UnmaskingModel,
    first: Timed[TextSoFar],
    others: AsyncIterator[Timed[TextSoFar]],
) -> Frames:
    header = reply_header(form.id_prefix, form.chunk_object, model.name)
    written = Written(model)
    text = first.content

    def chunk() -> bytes:
        unmasked = {"unmasked": written.changes(text)} if body.stream_unmasking else {}
        new = "".join(piece for _, piece in written.push(text))
        if text.finished:
            new += written.finish()
        choice = form.part(new, first=text is first.content)
        reason = _reason(text) if text.finished else None
        content = header | {
            "choices": [
                {"index": 0} | choice | {"logprobs": None, "finish_reason": reason} | unmasked
            ]
        }
        if body.continuous_usage:
            content["usage"] = _usage(text)
        elif body.includes_usage:
            content["usage"] = None
        return data_frame(encode_json(content))

    yield chunk()
    async for part in others:
        text = part.content
        yield chunk()
    if body.includes_usage:
        yield data_frame(encode_json(header | {"choices": [], "usage": _usage(text)}))
    yield DONE


def _reason(text: TextSoFar) -> str:
    return "stop" if text.ended else "length"


def _usage(text: TextSoFar) -> dict[str, Any]:
    num_prompt, num_written = len(text.prompt_ids), len(text.tokens)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_written,
        "total_tokens": num_prompt + num_written,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
