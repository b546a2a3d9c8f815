"""`/generate` where a text is written by unmasking, block by block, or in canvases."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Response

from maskdial.dialects.call import Call
from maskdial.dialects.diffusion import (
    UnmaskingFields,
    UnmaskingModel,
    Written,
    parts,
    refuse_others,
)
from maskdial.dialects.flow import error_frame
from maskdial.dialects.native.generate_bodies import GenerateBody, GenerateParameters
from maskdial.engine.timing import Timed, Timings
from maskdial.errors import ValidationError
from maskdial.http.replies import encode_json, json_reply, timing_headers
from maskdial.http.sse import Frames, data_frame
from maskdial.unmasking.canvas import FilledToken
from maskdial.unmasking.text import TextPlan, TextPrompt, TextSoFar
from maskdial.unmasking.unmasker import Unmasking

_DEFAULT_NEW_TOKENS = 100
_TAKEN = (
    *("max_new_tokens", "do_sample", "temperature", "seed", "return_full_text", "details"),
    *UnmaskingFields.model_fields,
)


async def answer(
    call: Call[GenerateBody], model: UnmaskingModel, *, stream: bool, as_list: bool
) -> Response:
    """Answers a body that asks a model for a text that is not written token by token."""
    parameters = call.body.parameters or GenerateParameters()
    parameters.check_shown(stream=stream)
    plan = _plan(call.body, model)
    writer = _Writer(call.body, model)
    texts = parts(call, model, TextPrompt(call.body.prompt), plan)
    if stream:
        first = await anext(texts)  # what cannot be done is told before the stream begins
        return await call.stream(writer.frames(first, texts), error_frame, {})
    timings = Timings(0.0, 0.0, 0)
    async for part in texts:
        timings += part.timings
    reply = writer.reply(part.content)
    return json_reply([reply] if as_list else reply, headers=timing_headers(timings))


class _Writer:
    """Writes the replies to one body."""

    def __init__(self, body: GenerateBody, model: UnmaskingModel) -> None:
        self._parameters = body.parameters or GenerateParameters()
        self._before = body.prompt if self._parameters.return_full_text else ""
        self._written = Written(model)

    async def frames(
        self, first: Timed[TextSoFar], others: AsyncIterator[Timed[TextSoFar]]
    ) -> Frames:
        """The events of a stream, one per token, a block at a time; before them, if that is wanted,
        one for each pass.
        """
        for event in self._events(first.content):
            yield event
        async for part in others:
            for event in self._events(part.content):
                yield event

    def _events(self, text: TextSoFar) -> Sequence[bytes]:
        events: list[dict[str, Any]] = []
        if self._parameters.stream_unmasking:
            events.append({"unmasked": self._written.changes(text)})
        for token, new in self._written.push(text):
            ends = text.finished and self._written.num_tokens == len(text.tokens)
            event = {
                "index": self._written.num_tokens,
                "token": self._token(token, new),
                "generated_text": self._finished() if ends else None,
                "details": _details(text) if ends else None,
            }
            events.append(event)
        return [data_frame(encode_json(event)) for event in events]

    def reply(self, text: TextSoFar) -> dict[str, Any]:
        """The whole reply."""
        tokens = [self._token(token, new) for token, new in self._written.push(text)]
        reply: dict[str, Any] = {"generated_text": self._finished()}
        if self._parameters.details:
            reply["details"] = _details(text) | {"prefill": [], "tokens": tokens}
        return reply

    def _finished(self) -> str:
        self._written.finish()
        return self._before + self._written.text

    def _token(self, token: FilledToken, new: str) -> dict[str, Any]:
        return self._written.describe(token) | {"text": new}


def _plan(body: GenerateBody, model: UnmaskingModel) -> TextPlan:
    parameters = body.parameters or GenerateParameters()
    if body.messages is not None:
        raise ValidationError("a text is unmasked behind inputs; send them", field="messages")
    if body.batch:
        raise ValidationError(
            "a text is unmasked behind one prompt; send a string, not a list",
            field="prompt",
        )
    refuse_others(parameters, _TAKEN, model)
    samples = parameters.do_sample is not False
    return TextPlan(
        parameters.max_new_tokens or _DEFAULT_NEW_TOKENS,
        unmasking=Unmasking(
            parameters.order or "confidence",
            parameters.threshold,
            (parameters.temperature or 0.0) if samples else 0.0,
        ),
        each_pass=bool(parameters.stream_unmasking),
        **parameters.given("block_length", "steps", "seed"),
    )


def _details(text: TextSoFar) -> dict[str, Any]:
    return {
        "finish_reason": "eos_token" if text.ended else "length",
        "generated_tokens": len(text.tokens),
        "seed": text.seed,
        "input_length": len(text.prompt_ids),
    }
