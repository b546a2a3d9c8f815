"""`/v1/models/NAME:predict`: KServe's first protocol, and TensorFlow Serving's."""

from typing import Annotated, Any

from fastapi import Response
from typing_extensions import TypedDict

from maskdial.bounds import LARGEST_INT, Size
from maskdial.dialects.body import TaskBody, example
from maskdial.dialects.call import Call, respond, task_route
from maskdial.dialects.kserve.infer import kserve_error_reply
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.native.instances import answer_each, of_instance
from maskdial.dialects.native.models import asked_task


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
    choice = call.choice()
    lease = await call.lease(choice)
    served = [each for each in lease.models if choice.allows(each.manifest)]
    bodies = [{"inputs": each} if isinstance(each, str) else each for each in instances]
    for index, body in enumerate(bodies):
        if body.get("stream"):
            raise of_instance(index, "stream: predictions come as a whole; leave it out")
    replies = await answer_each(
        call,
        bodies,
        lambda each: asked_task(served, each),
        lambda task, one: respond(task.answer, one),
    )
    answers = b",".join(bytes(reply.body) for reply in replies)
    return Response(b'{"predictions":[' + answers + b"]}", media_type="application/json")


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
