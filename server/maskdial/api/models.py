"""`POST /models/{name}`: the task of whatever model it is."""

from collections.abc import Awaitable, Callable

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
from maskdial.bundle import Task
from maskdial.served import Models, ServedTask

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
    task = models.get(name).bundle.manifest.task
    content = await request.body()
    if task == "generate":
        return await serve_generate(request, content, name, as_list=True)
    return await _SERVE_MASKED[_asked_task(task, content)](request, content, name)


def _asked_task(task: Task, content: bytes) -> ServedTask:
    """What a body asks a model for: its own task, or one beside it that the body's fields name."""
    if task not in ("classify", "embed"):
        return task
    try:
        body = from_json(content)
    except ValueError:  # the task's own schema says what is wrong
        return task
    if not isinstance(body, dict):
        return task
    if task == "embed":
        return "similarity" if isinstance(body.get("inputs"), dict) else task
    if "query" in body:
        return "rerank"
    parameters = body.get("parameters")
    if isinstance(parameters, dict) and "candidate_labels" in parameters:
        return "zero-shot-classify"
    return task
