"""The route `/rerank`, as in text-embeddings-inference."""

from dataclasses import asdict

from fastapi import APIRouter, Request, Response

from maskdial.api.bodies import RerankBody
from maskdial.api.masked import masked_headers, run_masked
from maskdial.api.pairs import read_pairs
from maskdial.api.schema import parse_body
from maskdial.api.work import check_num_inputs
from maskdial.http.replies import body_schema, json_reply
from maskdial.masked.tasks import rerank as task
from maskdial.models.registry import Models

router = APIRouter(tags=["masked"])


@router.post("/rerank", openapi_extra=body_schema(RerankBody))
async def rerank(request: Request) -> Response:
    """Puts texts in the order of how well they answer a query, with their scores."""
    return await serve_rerank(request, await request.body(), None)


async def serve_rerank(request: Request, content: bytes, name: str | None) -> Response:
    """Answers a `/rerank` body with the named model, or the one that the body means."""
    body = parse_body(RerankBody, content)
    models: Models = request.app.state.models
    model = models.for_masked_task("rerank", name or body.model)
    request.state.model = model.bundle.name
    check_num_inputs(len(body.texts), request.app.state.config)
    model.engine.check_room(len(body.texts))
    pairs = await read_pairs(
        model,
        [body.query],
        body.texts,
        body,
        strategy="longest_first",
        name_pair=lambda _, text: f"texts[{text}]: the query and the text",
    )
    results = await run_masked(request, model, pairs.inputs, body.timeout)
    ranks = task.rerank([result.logits for result in results], raw_scores=body.raw_scores or False)
    answer = [asdict(rank) for rank in ranks]
    if body.return_text:
        answer = [item | {"text": body.texts[item["index"]]} for item in answer]
    return json_reply(answer, headers=masked_headers(pairs.inputs, results, pairs.num_truncated))
