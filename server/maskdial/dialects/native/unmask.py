"""`/generate` under the full mask: a masked model writes by unmasking, block by block."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Response

from maskdial.bundle.manifest import Manifest
from maskdial.bundle.tokenizer import IncrementalDecoder
from maskdial.dialects.call import Call
from maskdial.dialects.native.generate_bodies import GenerateBody, GenerateParameters
from maskdial.engine.timing import Timed, Timings
from maskdial.errors import MaskdialError, ValidationError
from maskdial.http.replies import encode_json, error_content, json_reply, timing_headers
from maskdial.http.sse import Frames, data_frame
from maskdial.masked import run
from maskdial.masked.model import MaskedModel
from maskdial.masked.tasks.canvas import FilledToken
from maskdial.masked.tasks.unmask import TextSoFar, UnmaskRequest
from maskdial.masked.tasks.unmasking import Unmasking

_DEFAULT_NEW_TOKENS = 100
_TAKEN = (
    *("max_new_tokens", "do_sample", "temperature", "seed", "return_full_text", "details"),
    *("steps", "block_length", "order", "threshold"),
)


@dataclass(frozen=True, slots=True)
class UnmaskTask:
    """Text by unmasking as something that models can be asked for."""

    name: str = UnmaskRequest.task

    def serves(self, manifest: Manifest) -> bool:
        return UnmaskRequest.serves(manifest)


UNMASK = UnmaskTask()


async def answer(call: Call[GenerateBody], *, stream: bool, as_list: bool) -> Response:
    """Answers a body that asks for the full mask."""
    model = await call.masked(UNMASK)
    writer = _Writer(call, model)
    if stream:
        blocks = writer.blocks()
        first = await anext(blocks)  # what cannot be done is told before the stream begins
        return await call.stream(writer.frames(first, blocks), _error_frame, {})
    timings = Timings(0.0, 0.0, 0)
    async for block in writer.blocks():
        timings += block.timings
    reply = writer.reply(block.content)
    return json_reply([reply] if as_list else reply, headers=timing_headers(timings))


class _Writer:
    """Writes the replies to one body."""

    def __init__(self, call: Call[GenerateBody], model: MaskedModel) -> None:
        self._call = call
        self._model = model
        self._parameters = call.body.parameters or GenerateParameters()
        self._decoder: IncrementalDecoder | None = None
        self._text = call.body.prompt if self._parameters.return_full_text else ""
        self._num_written = 0

    async def blocks(self) -> AsyncIterator[Timed[TextSoFar]]:
        """The text after each of its blocks."""
        request = _request(self._call.body, self._model)
        block = await self._call.answer(request, self._model)
        yield block
        while block.content.rest is not None:
            block = await run.proceed(block.content.rest, self._model, self._call.deadline)
            yield block

    async def frames(
        self, first: Timed[TextSoFar], others: AsyncIterator[Timed[TextSoFar]]
    ) -> Frames:
        """The events of a stream, one per token, a block at a time."""
        for event in self._events(first.content):
            yield event
        async for block in others:
            for event in self._events(block.content):
                yield event

    def _events(self, text: TextSoFar) -> Sequence[bytes]:
        new = text.tokens[self._num_written :]
        events = []
        for index, token in enumerate(new, start=self._num_written + 1):
            described = self._token(token, text)
            ends = text.rest is None and index == len(text.tokens)
            if ends:
                self._finish()
            content = {
                "index": index,
                "token": described,
                "generated_text": self._text if ends else None,
                "details": _details(text) if ends else None,
            }
            events.append(data_frame(encode_json(content)))
        self._num_written = len(text.tokens)
        return events

    def reply(self, text: TextSoFar) -> dict[str, Any]:
        """The whole reply."""
        tokens = [self._token(token, text) for token in text.tokens]
        self._finish()
        reply: dict[str, Any] = {"generated_text": self._text}
        if self._parameters.details:
            reply["details"] = _details(text) | {"prefill": [], "tokens": tokens}
        return reply

    def _finish(self) -> None:
        self._text += "" if self._decoder is None else self._decoder.flush()

    def _token(self, token: FilledToken, text: TextSoFar) -> dict[str, Any]:
        if self._decoder is None:
            self._decoder = self._model.tokenizer.decoder(text.prompt_ids)
        new = self._decoder.push(token.token)
        self._text += new
        return {
            "id": token.token,
            "text": new,
            "logprob": token.logprob,
            "special": token.token in self._model.tokenizer.special_ids,
            "step": token.step,
        }


def _request(body: GenerateBody, model: MaskedModel) -> UnmaskRequest:
    parameters = body.parameters or GenerateParameters()
    if body.messages is not None:
        raise ValidationError(
            "under the full mask, a text is written behind inputs", field="messages"
        )
    if body.batch:
        raise ValidationError(
            "under the full mask, a request has one prompt; send a string, not a list",
            field="prompt",
        )
    for name in parameters.given(*type(parameters).model_fields):
        if name not in _TAKEN:
            raise ValidationError(
                f"is for the causal mask; model {model.name!r} writes by unmasking", field=name
            )
    samples = parameters.do_sample is not False
    return UnmaskRequest(
        body.prompt,
        parameters.max_new_tokens or _DEFAULT_NEW_TOKENS,
        unmasking=Unmasking(
            parameters.order or "confidence",
            parameters.threshold,
            (parameters.temperature or 0.0) if samples else 0.0,
        ),
        **parameters.given("block_length", "steps", "seed"),
    )


def _details(text: TextSoFar) -> dict[str, Any]:
    return {
        "finish_reason": "eos_token" if text.ended else "length",
        "generated_tokens": len(text.tokens),
        "seed": text.seed,
        "input_length": len(text.prompt_ids),
    }


def _error_frame(error: MaskdialError) -> bytes:
    return data_frame(encode_json(error_content(error)))
