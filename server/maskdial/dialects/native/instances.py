"""Instances: several bodies in one request, each of a task that the model does."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from maskdial.dialects.body import BodyError, TaskBody, parse_body
from maskdial.dialects.call import Call
from maskdial.dialects.native.models import Dispatched
from maskdial.engine.limits import check_num_texts
from maskdial.errors import ValidationError
from maskdial.http.replies import encode_json

T = TypeVar("T")
TaskT = TypeVar("TaskT", bound=Dispatched)


async def answer_each(
    call: Call[Any],
    instances: Sequence[Mapping[str, Any]],
    choose: Callable[[Mapping[str, Any]], TaskT],
    answer: Callable[[TaskT, Call[Any]], Awaitable[T]],
) -> list[T]:
    """What each instance gets; they are read off the event loop, and answered at the same time.

    Args:
        call: of the request.
        instances: the bodies, without a model, which the request names.
        choose: finds the task that a body is for.
        answer: answers a call by its task.

    Raises:
        ValidationError: one of them cannot be served; the sentence says which.
    """
    check_num_texts(len(instances), call.server.config)
    common = {"model": call.body.model, "mask": call.body.mask}

    def read(index: int, instance: Mapping[str, Any]) -> tuple[TaskT, TaskBody]:
        task = choose(instance)
        try:
            return task, parse_body(task.body, encode_json({**instance, **common}), call.ignored)
        except ValidationError as error:
            raise of_instance(index, error.message) from error

    async def answered(index: int, task: TaskT, one: Call[Any]) -> T:
        try:
            return await answer(task, one)
        except ValidationError as error:
            raise of_instance(index, one.located(error).message) from error

    bodies = await call.reread(lambda: [read(*each) for each in enumerate(instances)])
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(answered(index, task, call.with_body(body)))
                for index, (task, body) in enumerate(bodies)
            ]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def of_instance(index: int, message: str) -> BodyError:
    """An error about an instance."""
    where = f"instances[{index}]"
    return BodyError(f"{where}: {message}", field=where)
