"""The route `/zero-shot-classify`."""

from dataclasses import asdict

import numpy as np
from fastapi import APIRouter, Request, Response

from maskdial.api.bodies import ZeroShotClassifyBody
from maskdial.api.masked import masked_headers, run_masked
from maskdial.api.pairs import read_pairs
from maskdial.api.schema import parse_body, shortened
from maskdial.api.work import check_num_inputs
from maskdial.errors import ValidationError
from maskdial.http.replies import body_schema, json_reply
from maskdial.masked.tasks import zero_shot as task
from maskdial.models.registry import MaskedModel, Models

router = APIRouter(tags=["masked"])


@router.post("/zero-shot-classify", openapi_extra=body_schema(ZeroShotClassifyBody))
async def zero_shot_classify(request: Request) -> Response:
    """Scores a text for each of the labels that the request brings."""
    return await serve_zero_shot(request, await request.body(), None)


async def serve_zero_shot(request: Request, content: bytes, name: str | None) -> Response:
    """Answers a `/zero-shot-classify` body with the named model, or the one that it means."""
    body = parse_body(ZeroShotClassifyBody, content)
    models: Models = request.app.state.models
    model = models.for_masked_task("zero-shot-classify", name or body.model)
    request.state.model = model.bundle.name
    parameters = body.parameters
    labels = parameters.candidate_labels
    batch = isinstance(body.inputs, list)
    texts = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    check_num_inputs(len(texts), request.app.state.config)
    _check_num_pairs(len(texts), len(labels), model)

    def name_pair(text: int, label: int) -> str:
        where = f"inputs[{text}]: " if batch else ""
        return f"{where}the text and the hypothesis of {shortened(labels[label])!r}"

    pairs = await read_pairs(
        model,
        texts,
        task.hypotheses(labels, parameters.hypothesis_template),
        parameters,
        strategy="only_first",
        name_pair=name_pair,
    )
    results = await run_masked(request, model, pairs.inputs, body.timeout)
    manifest = model.bundle.manifest
    assert manifest.entailment is not None  # or the model would not do this task
    logits = np.stack([result.logits for result in results]).reshape(len(texts), len(labels), -1)
    answers = []
    for rows in logits:
        scores = task.zero_shot(
            rows,
            labels,
            entailment=manifest.entailment,
            contradiction=task.contradiction(manifest.labels, manifest.entailment),
            multi_label=parameters.multi_label or False,
        )
        answers.append([asdict(score) for score in scores])
    headers = masked_headers(pairs.inputs, results, pairs.num_truncated)
    return json_reply(answers if batch else answers[0], headers=headers)


def _check_num_pairs(num_texts: int, num_labels: int, model: MaskedModel) -> None:
    """Refuses more pairs of text and label than the queue has room for."""
    num_pairs = num_texts * num_labels
    if num_pairs > model.engine.max_queue:
        raise ValidationError(
            f"inputs: {num_texts} texts with {num_labels} labels each are {num_pairs:,} pairs; one "
            f"request may make at most {model.engine.max_queue:,} (--max-queue)"
        )
    model.engine.check_room(num_pairs)
