"""The route `/fill-mask`."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict

from fastapi import APIRouter, Request, Response

from maskdial.api.bodies import FillMaskBody, FillMaskParameters
from maskdial.api.masked import admit, masked_headers, masked_input, read_texts, run_masked
from maskdial.api.schema import parse_body
from maskdial.api.work import name_input
from maskdial.errors import ValidationError
from maskdial.http.replies import body_schema, json_reply
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.masked.tasks import fill_mask as task
from maskdial.models.registry import MaskedModel, Models

router = APIRouter(tags=["masked"])

# Each filling is a text to decode, about 0.1 ms of a long one; more is done beside the event loop.
_INLINE_FILLINGS = 64
_MAX_FILLINGS = 10_000


@router.post("/fill-mask", openapi_extra=body_schema(FillMaskBody))
async def fill_mask(request: Request) -> Response:
    """Fills the masks of a text: per mask, the best tokens with their probabilities."""
    return await serve_fill_mask(request, await request.body(), None)


async def serve_fill_mask(request: Request, content: bytes, name: str | None) -> Response:
    """Answers a `/fill-mask` body with the named model, or the one that the body means."""
    body = parse_body(FillMaskBody, content)
    models: Models = request.app.state.models
    model = models.for_masked_task("fill-mask", name or body.model)
    request.state.model = model.bundle.name
    parameters = body.parameters or FillMaskParameters()
    top_k = parameters.top_k or 5
    task.check_top_k(top_k, model.bundle.manifest.vocab_size)
    target_ids = None
    if parameters.targets is not None:
        target_ids = task.resolve_targets(parameters.targets, model.tokenizer)

    texts = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    admit(request, model, len(texts))
    masked = [(task.write_masks(text, model.tokenizer), None) for text in texts]
    batch = isinstance(body.inputs, list)
    read = await read_texts(model, masked, parameters, batch=batch)
    inputs = []
    for index, encoding in enumerate(read.encodings):
        with name_input(index, batch):
            if read.num_truncated:
                task.check_masks_kept(masked[index][0], encoding.ids, model.tokenizer)
            rows = task.mask_positions(encoding.ids, model.tokenizer)
        inputs.append(masked_input(encoding, rows))

    _check_num_fillings(inputs, top_k if target_ids is None else min(top_k, len(target_ids)))

    results = await run_masked(request, model, inputs, body.timeout)
    answers = await _fill(model, inputs, results, top_k, target_ids)
    headers = masked_headers(inputs, results, read.num_truncated)
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
        fillings = task.fill_mask(
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
