"""`/v1/models/NAME:predict`: KServe's first protocol, and TensorFlow Serving's."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from fastapi import Response
from typing_extensions import TypedDict

from maskdial.bounds import LARGEST_INT, Size
from maskdial.dialects.body import BodyError, TaskBody, example, parse_body
from maskdial.dialects.call import Call, respond, task_route
from maskdial.dialects.kserve.infer import kserve_error_reply
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.native.models import Dispatched, asked_task
from maskdial.engine.limits import check_num_texts
from maskdial.errors import ValidationError
from maskdial.http.replies import encode_json
from maskdial.registry.served import ServedModel


class PredictInstancesBody(Lenient, TaskBody):
    """Texts, or bodies of a task that the model does."""

    model_config = example({"instances": ["A warm film.", "A cold one."]})

    instances: Annotated[list[str | dict[str, Any]], Size(1, LARGEST_INT, "instances")]


class PredictReply(TypedDict):
    """An answer for each instance."""

    predictions: list[Any]


async def predict(call: Call[PredictInstancesBody]) -> Response:
    """Answers several texts or bodies at once, each as `/models/NAME` does."""
    instances = call.body.instances
    check_num_texts(len(instances), call.server.config)
    choice = call.choice()
    lease = await call.lease(choice)
    served = [each for each in lease.models if choice.allows(each.manifest)]
    calls = [_own_call(call, index, each, served) for index, each in enumerate(instances)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_answer(index, *each)) for index, each in enumerate(calls)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    answers = b",".join(bytes(task.result().body) for task in tasks)
    return Response(b'{"predictions":[' + answers + b"]}", media_type="application/json")


def _own_call(
    call: Call[PredictInstancesBody],
    index: int,
    instance: str | Mapping[str, Any],
    served: Sequence[ServedModel],
) -> tuple[Dispatched, Call[Any]]:
    """The task that an instance is for, and its call."""
    content = {"inputs": instance} if isinstance(instance, str) else instance
    if content.get("stream"):
        raise _of_instance(index, "stream: predictions come as a whole; leave it out")
    task = asked_task(served, content)
    named = {**content, "model": call.body.model, "mask": call.body.mask}
    try:
        return task, call.with_body(parse_body(task.body, encode_json(named), call.ignored))
    except ValidationError as error:
        raise _of_instance(index, error.message) from error


async def _answer(index: int, task: Dispatched, call: Call[Any]) -> Response:
    try:
        return await respond(task.answer, call)
    except ValidationError as error:
        raise _of_instance(index, error.message) from error


def _of_instance(index: int, message: str) -> BodyError:
    where = f"instances[{index}]"
    return BodyError(f"{where}: {message}", field=where)


ROUTES = (
    task_route(
        "/v1/models/{name:path}:predict",
        predict,
        PredictInstancesBody,
        PredictReply,
        error_reply=kserve_error_reply,
        invalid_status=400,
        tags=["kserve"],
    ),
)
