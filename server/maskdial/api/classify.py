"""The route `/classify`."""

from fastapi import APIRouter, Request, Response

from maskdial.api.bodies import ClassifyBody, ClassifyParameters, TextPair
from maskdial.api.masked import admit, masked_headers, masked_input, read_texts, run_masked
from maskdial.api.schema import parse_body
from maskdial.http.replies import body_schema, json_reply
from maskdial.masked.tasks import classify as task
from maskdial.models.registry import Models

router = APIRouter(tags=["masked"])


@router.post("/classify", openapi_extra=body_schema(ClassifyBody))
async def classify(request: Request) -> Response:
    """Scores a text, or a pair of texts, for each label of a classifier."""
    return await serve_classify(request, await request.body(), None)


async def serve_classify(request: Request, content: bytes, name: str | None) -> Response:
    """Answers a `/classify` body with the named model, or the one that the body means."""
    body = parse_body(ClassifyBody, content)
    models: Models = request.app.state.models
    model = models.for_masked_task("classify", name or body.model)
    request.state.model = model.bundle.name
    parameters = body.parameters or ClassifyParameters()

    batch = isinstance(body.inputs, list)
    items = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    admit(request, model, len(items))
    texts = [
        (item.text, item.text_pair) if isinstance(item, TextPair) else (item, None)
        for item in items
    ]
    read = await read_texts(model, texts, parameters, batch=batch)
    inputs = [masked_input(encoding) for encoding in read.encodings]
    results = await run_masked(request, model, inputs, body.timeout)
    manifest = model.bundle.manifest
    replies = [
        task.classify(
            result.logits,
            manifest.labels,
            manifest.problem_type,
            function_to_apply=parameters.function_to_apply,
            top_k=parameters.top_k,
        )
        for result in results
    ]
    # One text is answered nested as well: transformers' clients take the first element.
    return json_reply(replies, headers=masked_headers(inputs, results, read.num_truncated))
