"""`POST /v2/embed` and `/v1/embed`: texts as vectors of one or more types, as Cohere has them."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, Self

import numpy as np
from fastapi import Response
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator
from typing_extensions import TypedDict

from maskdial.ask.catalogue import task_of
from maskdial.ask.embed import embed_all
from maskdial.bounds import Range, Size
from maskdial.dialects.body import AT_LEAST_ONE, AnyText, FieldError, TaskBody, example
from maskdial.dialects.call import Call
from maskdial.dialects.cohere.errors import FORM
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.unsupported import Unsupported
from maskdial.dialects.vectors import SECONDS_PER_VALUE, base64_of
from maskdial.engine.offload import offload
from maskdial.errors import ValidationError, shortened
from maskdial.http.replies import json_reply, timing_headers
from maskdial.masked.model import MaskedModel
from maskdial.masked.tasks.embed import EmbedRequest
from maskdial.masked.tasks.quantized import OutputDtype, quantized
from maskdial.masked.tasks.task import Truncation

CohereType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
_NO_IMAGES = "images are not supported; send texts"
# What checkpoints call the tasks and prompts of Cohere's input types
_NAMES: Mapping[str, Sequence[str]] = {
    "search_query": ("search_query", "query", "retrieval.query", "Retrieval-query", "s2p_query"),
    "search_document": (
        "search_document",
        "document",
        "passage",
        "corpus",
        "retrieval.passage",
        "Retrieval-document",
    ),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering", "separation"),
}
_TRUNCATION = {
    "NONE": Truncation(),
    "START": Truncation(True, "left"),
    "END": Truncation(True, "right"),
}


def _check_texts(value: object) -> object:
    if not isinstance(value, list) or not value:
        raise ValueError("must be a list of at least one text")
    for index, text in enumerate(value):
        if not isinstance(text, str):
            raise ValueError(f"item {index} must be a string")
        if not text.strip():
            raise ValueError(f"item {index} must not be empty")
    return value


def _check_part(value: object) -> object:
    if isinstance(value, dict) and value.get("type") == "image_url":
        raise ValueError(_NO_IMAGES)
    return value


class TextPart(Lenient):
    """A part of an input; images are refused."""

    type: Literal["text"]
    text: str


class CohereInput(Lenient):
    """An input in parts, which are joined by newlines."""

    within = "inputs"

    content: Annotated[
        list[Annotated[TextPart, BeforeValidator(_check_part)]], Size(1, 4096, "parts")
    ]

    @property
    def text(self) -> str:
        """The parts as one text."""
        return "\n".join(part.text for part in self.content)


class CohereEmbedBody(Lenient, TaskBody):
    """Texts, and the types of the vectors that they become."""

    habits = frozenset({"priority"})
    neutral = {"images": ([],)}  # noqa: RUF012
    model_config = example(
        {
            "texts": ["The ship left at dawn.", "She baked bread."],
            "input_type": "search_document",
            "embedding_types": ["float", "ubinary"],
        }
    )

    texts: (
        Annotated[
            list[AnyText],
            Field(json_schema_extra=AT_LEAST_ONE),
            BeforeValidator(_check_texts),
        ]
        | None
    ) = None
    inputs: Annotated[list[CohereInput], Size(1, 4096, "inputs")] | None = Field(
        None, description="The texts in parts, in place of texts."
    )
    input_type: str | None = Field(
        None,
        description="search_query, search_document, classification or clustering, for which the "
        "model's task is taken, or its prompt put before every text, if it has one; or one of its "
        "tasks or prompts by name. Default: the model's default prompt.",
    )
    embedding_types: Annotated[list[CohereType], Size(1, 6, "types")] | None = Field(
        None, description='Types of the vectors. Default: ["float"].'
    )
    output_dimension: Annotated[int, Range(1)] | None = Field(
        None, description="Keep the first dimensions only, and normalize again. Default: all."
    )
    truncate: Literal["NONE", "START", "END"] | None = Field(
        None, description="Where to cut long texts; NONE refuses them. Default: END."
    )
    images: Annotated[list[Any] | None, Unsupported(_NO_IMAGES)] = None
    max_tokens: Annotated[
        int | None, Unsupported("not supported; texts are cut at the model's own length")
    ] = None

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        if (self.texts is None) == (self.inputs is None):
            raise FieldError("texts", "give texts or inputs, one of them")
        for index, each in enumerate(self.inputs or ()):
            if not each.text.strip():
                raise FieldError(f"inputs[{index}]", "must not be empty")
        return self

    @property
    def batch(self) -> bool:
        return True

    def names(self) -> Mapping[str, str]:
        return {
            "dimensions": "output_dimension",
            "prompt_name": "input_type",
            "task": "input_type",
            "texts": "texts" if self.inputs is None else "inputs",
        }

    @property
    def all_texts(self) -> list[str]:
        """The texts, also of inputs in parts."""
        return self.texts or [each.text for each in self.inputs or ()]

    def request(self, model: MaskedModel) -> EmbedRequest:
        """The body as a dialect-neutral request.

        Raises:
            ValidationError: the model has no such task or prompt.
        """
        task, prompt_name = _meant(self.input_type, model)
        return EmbedRequest(
            self.all_texts,
            _TRUNCATION[self.truncate or "END"],
            prompt_name,
            dimensions=self.output_dimension,
            dtypes=[_dtype(each) for each in self.types],
            trained_for=task,
        )

    @property
    def types(self) -> Sequence[CohereType]:
        """The types that are wanted."""
        return self.embedding_types or ("float",)


def _dtype(wanted: CohereType) -> OutputDtype:
    return "float" if wanted == "base64" else wanted


def _meant(input_type: str | None, model: MaskedModel) -> tuple[str | None, str | None]:
    """The model's task for an input type, or its prompt; neither for its default."""
    if input_type is None:
        return None, None
    embedding = model.manifest.embedding
    assert embedding is not None, "every bundle for this task has one"
    names = _NAMES.get(input_type, (input_type,))
    task = next((name for name in names if name in embedding.tasks), None)
    if task is not None:
        return task, None
    prompt = next((name for name in names if name in embedding.prompts), None)
    if prompt is None and input_type not in _NAMES:
        known = ", ".join(map(repr, dict.fromkeys((*_NAMES, *embedding.tasks, *embedding.prompts))))
        raise ValidationError(
            f"must be one of {known}, not {shortened(input_type)!r}", field="prompt_name"
        )
    return None, prompt


class EmbeddingsByType(TypedDict):
    """Vectors of the types that were wanted."""

    float: NotRequired[list[list[float]]]
    int8: NotRequired[list[list[int]]]
    uint8: NotRequired[list[list[int]]]
    binary: NotRequired[list[list[int]]]
    ubinary: NotRequired[list[list[int]]]
    base64: NotRequired[list[str]]


class CohereVersion(TypedDict):
    """The version of the API."""

    version: str


class CohereUnits(TypedDict):
    """Tokens that the model read."""

    input_tokens: int


class CohereMeta(TypedDict):
    """The version of the API, and the tokens that a request is charged for."""

    api_version: CohereVersion
    billed_units: CohereUnits


class CohereEmbedReply(TypedDict):
    """Vectors by their types, such as ``float`` and ``int8``, in the order of the texts."""

    response_type: Literal["embeddings_by_type"]
    id: str
    embeddings: EmbeddingsByType
    texts: list[str]
    meta: CohereMeta


class CohereFloatsReply(TypedDict):
    """Vectors of 32-bit floats, in the order of the texts."""

    response_type: Literal["embeddings_floats"]
    id: str
    embeddings: list[list[float]]
    texts: list[str]
    meta: CohereMeta


async def cohere_embed(call: Call[CohereEmbedBody]) -> Response:
    """Turns texts into vectors, of each of the types that are wanted."""
    return await _embed(call, "2")


async def cohere_embed_v1(call: Call[CohereEmbedBody]) -> Response:
    """Turns texts into vectors: lists of floats, or of each of the types that are wanted."""
    return await _embed(call, "1")


async def _embed(call: Call[CohereEmbedBody], version: str) -> Response:
    body = call.body
    model = await call.masked(task_of(EmbedRequest))
    embedded = await embed_all(body.request(model), model, call.server.config, call.deadline)
    vectors, timings = embedded.content, embedded.timings
    meta: CohereMeta = {
        "api_version": {"version": version},
        "billed_units": {"input_tokens": timings.compute_tokens},
    }
    common = {"id": uuid.uuid4().hex, "texts": body.all_texts, "meta": meta}

    def reply() -> Response:
        if version == "1" and body.embedding_types is None:
            content = {"response_type": "embeddings_floats", "embeddings": vectors.tolist()}
        else:
            by_type = {each: _values(vectors, each) for each in body.types}
            content = {"response_type": "embeddings_by_type", "embeddings": by_type}
        return json_reply(common | content, headers=timing_headers(timings))

    return await offload(reply, vectors.size * len(body.types) * SECONDS_PER_VALUE)


def _values(vectors: NDArray[np.float32], wanted: CohereType) -> list[Any]:
    values = quantized(vectors, _dtype(wanted))
    written: list[Any] = base64_of(values) if wanted == "base64" else values.tolist()
    return written


ROUTES = (
    FORM.route("/v2/embed", cohere_embed, CohereEmbedBody, CohereEmbedReply),
    FORM.route("/v1/embed", cohere_embed_v1, CohereEmbedBody, CohereFloatsReply | CohereEmbedReply),
)
