"""`POST /models/{name}`: the task of whatever model it is."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request, Response

from maskdial.api.classify import serve_classify
from maskdial.api.fill_mask import serve_fill_mask
from maskdial.api.generate import serve_generate
from maskdial.bundle import Task
from maskdial.served import Models

router = APIRouter(tags=["models"])

_SERVE_MASKED: dict[Task, Callable[[Request, bytes, str | None], Awaitable[Response]]] = {
    "fill-mask": serve_fill_mask,
    "classify": serve_classify,
}


@router.post("/models/{name}")
async def serve_model(request: Request, name: str) -> Response:
    """Answers with the named model; the body is that of the model's task."""
    models: Models = request.app.state.models
    task = models.get(name).bundle.manifest.task
    content = await request.body()
    if task == "generate":
        return await serve_generate(request, content, name, as_list=True)
    return await _SERVE_MASKED[task](request, content, name)
