"""`POST /pooling`: what a model that does not generate makes of texts, as vLLM has it."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from fastapi import Response
from numpy.typing import NDArray
from pydantic import Field

from maskdial.bounds import Range
from maskdial.bundle.manifest import TaskName
from maskdial.dialects.body import example
from maskdial.dialects.call import Call
from maskdial.dialects.openai.base import (
    AnyInput,
    OpenAIBody,
    TextsOrIds,
    check_input,
    inputs_of,
    is_batch,
)
from maskdial.dialects.openai.embeddings import prompt_usage
from maskdial.dialects.openai.errors import FORM
from maskdial.dialects.openai.replies import PoolingReply
from maskdial.dialects.openai.scores import PoolingParameters
from maskdial.dialects.unsupported import Unsupported
from maskdial.dialects.vectors import SECONDS_PER_VALUE, EncodingFormat, base64_of
from maskdial.engine.offload import offload
from maskdial.engine.timing import Timed
from maskdial.errors import ValidationError
from maskdial.http.replies import json_reply, timing_headers
from maskdial.masked.model import MaskedModel
from maskdial.masked.tasks.classify import ClassifyRequest
from maskdial.masked.tasks.embed import EmbedRequest
from maskdial.masked.tasks.embed_all import EmbedAllRequest
from maskdial.masked.tasks.task import TaskRequest
from maskdial.masked.tasks.token_scores import TokenScoresRequest
from maskdial.registry.served import Task

PoolingKind = Literal["embed", "classify", "token_embed", "token_classify"]
_MAIN: Mapping[TaskName, PoolingKind] = {
    "embed": "embed",
    "embed-hybrid": "embed",
    "classify": "classify",
    "embed-all": "token_embed",
    "token-classify": "token_classify",
}
"""By the task of a model, what it does unless the request says otherwise."""
_REQUESTS: Mapping[PoolingKind, type[TaskRequest[Any]]] = {
    "embed": EmbedRequest,
    "classify": ClassifyRequest,
    "token_embed": EmbedAllRequest,
    "token_classify": TokenScoresRequest,
}


class PoolingBody(PoolingParameters, OpenAIBody):
    """Texts or token ids, and what to make of them."""

    spellings = {"texts": "input", "normalize": "use_activation"}  # noqa: RUF012
    neutral = {  # noqa: RUF012
        "add_special_tokens": (True,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
    }
    model_config = example({"input": ["The ship left at dawn.", "She baked bread."]})

    messages: Annotated[
        Any, Unsupported("conversations are not supported here; send their text as input")
    ] = None
    input: Annotated[
        TextsOrIds, pydantic.PlainValidator(check_input, json_schema_input_type=AnyInput)
    ] = Field(
        description="A text, a list of texts, a list of token ids, or a list of such lists. Token "
        "ids are for models that embed, and those that tag tokens."
    )
    task: PoolingKind | None = Field(
        None,
        description="embed: a vector; classify: the score of each label; token_embed, "
        "token_classify: the same for each token. Default: what the model is for.",
    )
    encoding_format: EncodingFormat | None = Field(
        None,
        description="float: numbers; base64: the bytes of little-endian float32 values, row by "
        "row. Default: float.",
    )
    dimensions: Annotated[int, Range(1)] | None = Field(
        None, description="Keep the first dimensions of a vector only, and normalize again."
    )

    @property
    def batch(self) -> bool:
        return is_batch(self.input)

    @property
    def texts(self) -> list[str]:
        """The inputs of models that read no token ids.

        Raises:
            ValidationError: there are some.
        """
        texts = [each for each in inputs_of(self.input) if isinstance(each, str)]
        if not texts:
            raise ValidationError("this model takes no token ids; send texts", field="texts")
        return texts


_POOLING = Task("pooling", lambda manifest: manifest.task in _MAIN)


async def pooling(call: Call[PoolingBody]) -> Response:
    """Turns texts into vectors, or the scores of labels; for each text, or each of its tokens."""
    body = call.body
    model = await call.masked(_POOLING)
    pooled = await _pool(call, model)
    timings = pooled.timings

    def reply() -> Response:
        content: PoolingReply = {
            "id": f"pool-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": model.name,
            "data": [
                {"index": index, "object": "pooling", "data": _written(body, values)}
                for index, values in enumerate(pooled.content)
            ],
            "usage": prompt_usage(timings.compute_tokens),
        }
        return json_reply(content, headers=timing_headers(timings))

    num_values = sum(values.size for values in pooled.content)
    return await offload(reply, num_values * SECONDS_PER_VALUE)


async def _pool(call: Call[PoolingBody], model: MaskedModel) -> Timed[Sequence[NDArray[Any]]]:
    """An array for each text: (dimension,) or (num_labels,), or (num_tokens, ...) of those.

    Raises:
        ValidationError: the model does something else, or cannot read a text.
    """
    body = call.body
    kind = body.task or _MAIN[model.manifest.task]
    if not _REQUESTS[kind].serves(model.manifest):
        known = " or ".join(
            repr(name) for name, each in _REQUESTS.items() if each.serves(model.manifest)
        )
        raise ValidationError(f"model {model.name!r} does {known}, not {kind!r}", field="task")
    if body.dimensions is not None and kind != "embed":
        raise ValidationError(f"{kind} has none; leave it out", field="dimensions")
    raw = body.use_activation is False
    match kind:
        case "embed":
            wanted = EmbedRequest(
                inputs_of(body.input),
                body.truncation,
                normalize=body.use_activation,
                dimensions=body.dimensions,
            )
            vectors = await call.answer(wanted, model)
            return Timed([*vectors.content], vectors.timings)
        case "classify":
            pairs = [(text, None) for text in body.texts]
            labels = model.manifest.labels
            answer = await call.answer(
                ClassifyRequest(pairs, body.truncation, "none" if raw else None), model
            )
            by_label = [{each.label: each.score for each in text} for text in answer.content]
            scores = [np.array([text[label] for label in labels]) for text in by_label]
            return Timed(scores, answer.timings)
        case "token_embed":
            tokens = await call.answer(EmbedAllRequest(body.texts, body.truncation), model)
            return Timed(tokens.content, tokens.timings)
        case "token_classify":
            tags = TokenScoresRequest(inputs_of(body.input), body.truncation, raw)
            tagged = await call.answer(tags, model)
            return Timed(tagged.content, tagged.timings)


def _written(body: PoolingBody, values: NDArray[Any]) -> list[Any] | str:
    """Values as they are sent."""
    if body.encoding_format == "base64":
        return base64_of(values.astype(np.float32).reshape(1, -1))[0]
    written: list[Any] = values.tolist()
    return written


ROUTES = (FORM.route("/pooling", pooling, PoolingBody, PoolingReply),)
