"""The routes `/embed` and `/similarity`."""

from collections.abc import Sequence

import numpy as np
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray

from maskdial.api.bodies import EmbedBody, SimilarityBody, SimilarityInputs, Truncation
from maskdial.api.masked import Texts, admit, masked_headers, masked_input, read_texts, run_masked
from maskdial.api.schema import parse_body
from maskdial.errors import ValidationError
from maskdial.http.replies import body_schema, json_reply
from maskdial.masked.request import MaskedResult
from maskdial.masked.tasks import embed as task
from maskdial.models.bundle import Embedding
from maskdial.models.registry import MaskedModel, Models

router = APIRouter(tags=["masked"])


@router.post("/embed", openapi_extra=body_schema(EmbedBody))
async def embed(request: Request) -> Response:
    """Turns a text into a vector, or several texts into one each."""
    return await serve_embed(request, await request.body(), None)


@router.post("/similarity", openapi_extra=body_schema(SimilarityBody))
async def similarity(request: Request) -> Response:
    """Compares a sentence with others: the cosines of the angles between their vectors."""
    return await serve_similarity(request, await request.body(), None)


async def serve_embed(request: Request, content: bytes, name: str | None) -> Response:
    """Answers an `/embed` body with the named model, or the one that the body means."""
    body = parse_body(EmbedBody, content)
    models: Models = request.app.state.models
    model = models.for_masked_task("embed", name or body.model)
    request.state.model = model.bundle.name
    settings = body.settings
    embedding = _embedding(model)
    task.check_embedding(embedding, normalize=settings.normalize, dimensions=settings.dimensions)

    batch = isinstance(body.inputs, list)
    items = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    admit(request, model, len(items))
    read = await read_texts(model, [(item, None) for item in items], settings, batch=batch)
    inputs = [masked_input(encoding) for encoding in read.encodings]
    results = await run_masked(request, model, inputs, body.timeout)
    vectors = task.embed(
        _vectors(results),
        embedding,
        normalize=settings.normalize,
        dimensions=settings.dimensions,
    )
    headers = masked_headers(inputs, results, read.num_truncated)
    return json_reply(vectors.tolist(), headers=headers)


async def serve_similarity(request: Request, content: bytes, name: str | None) -> Response:
    """Answers a `/similarity` body with the named model, or the one that the body means."""
    body = parse_body(SimilarityBody, content)
    models: Models = request.app.state.models
    model = models.for_masked_task("similarity", name or body.model)
    request.state.model = model.bundle.name
    admit(request, model, 1 + len(body.inputs.sentences))
    read = await _read_sentences(model, body.inputs, body.parameters)
    inputs = [masked_input(encoding) for encoding in read.encodings]
    results = await run_masked(request, model, inputs, body.timeout)
    source, others = np.split(_vectors(results), [1])
    cosines = task.cosine_similarities(source[0], others)
    headers = masked_headers(inputs, results, read.num_truncated)
    return json_reply(cosines.tolist(), headers=headers)


async def _read_sentences(
    model: MaskedModel, given: SimilarityInputs, truncation: Truncation | None
) -> Texts:
    """Tokenizes the source sentence and the others; an error says which one it is about."""
    source, sentences = [(given.source_sentence, None)], [(each, None) for each in given.sentences]
    try:
        first = await read_texts(model, source, truncation, batch=False)
    except ValidationError as error:
        raise ValidationError(f"inputs.source_sentence: {error.message}") from error
    try:
        others = await read_texts(model, sentences, truncation, batch=True)
    except ValidationError as error:
        where = error.message.removeprefix("inputs")
        raise ValidationError(f"inputs.sentences{where}") from error
    return Texts([*first.encodings, *others.encodings], first.num_truncated + others.num_truncated)


def _embedding(model: MaskedModel) -> Embedding:
    embedding = model.bundle.manifest.embedding
    assert embedding is not None, "every bundle for this task has one"
    return embedding


def _vectors(results: Sequence[MaskedResult]) -> NDArray[np.float32]:
    return np.stack([result.logits for result in results])
