"""Instances: several bodies in one request, each of a task that the model does."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from maskdial.dialects.body import BodyError, TaskBody, parse_body
from maskdial.dialects.call import Call
from maskdial.dialects.native.models import Dispatched
from maskdial.errors import ValidationError
from maskdial.http.replies import encode_json

TaskT = TypeVar("TaskT", bound=Dispatched)


async def instance_calls(
    call: Call[Any],
    instances: Sequence[Mapping[str, Any]],
    choose: Callable[[Mapping[str, Any]], TaskT],
) -> list[tuple[TaskT, Call[Any]]]:
    """For each instance its task, and its call; they are read off the event loop.

    Args:
        call: of the request.
        instances: the bodies, without a model, which the request names.
        choose: finds the task that a body is for.

    Raises:
        ValidationError: one of them cannot be served; the sentence says which.
    """
    common = {"model": call.body.model, "mask": call.body.mask}

    def read(index: int, instance: Mapping[str, Any]) -> tuple[TaskT, TaskBody]:
        task = choose(instance)
        try:
            return task, parse_body(task.body, encode_json({**instance, **common}), call.ignored)
        except ValidationError as error:
            raise of_instance(index, error.message) from error

    bodies = await call.reread(lambda: [read(*each) for each in enumerate(instances)])
    return [(task, call.with_body(body)) for task, body in bodies]


def of_instance(index: int, message: str) -> BodyError:
    """An error about an instance."""
    where = f"instances[{index}]"
    return BodyError(f"{where}: {message}", field=where)
