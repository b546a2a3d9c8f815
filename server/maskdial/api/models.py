"""`POST /models/{name}`: the task of whatever model it is."""

from collections.abc import Awaitable, Callable, Sequence

from fastapi import APIRouter, Request, Response
from pydantic_core import from_json

from maskdial.api.classify import serve_classify
from maskdial.api.embed import serve_embed, serve_similarity
from maskdial.api.fill_mask import serve_fill_mask
from maskdial.api.generate import serve_generate
from maskdial.api.question_answering import serve_question_answering
from maskdial.api.rerank import serve_rerank
from maskdial.api.token_classify import serve_token_classify
from maskdial.api.zero_shot import serve_zero_shot
from maskdial.masked.tasks.fill_mask import MASK_ALIASES
from maskdial.models.registry import Models, ServedModel, ServedTask

router = APIRouter(tags=["models"])

_SERVE_MASKED: dict[ServedTask, Callable[[Request, bytes, str | None], Awaitable[Response]]] = {
    "fill-mask": serve_fill_mask,
    "classify": serve_classify,
    "token-classify": serve_token_classify,
    "question-answering": serve_question_answering,
    "zero-shot-classify": serve_zero_shot,
    "rerank": serve_rerank,
    "embed": serve_embed,
    "similarity": serve_similarity,
}


@router.post("/models/{name}")
async def serve_model(request: Request, name: str) -> Response:
    """Answers with the named model; the body is that of a task that the model does."""
    models: Models = request.app.state.models
    served = models.named(name)
    content = await request.body()
    task = _asked_task(served, content)
    if task == "generate":
        return await serve_generate(request, content, name, as_list=True)
    return await _SERVE_MASKED[task](request, content, name)


def _asked_task(served: Sequence[ServedModel], content: bytes) -> ServedTask:
    """What a body asks a model for: its own task, or one beside it that the body shows.

    Of a model that is served under both masks, texts with masks in them are to be filled.
    """
    task = served[0].bundle.manifest.task
    other = served[1] if len(served) > 1 else None
    if task not in ("classify", "embed") and other is None:
        return task
    try:
        body = from_json(content)
    except ValueError:  # the task's own schema says what is wrong
        return task
    if not isinstance(body, dict):
        return task
    inputs = body.get("inputs")
    if other is not None:
        texts = inputs if isinstance(inputs, list) else [inputs]
        marks = (*MASK_ALIASES, other.tokenizer.mask_token or MASK_ALIASES[0])
        masked = any(mark in text for text in texts if isinstance(text, str) for mark in marks)
        return other.bundle.manifest.task if masked else task
    if task == "embed":
        return "similarity" if isinstance(inputs, dict) else task
    if "query" in body:
        return "rerank"
    parameters = body.get("parameters")
    if isinstance(parameters, dict) and "candidate_labels" in parameters:
        return "zero-shot-classify"
    return task
