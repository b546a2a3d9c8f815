"""The masked family's routes: `/fill-mask` and `/classify`."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response

from maskdial.api.bodies import (
    ClassifyBody,
    ClassifyParameters,
    FillMaskBody,
    FillMaskParameters,
    TextPair,
    parse_body,
)
from maskdial.api.wire import Timings, body_schema, json_reply, unless_gone
from maskdial.api.work import check_num_inputs, name_input, time_limit, tokenize
from maskdial.config import Config
from maskdial.errors import ValidationError
from maskdial.masked import tasks
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.served import MaskedModel, Models
from maskdial.tokenizer import Encoding

router = APIRouter(tags=["masked"])

# Each filling is a text to decode, about 0.1 ms of a long one; more is done beside the event loop.
_INLINE_FILLINGS = 64
_MAX_FILLINGS = 10_000


@router.post("/fill-mask", openapi_extra=body_schema(FillMaskBody))
async def fill_mask(request: Request) -> Response:
    """Fills the masks of a text: per mask, the best tokens with their probabilities."""
    return await serve_fill_mask(request, await request.body(), None)


@router.post("/classify", openapi_extra=body_schema(ClassifyBody))
async def classify(request: Request) -> Response:
    """Scores a text, or a pair of texts, for each label of a classifier."""
    return await serve_classify(request, await request.body(), None)


async def serve_fill_mask(request: Request, content: bytes, name: str | None) -> Response:
    """Answers a `/fill-mask` body with the named model, or the one that the body means."""
    body = parse_body(FillMaskBody, content)
    models: Models = request.app.state.models
    model = models.for_masked_task("fill-mask", name or body.model)
    request.state.model = model.bundle.name
    parameters = body.parameters or FillMaskParameters()
    top_k = parameters.top_k or 5
    tasks.check_top_k(top_k, model.bundle.manifest.vocab_size)
    target_ids = None
    if parameters.targets is not None:
        target_ids = tasks.resolve_targets(parameters.targets, model.tokenizer)

    texts = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    _admit(request, model, len(texts))
    masked = [(tasks.write_masks(text, model.tokenizer), None) for text in texts]
    encodings = await tokenize(model.tokenizer, model.metrics, masked)
    batch = isinstance(body.inputs, list)
    _check_lengths(model, encodings, batch)
    inputs = []
    for index, encoding in enumerate(encodings):
        with name_input(index, batch):
            rows = tasks.mask_positions(encoding.ids, model.tokenizer)
        inputs.append(_masked_input(encoding, rows))

    _check_num_fillings(inputs, top_k if target_ids is None else min(top_k, len(target_ids)))

    timeout = time_limit(body.timeout, request.app.state.config)
    results = await unless_gone(request, model.engine.submit_many(inputs, timeout))
    answers = await _fill(model, inputs, results, top_k, target_ids)
    headers = _timings(inputs, results).headers()
    return json_reply(answers if batch else answers[0], headers=headers)


def _check_num_fillings(inputs: Sequence[MaskedInput], per_mask: int) -> None:
    num_masks = sum(len(given.rows) for given in inputs)
    if num_masks * per_mask > _MAX_FILLINGS:
        raise ValidationError(
            f"parameters.top_k: {num_masks * per_mask:,} answers for {num_masks} masks; one "
            f"request may ask for at most {_MAX_FILLINGS:,}"
        )


async def _fill(
    model: MaskedModel,
    inputs: Sequence[MaskedInput],
    results: Sequence[MaskedResult],
    top_k: int,
    target_ids: Sequence[int] | None,
) -> list[object]:
    """Each text's answer on the wire, made beside the event loop when they are many."""

    def answer(given: MaskedInput, result: MaskedResult) -> object:
        fillings = tasks.fill_mask(
            result.logits,
            given.input_ids,
            given.rows,
            model.tokenizer,
            top_k=top_k,
            target_ids=target_ids,
            pad_token_id=model.bundle.manifest.special_tokens.pad,
        )
        per_mask = [[asdict(filling) for filling in mask] for mask in fillings]
        return per_mask[0] if len(per_mask) == 1 else per_mask

    def answer_all() -> list[object]:
        return [answer(*pair) for pair in zip(inputs, results, strict=True)]

    if top_k * sum(len(given.rows) for given in inputs) <= _INLINE_FILLINGS:
        return answer_all()
    return await asyncio.to_thread(answer_all)


async def serve_classify(request: Request, content: bytes, name: str | None) -> Response:
    """Answers a `/classify` body with the named model, or the one that the body means."""
    body = parse_body(ClassifyBody, content)
    models: Models = request.app.state.models
    model = models.for_masked_task("classify", name or body.model)
    request.state.model = model.bundle.name
    parameters = body.parameters or ClassifyParameters()

    batch = isinstance(body.inputs, list)
    items = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    _admit(request, model, len(items))
    texts = [
        (item.text, item.text_pair) if isinstance(item, TextPair) else (item, None)
        for item in items
    ]
    encodings = await tokenize(model.tokenizer, model.metrics, texts)
    _check_lengths(model, encodings, batch)
    inputs = [_masked_input(encoding, ()) for encoding in encodings]

    timeout = time_limit(body.timeout, request.app.state.config)
    results = await unless_gone(request, model.engine.submit_many(inputs, timeout))
    manifest = model.bundle.manifest
    replies: list[list[dict[str, Any]]] = []
    for result in results:
        scores = tasks.classify(
            result.logits,
            manifest.labels,
            manifest.problem_type,
            function_to_apply=parameters.function_to_apply,
            top_k=parameters.top_k,
        )
        replies.append([asdict(score) for score in scores])
    # One text is answered nested as well: transformers' clients take the first element.
    return json_reply(replies, headers=_timings(inputs, results).headers())


def _admit(request: Request, model: MaskedModel, num_inputs: int) -> None:
    """Refuses what would be refused later anyway, before any of it is tokenized."""
    config: Config = request.app.state.config
    check_num_inputs(num_inputs, config)
    model.engine.check_room(num_inputs)


def _check_lengths(model: MaskedModel, encodings: Sequence[Encoding], batch: bool) -> None:
    longest = model.bundle.manifest.max_length
    for index, encoding in enumerate(encodings):
        with name_input(index, batch):
            if len(encoding.ids) > longest:
                raise ValidationError(
                    f"the text has {len(encoding.ids)} tokens; model {model.bundle.name!r} takes "
                    f"at most {longest}"
                )


def _masked_input(encoding: Encoding, rows: tuple[int, ...]) -> MaskedInput:
    return MaskedInput(tuple(encoding.ids), rows, tuple(encoding.type_ids))


def _timings(inputs: Sequence[MaskedInput], results: Sequence[MaskedResult]) -> Timings:
    """A request's times are those of its slowest text."""
    return Timings(
        queue_seconds=max(result.queue_seconds for result in results),
        inference_seconds=max(result.inference_seconds for result in results),
        compute_tokens=sum(len(given.input_ids) for given in inputs),
    )
