"""`POST /models/{name}`: whatever task the named model does."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fastapi import Request, Response

from maskdial.dialects import tasks, tgi
from maskdial.dialects.schema import read_object
from maskdial.http.context import server_context
from maskdial.http.guard import TaskRoute
from maskdial.models.bundle import Task
from maskdial.models.registry import ServedModel


class _Dispatched(Protocol):
    """What a task has to offer to be reached by its model's name."""

    @property
    def name(self) -> str: ...
    @property
    def head(self) -> Task: ...
    def claims(self, content: Mapping[str, Any], model: ServedModel, /) -> bool: ...
    async def serve(self, request: Request, content: bytes, model_name: str | None) -> Response: ...


_TASKS: tuple[_Dispatched, ...] = (tgi.GENERATE, *tasks.TASKS)


async def model(request: Request) -> Response:
    """Answers with the named model; the body is that of a task that the model does."""
    name = request.path_params["name"]
    served = server_context(request).models.named(name)
    content = await request.body()
    return await _asked_task(served, content).serve(request, content, name)


def _asked_task(served: Sequence[ServedModel], content: bytes) -> _Dispatched:
    """The task that claims the body, otherwise the main task of the name's first model.

    A task may claim a body for a model that has its head but cannot do it, and say why not.
    """
    body = read_object(content)
    for each in served:
        for task in _TASKS:
            if task.head == each.manifest.task and task.claims(body, each):
                return task
    main = served[0].manifest.task
    return next(task for task in _TASKS if task.name == main)


ROUTES = (TaskRoute("/models/{name}", model, tags=["models"]),)
