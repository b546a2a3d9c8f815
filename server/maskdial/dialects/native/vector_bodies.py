"""The bodies of the tasks that compare vectors, or return them: `/embed`, its relatives,
`/similarity` and `/rerank`.
"""

from typing import Annotated, Generic, Literal, Self, TypeVar, get_args

import pydantic
from pydantic import Field, model_validator

from maskdial.bounds import LARGEST_INT, Range, Size
from maskdial.dialects.body import FieldError, TextsBody, Wire, example
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.masked_body import MaskedBody, Text, TruncationParameters
from maskdial.dialects.vectors import (
    INSTRUCTION_IN_PROMPT,
    INSTRUCTION_IN_TEMPLATE,
    TRAINED_TASK,
    VectorForm,
)
from maskdial.masked.tasks.embed import EmbedRequest, SimilarityRequest, SparseEmbedRequest
from maskdial.masked.tasks.embed_all import EmbedAllRequest
from maskdial.masked.tasks.embed_chunks import ChunkEmbedRequest
from maskdial.masked.tasks.embed_hybrid import HybridEmbedRequest, VectorKind
from maskdial.masked.tasks.muvera import Muvera
from maskdial.masked.tasks.quantized import OutputDtype
from maskdial.masked.tasks.rerank import RerankRequest
from maskdial.masked.tasks.stored_vectors import StoredVectors
from maskdial.masked.tasks.task import Truncation


class PromptParameters(TruncationParameters):
    """Parameters of `/embed-sparse`."""

    prompt_name: str | None = Field(
        None,
        description="Put the model's prompt of this name before every text. Default: the model's "
        "default prompt, if it has one.",
    )
    instruction: Text | None = Field(None, description=INSTRUCTION_IN_PROMPT)

    @property
    def prompting(self) -> tuple[Truncation, str | None, str | None]:
        """What a request has of all tasks that put a prompt before texts."""
        return self.truncation, self.prompt_name, self.instruction


class EmbedParameters(VectorForm, PromptParameters):
    """Parameters of `/embed`."""

    normalize: bool | None = Field(
        None, description="Scale vectors to length 1. Default: as the model was trained."
    )
    dimensions: Annotated[int, Range(1)] | None = Field(
        None, description="Keep the first dimensions only, and normalize again. Default: all."
    )
    task: Text | None = Field(None, description=TRAINED_TASK)


ParametersT = TypeVar("ParametersT", bound=TruncationParameters)


class VectorsBody(TextsBody, MaskedBody, Generic[ParametersT]):
    """A text, or a list of them. The parameters may also stand beside the inputs."""

    parameters: ParametersT | None = None

    def merged(self, kind: type[ParametersT]) -> ParametersT:
        """The parameters from both places."""
        beside = {name: getattr(self, name) for name in kind.model_fields}
        inside = {} if self.parameters is None else self.parameters.model_dump(exclude_none=True)
        return kind.model_validate(beside | inside)

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        for name in () if self.parameters is None else type(self.parameters).model_fields:
            if None not in (getattr(self, name), getattr(self.parameters, name)):
                raise ValueError(f"parameters.{name}: also given beside the inputs")
        return self


class EmbedBody(Lenient, EmbedParameters, VectorsBody[EmbedParameters]):
    """A text, or a list of them, to turn into vectors."""

    model_config = example({"inputs": ["The ship left at dawn.", "She baked bread."]})

    @property
    def form(self) -> VectorForm:
        """How the vectors are to be written."""
        return self.merged(EmbedParameters)

    def request(self) -> EmbedRequest:
        given = self.merged(EmbedParameters)
        return EmbedRequest(
            self.texts,
            *given.prompting,
            given.normalize,
            given.dimensions,
            given.dtypes,
            given.task,
        )


class SparseEmbedBody(Lenient, PromptParameters, VectorsBody[PromptParameters]):
    """A text, or a list of them, to turn into weights of the vocabulary."""

    model_config = example({"inputs": "The ship left at dawn."})

    def request(self) -> SparseEmbedRequest:
        return SparseEmbedRequest(self.texts, *self.merged(PromptParameters).prompting)


class MuveraParameters(Wire):
    """How token vectors become one (MUVERA). Queries and documents need the same."""

    k_sim: Annotated[int, Range(0, 10)] | None = Field(None, description="Default: 5 planes.")
    dim_proj: Annotated[int, Range(1)] | None = Field(None, description="Default: 16.")
    r_reps: Annotated[int, Range(1, 100)] | None = Field(None, description="Default: 20.")
    random_seed: Annotated[int, Range(0)] | None = Field(None, description="Default: 42.")
    final_dimension: Annotated[int, Range(1)] | None = Field(None, description="Default: none.")


class EmbedAllParameters(TruncationParameters):
    """Parameters of `/embed-all`."""

    prompt_name: Literal["query", "document"] | None = Field(
        None, description="Whether the texts are queries or documents. Default: document."
    )
    pool_factor: Annotated[float, Range(1, 1000)] | None = Field(
        None,
        description="Pool about this many vectors of a document into one. Default: as trained.",
    )
    muvera: MuveraParameters | None = Field(
        None, description="Make one vector of all of a text, and say of what. Default: no."
    )


class EmbedAllBody(Lenient, EmbedAllParameters, VectorsBody[EmbedAllParameters]):
    """A text, or a list of them, to turn into a vector for each token."""

    model_config = example({"inputs": ["Where is the ship?"], "prompt_name": "query"})

    def request(self) -> EmbedAllRequest:
        given = self.merged(EmbedAllParameters)
        wanted = given.muvera
        muvera = None if wanted is None else Muvera(**wanted.given(*type(wanted).model_fields))
        return EmbedAllRequest(
            self.texts,
            given.truncation,
            given.prompt_name,
            pool_factor=given.pool_factor,
            muvera=muvera,
        )


class HybridEmbedParameters(PromptParameters):
    """Parameters of `/embed-hybrid`."""

    outputs: Annotated[list[VectorKind], Size(1, 3, "kinds")] | None = Field(
        None, description="Kinds of vectors to return. Default: all three."
    )


class HybridEmbedBody(HybridEmbedParameters, VectorsBody[HybridEmbedParameters]):
    """A text, or a list of them, to turn into vectors of several kinds."""

    model_config = example({"inputs": "The ship left at dawn.", "outputs": ["dense", "sparse"]})

    def request(self) -> HybridEmbedRequest:
        given = self.merged(HybridEmbedParameters)
        outputs = given.outputs or get_args(VectorKind)
        return HybridEmbedRequest(self.texts, *given.prompting, outputs)


def _check_chunks(value: object) -> object:
    if not isinstance(value, list):
        raise ValueError("must be a list of [start, end]")
    for index, chunk in enumerate(value):
        if not (isinstance(chunk, list) and [*map(type, chunk)] == [int, int]):
            raise ValueError(f"item {index} must be [start, end], in characters")
        if not 0 <= chunk[0] < chunk[1]:
            raise ValueError(f"item {index} must begin at 0 or later, and before it ends")
    return [tuple(chunk) for chunk in value]


_Place = Annotated[int, Field(json_schema_extra={"minimum": 0})]


class ChunkEmbedBody(TruncationParameters, MaskedBody):
    """A text, and chunks of it to turn into vectors."""

    model_config = example(
        {"inputs": "The ship left at dawn. It was loaded.", "chunks": [[0, 22], [22, 37]]}
    )

    inputs: Text
    chunks: Annotated[
        list[tuple[_Place, _Place]],
        Size(1, 4096, "chunks"),
        pydantic.BeforeValidator(_check_chunks),
    ] = Field(description="Where the chunks begin and end, in characters of the text.")
    normalize: bool | None = Field(None, description="Scale vectors to length 1. Default: true.")

    def request(self) -> ChunkEmbedRequest:
        return ChunkEmbedRequest(
            self.inputs, self.chunks, self.truncation, self.normalize is not False
        )

    @property
    def batch(self) -> bool:
        return True


class SimilarityParameters(PromptParameters):
    """Parameters of `/similarity`."""

    task: Text | None = Field(None, description=TRAINED_TASK)


class SimilarityInputs(Wire):
    """A sentence, and those to compare it with."""

    source_sentence: Text
    sentences: Annotated[list[Text], Size(1, LARGEST_INT, "sentences")]


class SimilarityBody(Lenient, MaskedBody):
    """A sentence, and those to compare it with."""

    spellings = {  # noqa: RUF012
        "texts": "inputs.sentences",
        "source": "inputs.source_sentence",
        "sentences": "inputs.sentences",
    }

    model_config = example(
        {"inputs": {"source_sentence": "A ship sails.", "sentences": ["A boat leaves.", "Bread."]}}
    )

    inputs: SimilarityInputs
    parameters: SimilarityParameters | None = None

    def request(self) -> SimilarityRequest:
        parameters = self.parameters or SimilarityParameters()
        return SimilarityRequest(
            self.inputs.source_sentence,
            self.inputs.sentences,
            *parameters.prompting,
            parameters.task,
        )

    @property
    def batch(self) -> bool:
        return True


class StoredVectorsBody(Wire):
    """Documents as the vectors of their tokens, which `/embed-all` gave."""

    documents: Annotated[list[list[list[float]] | str], Size(1, LARGEST_INT, "documents")] = Field(
        description="A list of vectors for each document, or their bytes as base64."
    )
    dtype: OutputDtype | None = Field(
        None, description="What they consist of, as output_dtype of /embed. Default: float."
    )
    scale: Annotated[float, Range(0, 1e6, above_low=True)] | None = Field(
        None, description="What a step of int8 or uint8 is worth. Default: as /embed has them."
    )


class RerankBody(Lenient, TruncationParameters, MaskedBody):
    """A query, and texts to put in order."""

    spellings = {}  # noqa: RUF012

    model_config = example(
        {"query": "Where is the ship?", "texts": ["The ship left at dawn.", "She baked bread."]}
    )

    query: Text
    texts: Annotated[list[Text], Size(1, LARGEST_INT, "texts")] | None = None
    vectors: StoredVectorsBody | None = Field(
        None, description="Stored documents in place of texts, for late-interaction models."
    )
    raw_scores: bool | None = Field(
        None,
        description="Return logits instead of their sigmoids. Default: false. The scores of "
        "late-interaction models are sums of products either way.",
    )
    return_text: bool | None = Field(
        None, description="Return the texts with their scores. Default: false."
    )
    instruction: Text | None = Field(None, description=INSTRUCTION_IN_TEMPLATE)
    top_n: Annotated[int, Range(1)] | None = Field(
        None, description="Return this many of the best texts. Default: all."
    )

    def request(self) -> RerankRequest:
        given = self.given("raw_scores", "instruction", "top_n")
        if self.vectors is not None:
            stored = self.vectors.given("documents", "dtype", "scale")
            given["vectors"] = StoredVectors(**stored)
        return RerankRequest(self.query, self.texts or (), self.truncation, **given)

    @model_validator(mode="after")
    def _check_documents(self) -> Self:
        if (self.texts is None) == (self.vectors is None):
            raise FieldError("texts", "must be given, or vectors in place of them, not both")
        if self.vectors is not None and self.return_text:
            raise FieldError("return_text", "there are vectors and no texts; leave it out")
        return self
