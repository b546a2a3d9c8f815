"""What each task makes of input tensors, and its answers as output tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel

from maskdial.ask.catalogue import task_of
from maskdial.causal.generate import Completion
from maskdial.dialects.body import BodyError, TaskBody, parse_body
from maskdial.dialects.call import Call
from maskdial.dialects.kserve.tensors import OutputTensor, TextTensor
from maskdial.dialects.native.generate_bodies import GenerateBody
from maskdial.dialects.native.models import Dispatched, asked_task
from maskdial.dialects.native.tasks import MaskedRoute
from maskdial.engine.timing import Timed
from maskdial.errors import ValidationError, shortened
from maskdial.http.ignored import Ignored
from maskdial.http.replies import encode_json
from maskdial.masked.tasks.classify import ClassifyRequest, LabelScore
from maskdial.masked.tasks.embed import EmbedRequest
from maskdial.masked.tasks.fill_mask import Filling, FillMaskRequest
from maskdial.masked.tasks.rerank import Rank, RerankRequest
from maskdial.masked.tasks.zero_shot import ZeroShotRequest
from maskdial.registry.served import ServedModel

Parameters = Mapping[str, bool | int | float | str]

TEXT = "inputs"
"""The name of the input with the texts."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A task's tensors: pairs of a name and a datatype."""

    inputs: Sequence[tuple[str, str]]
    outputs: Sequence[tuple[str, str]]


_TEXTS = ((TEXT, "BYTES"),)
_SCORES = Signature(_TEXTS, (("label", "BYTES"), ("score", "FP32")))
_JSON = Signature(_TEXTS, (("output", "BYTES"),))
_SIGNATURES: Mapping[str, Signature] = {
    "generate": Signature(_TEXTS, (("text_output", "BYTES"),)),
    "classify": _SCORES,
    "zero-shot-classify": Signature((*_TEXTS, ("candidate_labels", "BYTES")), _SCORES.outputs),
    "embed": Signature(_TEXTS, (("embedding", "FP32"),)),
    "fill-mask": Signature(_TEXTS, (("token_str", "BYTES"), ("token", "INT64"), ("score", "FP32"))),
    "rerank": Signature(
        (("query", "BYTES"), ("texts", "BYTES")), (("index", "INT64"), ("score", "FP32"))
    ),
    "question-answering": Signature((("question", "BYTES"), ("context", "BYTES")), _JSON.outputs),
}


def signature(task: str) -> Signature:
    """The tensors of a task. Where answers have no shape, they are JSON, one for each text."""
    return _SIGNATURES.get(task, _JSON)


def _scores(answers: list[list[LabelScore]]) -> list[OutputTensor]:
    """(num_texts, num_labels)."""
    shape = len(answers), len(answers[0])
    labels = [each.label for answer in answers for each in answer]
    scores = [[each.score for each in answer] for answer in answers]
    return [
        OutputTensor("label", shape, labels),
        OutputTensor.of("score", np.array(scores, np.float32)),
    ]


def _fillings(answers: list[list[list[Filling]]]) -> list[OutputTensor]:
    """(num_texts, num_masks, top_k), without the masks if each text has one."""
    shapes = {(len(masks), len(masks[0])) for masks in answers}
    if len(shapes) > 1:
        raise ValidationError(
            "the texts have different numbers of masks, or of fillings, which no tensor holds; "
            "send them one by one",
            field="texts",
        )
    ((num_masks, num_fillings),) = shapes
    shape = [len(answers), num_masks, num_fillings]
    if num_masks == 1:
        shape.pop(1)
    flat = [each for masks in answers for mask in masks for each in mask]
    tokens = np.array([each.token for each in flat], np.int64)
    scores = np.array([each.score for each in flat], np.float32)
    return [
        OutputTensor("token_str", shape, [each.token_str for each in flat]),
        OutputTensor.of("token", tokens.reshape(shape)),
        OutputTensor.of("score", scores.reshape(shape)),
    ]


def _ranks(answer: list[Rank]) -> list[OutputTensor]:
    """(num_texts,), best first."""
    return [
        OutputTensor.of("index", np.array([each.index for each in answer], np.int64)),
        OutputTensor.of("score", np.array([each.score for each in answer], np.float32)),
    ]


_WRITERS: Mapping[type[Any], Callable[[Any], list[OutputTensor]]] = {
    ClassifyRequest: _scores,
    ZeroShotRequest: _scores,
    FillMaskRequest: _fillings,
    RerankRequest: _ranks,
    EmbedRequest: lambda vectors: [OutputTensor.of("embedding", np.asarray(vectors, np.float32))],
}


def _texts(completions: Sequence[Completion], n: int) -> list[OutputTensor]:
    """(num_prompts,), or (num_prompts, n)."""
    texts = [text.finish.generated_text for each in completions for text in each.best(n)[:n]]
    shape = (len(completions),) if n == 1 else (len(completions), n)
    return [OutputTensor("text_output", shape, texts)]


def task_for(served: Sequence[ServedModel], tensors: Sequence[TextTensor]) -> Dispatched:
    """The task that a model does for these inputs."""
    names = {tensor.name for tensor in tensors}
    content: dict[str, Any] = dict.fromkeys(names, "")
    if "candidate_labels" in names:
        content["parameters"] = {"candidate_labels": []}
    if len(tensors) == 1:
        content[TEXT] = list(tensors[0].texts)
    return asked_task(served, content)


def body_of(
    task: Dispatched,
    tensors: Sequence[TextTensor],
    parameters: Parameters,
    outer: TaskBody,
    ignored: Ignored | None,
) -> Any:
    """The body that a task's own route would get.

    The only tensor may have any name: its texts are what the task reads. Several are fields of the
    body, or of its parameters, or else of the items of ``inputs``. Parameters that the task
    does not know are noted, as the protocol lets a server ignore them.

    Raises:
        ValidationError: they are not what the task reads; the sentence names the body's field.
    """
    fields = task.body.model_fields
    inner = _parameter_fields(task.body)
    content: dict[str, Any] = {"model": outer.model, "mask": outer.mask}
    items: dict[str, Sequence[str]] = {}
    given: dict[str, Any] = {}
    for tensor in tensors:
        if len(tensors) == 1 and TEXT in fields:
            content[TEXT] = tensor.texts
        elif tensor.name in fields:
            is_text = fields[tensor.name].annotation is str
            content[tensor.name] = _only(tensor) if is_text else tensor.texts
        elif tensor.name in inner:
            given[tensor.name] = tensor.texts
        else:
            items[tensor.name] = tensor.texts
    if items:
        if TEXT in content:
            raise ValidationError(f"there is no input {shortened(next(iter(items)))!r} beside it")
        content[TEXT] = _zipped(items)
    for name, value in parameters.items():
        if name in fields:
            content[name] = value
        elif name in inner or ignored is None:
            given[name] = value
        else:
            ignored.add_field(name, "parameters")
    if given:
        content["parameters"] = given
    return parse_body(task.body, encode_json(content), ignored)


async def tensors_of(call: Call[Any], task: Dispatched, body: Any) -> Timed[list[OutputTensor]]:
    """The answer to a body of a task.

    Raises:
        ValidationError: it cannot be served, in the body's words.
    """
    inner = call.with_body(body)
    try:
        if isinstance(body, GenerateBody):
            return await _generate(inner)
        if isinstance(task, MaskedRoute):
            return await _answer(inner, task)
    except ValidationError as error:
        raise inner.located(error) from error
    raise BodyError(f"{task.body.__name__} has no tensors; ask the task's own route")


async def _generate(call: Call[GenerateBody]) -> Timed[list[OutputTensor]]:
    body = call.body
    model = await call.writer()
    generation = await call.generation(body.request(model.defaults), model)
    completions = await generation.complete()
    n = 1 if body.parameters is None else body.parameters.n or 1
    return Timed(_texts(completions, n), generation.timings(completions))


async def _answer(call: Call[Any], task: MaskedRoute[Any]) -> Timed[list[OutputTensor]]:
    write = _WRITERS.get(task.kind)
    if write is None:
        answer = await task.content(call)
        assert isinstance(answer.content, Sequence)
        each = [encode_json(one).decode() for one in answer.content]
        return Timed([OutputTensor("output", (len(each),), each)], answer.timings)
    model = await call.masked(task_of(task.kind))
    found = await call.answer(call.body.request(), model)
    return Timed(write(found.content), found.timings)


def _parameter_fields(body: type[TaskBody]) -> frozenset[str]:
    """The names of what a body has in its ``parameters``."""
    field = body.model_fields.get("parameters")
    annotation = None if field is None else field.annotation
    kinds = (*getattr(annotation, "__args__", ()), annotation)
    return frozenset(
        name
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, BaseModel)
        for name in kind.model_fields
    )


def _only(tensor: TextTensor) -> str:
    if len(tensor.texts) != 1:
        raise ValidationError(
            f"input {shortened(tensor.name)!r} must have one text, not {len(tensor.texts):,}"
        )
    return tensor.texts[0]


def _zipped(items: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Items whose fields are in a tensor each."""
    if len({len(texts) for texts in items.values()}) > 1:
        counts = (f"{shortened(name)!r} has {len(texts):,}" for name, texts in items.items())
        sizes = ", ".join(counts)
        raise ValidationError(f"inputs must have as many texts as each other; {sizes}")
    return [dict(zip(items, texts, strict=True)) for texts in zip(*items.values(), strict=True)]
