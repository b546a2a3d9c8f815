"""Routes of text-embeddings-inference, SageMaker and Vertex AI, beside those that are named alike.

`/predict`, `/decode`, `/vertex`, `/invocations`, and `POST /`, where clients of Hugging Face's
endpoints send what is for the only model.
"""

import inspect
from typing import Annotated, Any

import pydantic
from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from maskdial.bounds import LARGEST_INT, Size
from maskdial.bundle.manifest import Manifest
from maskdial.dialects.body import (
    AT_LEAST_ONE,
    AnyText,
    BodyError,
    TaskBody,
    enumerate_inputs,
    example,
)
from maskdial.dialects.call import Call, endpoint, respond, task_route
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.masked_body import MaskedBody, TruncationParameters
from maskdial.dialects.native.instances import answer_each
from maskdial.dialects.native.models import MODEL_BODY, MODEL_REPLY, AnyTaskBody, asked_task
from maskdial.dialects.native.replies import DetokenizeReply
from maskdial.dialects.native.tasks import CLASSIFY, MaskedRoute
from maskdial.dialects.native.tokens import DetokenizeBody, detokenize
from maskdial.engine.timing import Timings
from maskdial.errors import ValidationError
from maskdial.http.replies import json_reply, timing_headers
from maskdial.http.route import TaskRoute
from maskdial.masked.tasks.classify import ClassifyRequest, LabelScore
from maskdial.masked.tasks.task import TextOrPair
from maskdial.registry.served import Task


def _check_sequences(value: object) -> object:
    if isinstance(value, list) and value and all(isinstance(each, list) for each in value):
        for where, each in enumerate_inputs(value):
            _check_sequence(each, where)
        return value
    _check_sequence(value, "")
    return value


def _check_sequence(value: object, where: str) -> None:
    given = value if isinstance(value, list) else [value]
    texts = [each for each in given if isinstance(each, str)]
    if len(texts) != len(given) or not 1 <= len(texts) <= 2:
        raise ValueError(
            f"{where}must be a text, a pair of texts [text, text], or a list of such lists"
        )
    if not all(text.strip() for text in texts):
        raise ValueError(f"{where}must not be empty")


_Sequence = Annotated[list[AnyText], Field(json_schema_extra={"minItems": 1, "maxItems": 2})]


class PredictBody(Lenient, TruncationParameters, MaskedBody):
    """A text, a pair of texts, or a list of lists of one or two texts."""

    model_config = example({"inputs": [["A warm film."], ["It is good.", "It is bad."]]})

    inputs: Annotated[
        AnyText | _Sequence | Annotated[list[_Sequence], Field(json_schema_extra=AT_LEAST_ONE)],
        pydantic.BeforeValidator(_check_sequences),
    ] = Field(description="A text, a pair of texts, or a list of such lists.")
    raw_scores: bool | None = Field(
        None, description="Return logits instead of probabilities. Default: false."
    )

    @property
    def batch(self) -> bool:
        return isinstance(self.inputs, list) and isinstance(self.inputs[0], list)

    def request(self) -> ClassifyRequest:
        given: Any = self.inputs  # the validator has seen to it that they are all of one kind
        sequences = given if self.batch else [given]
        texts: list[TextOrPair] = [
            (each, None) if isinstance(each, str) else (each[0], each[1] if each[1:] else None)
            for each in sequences
        ]
        return ClassifyRequest(texts, self.truncation, "none" if self.raw_scores else None)


PREDICT = MaskedRoute(
    ClassifyRequest,
    PredictBody,
    list[LabelScore] | list[list[LabelScore]],
    "Scores a text, or a pair of texts, for each label of a classifier, as "
    "text-embeddings-inference does: of one input a list, of a list one for each.",
)
"""`/classify` as text-embeddings-inference has it."""


def _reads_texts(manifest: Manifest) -> bool:
    return manifest.family == "masked" and manifest.denoising is None


# Whatever a model does: the only one served is meant, or the named one
_INVOKE, _VERTEX = Task("invocations", lambda _: True), Task("vertex", _reads_texts)


def _as_tei(task: Any) -> Any:
    """A task as text-embeddings-inference answers it."""
    return PREDICT if task is CLASSIFY else task


async def invocations(call: Call[AnyTaskBody]) -> Response:
    """Answers with the only model, or the named one; the body is that of a task that it does.

    Classifiers answer as `/predict`, other models as `/models/NAME`.
    """
    choice = call.choice()
    try:
        lease = await call.lease(choice, _INVOKE)
    except ValidationError as error:
        raise BodyError(error.message, field="model") from error
    served = [model for model in lease.models if choice.allows(model.manifest)]
    task = _as_tei(asked_task(served, await call.content()))
    return await respond(task.answer, await call.read_as(task.body))


class VertexBody(Lenient, TaskBody):
    """Several bodies of a task that the model does."""

    spellings = {"texts": "instances"}  # noqa: RUF012
    model_config = example({"instances": [{"inputs": "A warm film."}, {"inputs": "A cold one."}]})

    instances: Annotated[list[dict[str, Any]], Size(1, LARGEST_INT, "instances")]


class VertexReply(TypedDict):
    """An answer for each instance."""

    predictions: list[Any]


async def vertex(call: Call[VertexBody]) -> Response:
    """Answers several bodies at once, each as the task's own route does, for Vertex AI."""
    await call.masked(_VERTEX)
    lease = await call.lease(call.choice())
    served = [model for model in lease.models if _VERTEX.serves(model.manifest)]
    answers = await answer_each(
        call,
        call.body.instances,
        lambda each: _as_tei(asked_task(served, each)),
        lambda task, one: task.content(one),
    )
    timings = Timings.beside([each.timings for each in answers])
    content: VertexReply = {"predictions": [each.content for each in answers]}
    return json_reply(content, headers=timing_headers(timings))


ROUTES = (
    task_route(
        "/predict",
        PREDICT.answer,
        PredictBody,
        PREDICT.reply,
        tags=["masked"],
        name="predict",
        description=PREDICT.description,
    ),
    task_route("/decode", detokenize, DetokenizeBody, DetokenizeReply, tags=["tokens"]),
    task_route("/vertex", vertex, VertexBody, VertexReply, tags=["models"]),
    *(
        TaskRoute(
            path,
            endpoint(invocations, AnyTaskBody),
            name=name,
            description=inspect.getdoc(invocations),
            body=MODEL_BODY,
            reply=MODEL_REPLY,
            streams=True,
            tags=["models"],
        )
        for path, name in (("/invocations", "invocations"), ("/", "invoke"))
    ),
)
