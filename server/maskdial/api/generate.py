"""The causal family's routes: `/generate` and `/generate_stream`."""

import asyncio
import contextlib
import statistics
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from maskdial.api.generate_bodies import GenerateBody, GenerateParameters
from maskdial.api.prompts import Prompt, name_grammar, read_prompts
from maskdial.api.schema import parse_body
from maskdial.api.work import time_limit
from maskdial.causal.events import Finish, TokenEvent
from maskdial.causal.stream import TokenStream
from maskdial.config import Config
from maskdial.errors import DeadlineError, MaskdialError, ValidationError
from maskdial.http.replies import (
    KEEP_ALIVE_SECONDS,
    EventStream,
    Timings,
    body_schema,
    cancel,
    encode,
    error_content,
    json_reply,
    truncation_header,
    unless_gone,
)
from maskdial.models.registry import CausalModel, Models
from maskdial.models.tokenizer import Tokenizer

router = APIRouter(tags=["causal"])

Events = list[TokenEvent]

# A token in a reply takes some 5 us; more than these are written beside the event loop.
_INLINE_TOKENS = 2000


@router.post("/generate", openapi_extra=body_schema(GenerateBody))
async def generate(request: Request) -> Response:
    """Continues a prompt or answers a conversation; with `"stream": true` as server-sent events,
    one per token.
    """
    return await serve_generate(request, await request.body(), None)


@router.post("/generate_stream", openapi_extra=body_schema(GenerateBody))
async def generate_stream(request: Request) -> Response:
    """Continues a prompt or answers a conversation as server-sent events, one per token."""
    return await serve_generate(request, await request.body(), None, stream=True)


async def serve_generate(
    request: Request,
    content: bytes,
    name: str | None,
    *,
    stream: bool = False,
    as_list: bool = False,
) -> Response:
    """Answers a `/generate` body with the named model, or the one that the body means.

    ``as_list`` wraps the reply of one prompt in a list, as text-generation-inference does at its
    root route.
    """
    started_at = asyncio.get_running_loop().time()
    body = parse_body(GenerateBody, content)
    models: Models = request.app.state.models
    config: Config = request.app.state.config
    model = models.for_generation(name or body.model)
    request.state.model = model.bundle.name
    parameters = body.parameters or GenerateParameters()
    stream = stream or bool(body.stream)
    if stream:
        _check_streamable(body, parameters)
    seconds = time_limit(body.timeout, config)
    try:
        async with asyncio.timeout(seconds):
            prompts = await unless_gone(request, read_prompts(body, model, config))
    except TimeoutError as error:
        model.metrics.cancelled["timeout"].inc()
        raise DeadlineError(f"the text was not finished within {seconds:g} seconds") from error
    seconds_left = None
    if seconds is not None:
        seconds_left = seconds - (asyncio.get_running_loop().time() - started_at)
    if stream:
        return await _stream(request, model, prompts[0], parameters, seconds_left)

    outputs = await unless_gone(request, _generate_all(model, prompts, seconds_left))

    def answer() -> Response:
        replies = [
            _reply(prompt, copies, parameters, model.tokenizer)
            for prompt, copies in zip(prompts, outputs, strict=True)
        ]
        single = not body.batch and (isinstance(replies[0], list) or not as_list)
        return json_reply(
            replies[0] if single else replies, headers=_timings(prompts, outputs).headers()
        )

    if _num_described(prompts, parameters, outputs) <= _INLINE_TOKENS:
        return answer()
    return await asyncio.to_thread(answer)


def _num_described(
    prompts: Sequence[Prompt], parameters: GenerateParameters, outputs: Sequence[list[Events]]
) -> int:
    """About how many tokens a reply says something of."""
    copies = [events for copies in outputs for events in copies]
    num_tokens = sum(len(events) for events in copies) * (1 + (parameters.top_n_tokens or 0))
    if parameters.decoder_input_details:
        num_tokens += sum(len(prompt.ids) * len(prompt.sequences) for prompt in prompts)
    return num_tokens


def _check_streamable(body: GenerateBody, parameters: GenerateParameters) -> None:
    if body.batch:
        raise ValidationError("inputs: a stream has one prompt; send a string, not a list")
    if parameters.num_sequences > 1:
        raise ValidationError("parameters.n and best_of: a stream has one text")
    if parameters.decoder_input_details:
        raise ValidationError("parameters.decoder_input_details: not with a stream")


async def _generate_all(
    model: CausalModel, prompts: Sequence[Prompt], seconds_left: float | None
) -> list[list[Events]]:
    """Runs all sequences beside each other; when one fails, all are abandoned."""
    async with contextlib.AsyncExitStack() as stack:
        streams = [
            [
                await stack.enter_async_context(model.engine.stream(sequence, seconds_left))
                for sequence in prompt.sequences
            ]
            for prompt in prompts
        ]
        with name_grammar():
            return [
                [[event async for event in stream] for stream in copies_of_one]
                for copies_of_one in streams
            ]


def _reply(
    prompt: Prompt, copies: list[Events], parameters: GenerateParameters, tokenizer: Tokenizer
) -> object:
    """What one prompt gets: a text, or the list of the ``n`` best."""
    n = parameters.n or 1
    if parameters.num_sequences > n:
        copies = sorted(copies, key=_mean_logprob, reverse=True)
    replies = [_text_reply(prompt, events, parameters, tokenizer) for events in copies]
    if n > 1:
        return replies[:n]
    best, others = replies[0], replies[1:]
    if others and "details" in best:
        best["details"]["best_of_sequences"] = [
            {"generated_text": other["generated_text"], **other["details"]} for other in others
        ]
    return best


def _mean_logprob(events: Events) -> float:
    return statistics.fmean(event.logprob for event in events)


def _text_reply(
    prompt: Prompt, events: Events, parameters: GenerateParameters, tokenizer: Tokenizer
) -> dict[str, Any]:
    finish = _finish(events)
    prefix = prompt.text if parameters.return_full_text else ""
    reply: dict[str, Any] = {"generated_text": prefix + finish.generated_text}
    if parameters.details or parameters.decoder_input_details:
        reply["details"] = _details(finish) | {
            "prefill": _prefill(prompt, finish, tokenizer)
            if parameters.decoder_input_details
            else [],
            "tokens": [_token(event) for event in events],
        }
        if parameters.top_n_tokens:
            reply["details"]["top_tokens"] = [_top_tokens(event, tokenizer) for event in events]
    return reply


async def _stream(
    request: Request,
    model: CausalModel,
    prompt: Prompt,
    parameters: GenerateParameters,
    seconds_left: float | None,
) -> Response:
    """Waits for the first event, which may still be an error with a status, then streams."""
    stream = model.engine.stream(prompt.sequences[0], seconds_left)
    events = _stream_events(request, stream, prompt, parameters, model.tokenizer)
    first = asyncio.create_task(_first(events))
    try:
        await unless_gone(request, _wait(first))
    except BaseException:
        await cancel(first)
        raise
    if first.done():
        first.result()
    request.state.streaming = True
    return EventStream(first, events, truncation_header(prompt.num_truncated))


async def _first(events: AsyncGenerator[bytes]) -> bytes:
    return await anext(events)


async def _wait(task: asyncio.Task[bytes]) -> None:
    """Waits for a task as long as a silent connection may stay silent, without cancelling it."""
    await asyncio.wait({task}, timeout=KEEP_ALIVE_SECONDS)


async def _stream_events(
    request: Request,
    stream: TokenStream,
    prompt: Prompt,
    parameters: GenerateParameters,
    tokenizer: Tokenizer,
) -> AsyncGenerator[bytes]:
    """A stream's events as JSON; once the reply has begun, a failure is an event, too."""
    prefix = prompt.text if parameters.return_full_text else ""
    try:
        async with stream:
            with name_grammar():
                async for event in stream:
                    content = _stream_event(event, prefix)
                    if parameters.top_n_tokens:
                        content["top_tokens"] = _top_tokens(event, tokenizer)
                    yield encode(content)
    except MaskdialError as error:
        if not getattr(request.state, "streaming", False):
            raise
        request.state.outcome = error.error_type
        yield encode(error_content(error))


def _stream_event(event: TokenEvent, prefix: str) -> dict[str, Any]:
    finish = event.finish
    return {
        "index": event.index,
        "token": _token(event),
        "generated_text": None if finish is None else prefix + finish.generated_text,
        "details": None if finish is None else _details(finish),
    }


def _token(event: TokenEvent) -> dict[str, Any]:
    """A token on the wire. Special ones have no text: all texts joined are the generated text."""
    return {
        "id": event.token_id,
        "text": event.text,
        "logprob": event.logprob,
        "special": event.special,
    }


def _top_tokens(event: TokenEvent, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The likeliest tokens, each with its text as it reads alone."""
    return [
        {
            "id": token_id,
            "text": tokenizer.token_text(token_id),
            "logprob": logprob,
            "special": token_id in tokenizer.special_ids,
        }
        for token_id, logprob in event.top
    ]


def _prefill(prompt: Prompt, finish: Finish, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The prompt's tokens; the first has nothing before it that it could be likely after."""
    return [
        {"id": token_id, "text": tokenizer.token_text(token_id), "logprob": logprob}
        for token_id, logprob in zip(prompt.ids, (None, *finish.prompt_logprobs), strict=True)
    ]


def _details(finish: Finish) -> dict[str, Any]:
    return {
        "finish_reason": finish.reason,
        "generated_tokens": finish.generated_tokens,
        "seed": finish.seed,
        "input_length": finish.input_length,
    }


def _finish(events: Events) -> Finish:
    finish = events[-1].finish
    assert finish is not None, "a stream ends with its finish or an error"
    return finish


def _timings(prompts: Sequence[Prompt], outputs: Sequence[list[Events]]) -> Timings:
    """A request's times are those of its slowest sequence; a prompt is computed once."""
    finishes = [_finish(events) for copies in outputs for events in copies]
    return Timings(
        queue_seconds=max(finish.queue_seconds for finish in finishes),
        inference_seconds=max(finish.inference_seconds for finish in finishes),
        compute_tokens=sum(len(prompt.ids) for prompt in prompts)
        + sum(finish.generated_tokens for finish in finishes),
        truncated_tokens=sum(prompt.num_truncated for prompt in prompts),
    )
