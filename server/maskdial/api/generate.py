"""The causal family's routes: `/generate` and `/generate_stream`."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json

from maskdial.api.bodies import GenerateBody, GenerateParameters, parse_body
from maskdial.api.wire import (
    KEEP_ALIVE_SECONDS,
    EventStream,
    Timings,
    body_schema,
    error_content,
    json_reply,
    unless_gone,
)
from maskdial.api.work import check_num_inputs, name_input, tokenize
from maskdial.causal.params import SamplingParams
from maskdial.causal.sequence import Finish, TokenEvent
from maskdial.causal.sequence import Sequence as GeneratedSequence
from maskdial.causal.stream import TokenStream
from maskdial.config import Config
from maskdial.errors import MaskdialError, ValidationError
from maskdial.served import CausalModel, Models

router = APIRouter(tags=["causal"])

_DEFAULT_NEW_TOKENS = 100


@router.post("/generate", openapi_extra=body_schema(GenerateBody))
async def generate(request: Request) -> Response:
    """Continues a prompt; with `"stream": true` as server-sent events, one per token."""
    return await serve_generate(request, await request.body(), None)


@router.post("/generate_stream", openapi_extra=body_schema(GenerateBody))
async def generate_stream(request: Request) -> Response:
    """Continues a prompt as server-sent events, one per token."""
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
    body = parse_body(GenerateBody, content)
    models: Models = request.app.state.models
    config: Config = request.app.state.config
    model = models.for_generation(name or body.model)
    request.state.model = model.bundle.name
    parameters = body.parameters or GenerateParameters()
    params = _sampling_params(parameters, model)
    batch = isinstance(body.inputs, list)
    prompts = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    stream = stream or bool(body.stream)
    if stream and batch:
        raise ValidationError("inputs: a stream has one prompt; send a string, not a list")
    check_num_inputs(len(prompts), config)
    model.engine.check_room(len(prompts))
    sequences = await _make_sequences(prompts, params, model, batch)
    if stream:
        prefix = prompts[0] if parameters.return_full_text else ""
        return await _stream(request, model, sequences[0], prefix)

    outputs = await unless_gone(request, _generate_all(model, sequences))
    replies = []
    for prompt, events in zip(prompts, outputs, strict=True):
        finish = _finish(events)
        text = (prompt if parameters.return_full_text else "") + finish.generated_text
        reply: dict[str, Any] = {"generated_text": text}
        if parameters.details:
            reply["details"] = _details(finish) | {
                "prefill": [],
                "tokens": [_token(event) for event in events],
            }
        replies.append(reply)
    return json_reply(
        replies if batch or as_list else replies[0],
        headers=_timings([_finish(events) for events in outputs]).headers(),
    )


def _sampling_params(parameters: GenerateParameters, model: CausalModel) -> SamplingParams:
    """The engine's parameters; sampling is on when a parameter of sampling is given."""
    max_new_tokens = parameters.max_new_tokens or min(_DEFAULT_NEW_TOKENS, model.max_length)
    if max_new_tokens > model.max_length:
        raise ValidationError(
            f"parameters.max_new_tokens: must be between 1 and {model.max_length} (the context of "
            f"model {model.bundle.name!r}), not {max_new_tokens}"
        )
    given = (parameters.temperature, parameters.top_k, parameters.top_p)
    do_sample = parameters.do_sample
    if do_sample is None:
        do_sample = any(value is not None for value in given)
    stop = tuple(text for text in parameters.stop or () if text)
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        do_sample=do_sample,
        temperature=1.0 if parameters.temperature is None else parameters.temperature,
        top_k=parameters.top_k or 0,
        top_p=1.0 if parameters.top_p is None else parameters.top_p,
        repetition_penalty=parameters.repetition_penalty or 1.0,
        seed=parameters.seed,
        stop=stop,
    )


async def _make_sequences(
    prompts: Sequence[str], params: SamplingParams, model: CausalModel, batch: bool
) -> list[GeneratedSequence]:
    encodings = await tokenize(
        model.tokenizer, model.metrics, [(prompt, None) for prompt in prompts]
    )
    sequences = []
    for index, encoding in enumerate(encodings):
        with name_input(index, batch):
            if len(encoding.ids) >= model.max_length:
                raise ValidationError(
                    f"the prompt has {len(encoding.ids)} tokens; model {model.bundle.name!r} has a "
                    f"context of {model.max_length}, so a prompt has at most {model.max_length - 1}"
                )
            if not encoding.ids:
                raise ValidationError("the prompt has no tokens; write at least one word")
        sequences.append(GeneratedSequence(encoding.ids, params))
    return sequences


async def _generate_all(
    model: CausalModel, sequences: Sequence[GeneratedSequence]
) -> list[list[TokenEvent]]:
    """Runs sequences beside each other; when one fails, all are abandoned."""
    async with contextlib.AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(model.engine.stream(sequence)) for sequence in sequences
        ]
        return [[event async for event in stream] for stream in streams]


async def _stream(
    request: Request, model: CausalModel, sequence: GeneratedSequence, prefix: str
) -> Response:
    """Waits for the first event, which may still be an error with a status, then streams."""
    stream = model.engine.stream(sequence)
    events = _stream_events(request, stream, prefix)
    first = asyncio.create_task(_first(events))
    try:
        await unless_gone(request, _wait(first))
    except BaseException:
        first.cancel()
        await asyncio.wait({first})
        raise
    if first.done():
        first.result()
    return EventStream(first, events)


async def _first(events: AsyncGenerator[bytes]) -> bytes:
    return await anext(events)


async def _wait(task: asyncio.Task[bytes]) -> None:
    """Waits for a task as long as a silent connection may stay silent, without cancelling it."""
    await asyncio.wait({task}, timeout=KEEP_ALIVE_SECONDS)


async def _stream_events(
    request: Request, stream: TokenStream, prefix: str
) -> AsyncGenerator[bytes]:
    """A stream's events as JSON; a failure after the first one is an event, too."""
    num_events = 0
    try:
        async with stream:
            async for event in stream:
                yield to_json(_stream_event(event, prefix))
                num_events += 1
    except MaskdialError as error:
        if num_events == 0:
            raise
        request.state.outcome = error.error_type
        yield to_json(error_content(error))


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


def _details(finish: Finish) -> dict[str, Any]:
    return {
        "finish_reason": finish.reason,
        "generated_tokens": finish.generated_tokens,
        "seed": finish.seed,
        "input_length": finish.input_length,
    }


def _finish(events: Sequence[TokenEvent]) -> Finish:
    finish = events[-1].finish
    assert finish is not None, "a stream ends with its finish or an error"
    return finish


def _timings(finishes: Sequence[Finish]) -> Timings:
    """A request's times are those of its slowest prompt."""
    return Timings(
        queue_seconds=max(finish.queue_seconds for finish in finishes),
        inference_seconds=max(finish.inference_seconds for finish in finishes),
        compute_tokens=sum(f.input_length + f.generated_tokens for f in finishes),
    )
