"""`POST /models/{name}`: the task of the named model."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Union

from fastapi import Response
from pydantic import ConfigDict

from maskdial.bundle.manifest import Manifest, TaskName
from maskdial.dialects.body import TaskBody
from maskdial.dialects.call import Call, endpoint, respond
from maskdial.dialects.native import generate, seq2seq, tasks
from maskdial.dialects.native.generate_bodies import GenerateBody
from maskdial.dialects.native.replies import GenerateReply
from maskdial.http.route import TaskRoute
from maskdial.registry.served import ServedModel


class AnyTaskBody(TaskBody):
    """What the bodies of all tasks have."""

    model_config = ConfigDict(extra="ignore")


class Dispatched(Protocol):
    """What a task has to offer to be reached by its model's name."""

    @property
    def body(self) -> type[TaskBody]: ...
    @property
    def head(self) -> TaskName: ...
    def serves(self, manifest: Manifest, /) -> bool: ...
    def claims(self, content: Mapping[str, Any], model: ServedModel, /) -> bool: ...
    async def answer(self, call: Any, /) -> Response: ...


_OTHERS: tuple[seq2seq.TextToTextRoute | tasks.MaskedRoute[Any], ...] = (
    *seq2seq.TASKS,
    *tasks.TASKS,
)
_TASKS: tuple[Dispatched, ...] = (generate.GENERATE, *_OTHERS)


async def model(call: Call[AnyTaskBody]) -> Response:
    """Answers with the named model; the body is that of a task that the model does."""
    choice = call.choice()
    lease = await call.lease(choice)
    served = [model for model in lease.models if choice.allows(model.manifest)]
    task = asked_task(served, await call.content())
    return await respond(task.answer, await call.read_as(task.body))


def asked_task(served: Sequence[ServedModel], body: Mapping[str, Any]) -> Dispatched:
    """The task that claims the body, otherwise the first one that the first model does.

    A task may claim a body for a model that has its head but cannot do it, and say why not.
    """
    for each in served:
        for task in _TASKS:
            has_head = task.head == each.manifest.task
            if (has_head or task.serves(each.manifest)) and task.claims(body, each):
                return task
    return next(task for task in _TASKS if task.serves(served[0].manifest))


MODEL_BODY: Any = Union[(GenerateBody, *(task.body for task in _OTHERS))]
"""The bodies of everything that a model may be asked for by its name."""

MODEL_REPLY: Any = Union[(GenerateReply, *(task.reply for task in _OTHERS))]
"""The replies."""

ROUTES = (
    TaskRoute(
        "/models/{name:path}",
        endpoint(model, AnyTaskBody),
        name=model.__name__,
        description=inspect.getdoc(model),
        body=MODEL_BODY,
        reply=MODEL_REPLY,
        streams=True,
        tags=["models"],
    ),
)
