"""The bodies of the masked family's routes, and the requests that they become.

They are the Hugging Face task API's, text-embeddings-inference's for `/rerank` and `/embed`. Null
means not given; unknown fields are refused.
"""

import abc
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

import pydantic
from pydantic import Field, model_validator

from maskdial.bounds import LARGEST_INT, Range, Size
from maskdial.dialects.body import (
    AT_LEAST_ONE,
    AnyText,
    FieldError,
    TaskBody,
    TextsBody,
    Wire,
    enumerate_inputs,
    example,
)
from maskdial.dialects.vectors import VectorForm
from maskdial.errors import shortened
from maskdial.masked.tasks.classify import ClassifyRequest, ScoreFunction
from maskdial.masked.tasks.embed import EmbedRequest, SimilarityRequest, SparseEmbedRequest
from maskdial.masked.tasks.embed_all import EmbedAllRequest
from maskdial.masked.tasks.embed_chunks import ChunkEmbedRequest
from maskdial.masked.tasks.embed_hybrid import HybridEmbedRequest, VectorKind
from maskdial.masked.tasks.entities import EntitiesRequest
from maskdial.masked.tasks.fill_mask import FillMaskRequest
from maskdial.masked.tasks.question_answering import QAPair, QuestionAnsweringRequest
from maskdial.masked.tasks.redact import TEMPLATE, Cover, RedactRequest
from maskdial.masked.tasks.rerank import RerankRequest
from maskdial.masked.tasks.task import TaskRequest, TextOrPair, Truncation
from maskdial.masked.tasks.token_classify import AggregationStrategy, TokenClassifyRequest
from maskdial.masked.tasks.zero_shot import ZeroShotRequest
from maskdial.score import ScoreRequest


def _check_not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


Text = Annotated[AnyText, pydantic.AfterValidator(_check_not_blank)]


def _lower_case(value: object) -> object:
    """Clients of text-embeddings-inference write ``"Left"`` and ``"Right"``."""
    return value.lower() if isinstance(value, str) else value


class TruncationParameters(Wire):
    """What to do with a text that is longer than the model."""

    truncate: bool | None = Field(
        None,
        description="Truncate texts that are too long, instead of refusing them. Default: as the "
        "server is set (--auto-truncate), otherwise false.",
    )
    truncation_direction: (
        Annotated[Literal["left", "right"], pydantic.BeforeValidator(_lower_case)] | None
    ) = Field(None, description="Side to truncate. Default: the side of the model's own tokenizer.")

    @property
    def truncation(self) -> Truncation:
        return Truncation(self.truncate, self.truncation_direction)


class FillMaskParameters(TruncationParameters):
    """Parameters of `/fill-mask`."""

    top_k: Annotated[int, Range(1)] | None = Field(
        None, description="Number of fillings per mask. Default: 5."
    )
    targets: (
        Annotated[list[Annotated[str, Size(0, 256, "characters")]], Size(1, 1024, "words")] | None
    ) = Field(None, description="Only score these words, each a single token.")


class MaskedBody(TaskBody, abc.ABC):
    """A body that becomes a request to a masked model."""

    spellings = {"texts": "inputs"}  # noqa: RUF012

    @property
    @abc.abstractmethod
    def batch(self) -> bool:
        """Whether the texts came as a list, so that errors say which one is wrong."""

    @abc.abstractmethod
    def request(self) -> TaskRequest[Any]:
        """The body as a dialect-neutral request."""


class FillMaskBody(TextsBody, MaskedBody):
    """A text with one or more masks, or a list of them."""

    model_config = example({"inputs": "The old king lived in a [MASK] by the sea."})

    parameters: FillMaskParameters | None = None

    def request(self) -> FillMaskRequest:
        parameters = self.parameters or FillMaskParameters()
        return FillMaskRequest(
            self.texts, parameters.truncation, **parameters.given("top_k", "targets")
        )


class TextPair(Wire):
    """Two texts that the model reads as one input."""

    text: AnyText
    text_pair: AnyText


class ClassifyParameters(TruncationParameters):
    """Parameters of `/classify`."""

    top_k: Annotated[int, Range(1)] | None = Field(
        None, description="Number of labels to return. Default: all."
    )
    function_to_apply: ScoreFunction | None = Field(
        None,
        description="Function from logits to scores. Default: by the model's problem type "
        "(none for regression, sigmoid for independent labels, otherwise softmax).",
    )


def _check_texts_or_pairs(value: object) -> object:
    if isinstance(value, list) and not value:
        raise ValueError("must hold at least one text")
    for where, item in enumerate_inputs(value):
        if isinstance(item, dict):
            if set(item) != {"text", "text_pair"}:
                raise ValueError(f'{where}a pair is {{"text": "...", "text_pair": "..."}}')
            texts = list(item.values())
        else:
            texts = [item]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}must be a string or a pair of strings")
        if not all(text.strip() for text in texts):
            raise ValueError(f"{where}must not be empty")
    return value


class ClassifyBody(MaskedBody):
    """A text, a pair of texts, or a list of texts and pairs."""

    model_config = example({"inputs": "A warm, funny and quietly moving film."})

    inputs: Annotated[
        AnyText
        | TextPair
        | Annotated[list[AnyText | TextPair], Field(json_schema_extra=AT_LEAST_ONE)],
        pydantic.BeforeValidator(_check_texts_or_pairs),
    ] = Field(description="A text, a pair of texts, or a list of texts and pairs.")
    parameters: ClassifyParameters | None = None

    def request(self) -> ClassifyRequest:
        parameters = self.parameters or ClassifyParameters()
        items = self.inputs if isinstance(self.inputs, list) else [self.inputs]
        texts: list[TextOrPair] = [
            (item.text, item.text_pair) if isinstance(item, TextPair) else (item, None)
            for item in items
        ]
        return ClassifyRequest(
            texts, parameters.truncation, parameters.function_to_apply, parameters.top_k
        )

    @property
    def batch(self) -> bool:
        return isinstance(self.inputs, list)


Labels = Annotated[list[Annotated[Text, Size(1, 1024, "characters")]], Size(1, 1024, "labels")]


class TokenClassifyParameters(Wire):
    """Parameters of `/token-classify`. Long texts are read in windows."""

    candidate_labels: Labels | None = Field(
        None, description="Labels to find, of a GLiNER model, which has none of its own."
    )
    threshold: Annotated[float, Range(0, 1)] | None = Field(
        None,
        description="Score that an entity of these labels exceeds. Default: 0.5.",
    )
    flat_ner: bool | None = Field(
        None,
        description="Whether no two entities of these labels overlap; otherwise one may lie within "
        "another. Default: true.",
    )
    multi_label: bool | None = Field(
        None, description="Whether a span may have several of these labels. Default: false."
    )
    aggregation_strategy: AggregationStrategy | None = Field(
        None,
        description="How tokens are merged into entities, as in transformers. Default: simple.",
    )
    ignore_labels: list[str] | None = Field(
        None, description='Labels to leave out, of a model\'s own. Default: ["O"].'
    )
    stride: Annotated[int, Range(0)] | None = Field(
        None,
        description="Tokens that neighboring windows of a long text share. Default: a quarter of a "
        "window.",
    )

    @model_validator(mode="after")
    def _fits_labels(self) -> Self:
        """Refuses settings of models with labels of their own for others, and the reverse."""
        if self.candidate_labels is None:
            others, of = self.given("threshold", "flat_ner", "multi_label"), "candidate_labels"
        else:
            others, of = self.given("aggregation_strategy", "ignore_labels"), "a model's own labels"
        for name in others:
            raise ValueError(f"{name} is for {of}; leave it out")
        return self


class TokenClassifyBody(TextsBody, MaskedBody):
    """A text, or a list of them."""

    model_config = example({"inputs": "Alice took the train from Paris to Rome."})

    parameters: TokenClassifyParameters | None = None

    def request(self) -> TokenClassifyRequest | EntitiesRequest:
        parameters = self.parameters or TokenClassifyParameters()
        if parameters.candidate_labels is not None:
            return EntitiesRequest(
                self.texts,
                parameters.candidate_labels,
                flat=parameters.flat_ner is not False,
                multi_label=bool(parameters.multi_label),
                **parameters.given("threshold", "stride"),
            )
        own = ("aggregation_strategy", "ignore_labels", "stride")
        return TokenClassifyRequest(self.texts, **parameters.given(*own))


Template = Annotated[str, Size(0, 256, "characters")]


class RedactParameters(Wire):
    """Parameters of `/redact`. Long texts are read in windows."""

    labels: Labels | None = Field(
        None,
        description="Labels to redact: any of a GLiNER model, of another some of its own. "
        "Default: all of its own.",
    )
    threshold: Annotated[float, Range(0, 1)] | None = Field(
        None,
        description="Score that an entity exceeds. Default: 0.5 with a GLiNER model, otherwise 0.",
    )
    replacement: (
        Template
        | Annotated[
            dict[Annotated[str, Size(1, 1024, "characters")], Template], Size(1, 1024, "labels")
        ]
        | None
    ) = Field(
        None,
        description="What to put in an entity's place, with {label} where its label goes; or one "
        'for each of some labels. Default: "[{label}]".',
    )
    mask_character: Annotated[str, Size(1, 1, "characters")] | None = Field(
        None,
        description="Character to put in the place of each one of an entity, instead of a "
        "replacement.",
    )
    return_original: bool | None = Field(
        None, description="Whether to return what was replaced. Default: false."
    )
    aggregation_strategy: Literal["simple", "first", "average", "max"] | None = Field(
        None,
        description="How tokens are merged into entities, of a model with labels of its own. "
        "Default: simple.",
    )
    stride: Annotated[int, Range(0)] | None = Field(
        None,
        description="Tokens that neighboring windows of a long text share. Default: a quarter of a "
        "window.",
    )

    @model_validator(mode="after")
    def _covers_in_one_way(self) -> Self:
        if self.replacement is not None and self.mask_character is not None:
            raise ValueError("replacement and mask_character exclude each other; leave one out")
        return self


class RedactBody(TextsBody, MaskedBody):
    """A text, or a list of them."""

    model_config = example({"inputs": "Alice took the train from Paris to Rome."})

    parameters: RedactParameters | None = None

    def request(self) -> RedactRequest:
        given = self.parameters or RedactParameters()
        how = given.replacement
        return RedactRequest(
            self.texts,
            cover=Cover(
                how if isinstance(how, str) else TEMPLATE,
                how if isinstance(how, dict) else {},
                given.mask_character,
            ),
            keep_original=bool(given.return_original),
            **given.given("labels", "threshold", "aggregation_strategy", "stride"),
        )


def _check_questions(value: object) -> object:
    if isinstance(value, list) and not value:
        raise ValueError("must hold at least one question")
    for where, item in enumerate_inputs(value):
        if not (isinstance(item, dict) and {"question", "context"} <= item.keys()):
            raise ValueError(f'{where}must be {{"question": "...", "context": "..."}}')
        for name, text in item.items():
            if name not in ("question", "context"):
                raise ValueError(f"{where}{shortened(name)}: unknown field")
            if not isinstance(text, str):
                raise ValueError(f"{where}{name} must be a string")
            if not text.strip():
                raise ValueError(f"{where}{name} must not be empty")
    return value


class QuestionInput(Wire):
    """A question, and the text that holds its answer."""

    question: AnyText
    context: AnyText


class QuestionAnsweringParameters(Wire):
    """Parameters of `/question-answering`, named as in transformers."""

    top_k: Annotated[int, Range(1)] | None = Field(
        None, description="Number of answers. Default: 1."
    )
    doc_stride: Annotated[int, Range(0)] | None = Field(
        None,
        description="Tokens that neighboring windows of a long context share. Default: half a "
        "window, at most 128.",
    )
    max_answer_len: Annotated[int, Range(1)] | None = Field(
        None, description="Maximum length of an answer in tokens. Default: 15."
    )
    max_question_len: Annotated[int, Range(1)] | None = Field(
        None, description="Truncate longer questions to this many tokens. Default: no truncation."
    )
    max_seq_len: Annotated[int, Range(1)] | None = Field(
        None,
        description="Tokens in one window, including the question. Default: 384, or the model's "
        "maximum if that is less.",
    )
    handle_impossible_answer: bool | None = Field(
        None, description="Let the empty answer compete. Default: false."
    )
    align_to_words: bool | None = Field(
        None, description="Extend answers to whole words. Default: true."
    )


class QuestionAnsweringBody(MaskedBody):
    """A question about a context, or a list of them."""

    spellings = {"texts": "inputs", "questions": "inputs"}  # noqa: RUF012

    model_config = example(
        {
            "inputs": {
                "question": "Who kept the lighthouse?",
                "context": "Old Martha kept the lighthouse.",
            }
        }
    )

    inputs: Annotated[
        QuestionInput | Annotated[list[QuestionInput], Field(json_schema_extra=AT_LEAST_ONE)],
        pydantic.BeforeValidator(_check_questions),
    ] = Field(description="A question about a context, or a list of them.")
    parameters: QuestionAnsweringParameters | None = None

    def request(self) -> QuestionAnsweringRequest:
        parameters = self.parameters or QuestionAnsweringParameters()
        items = self.inputs if isinstance(self.inputs, list) else [self.inputs]
        return QuestionAnsweringRequest(
            [QAPair(item.question, item.context) for item in items],
            **parameters.given(*type(parameters).model_fields),
        )

    @property
    def batch(self) -> bool:
        return isinstance(self.inputs, list)


def _check_template(template: str) -> str:
    if "{}" not in template:
        raise ValueError("must have {} where the label goes")
    return template


class ZeroShotClassifyParameters(TruncationParameters):
    """Parameters of `/zero-shot-classify`."""

    candidate_labels: Annotated[
        list[Annotated[str, Size(1, 1024, "characters")]], Size(1, 256, "labels")
    ] = Field(description="Labels to choose from.")
    multi_label: bool | None = Field(
        None, description="Score each label independently. Default: false."
    )
    hypothesis_template: (
        Annotated[
            str,
            Size(2, 1024, "characters"),
            pydantic.AfterValidator(_check_template),
            Field(json_schema_extra={"pattern": r"\{\}"}),
        ]
        | None
    ) = Field(
        None,
        description='Sentence with {} in place of the label. Default: "This example is {}."; of a '
        "multiple-choice model, the label alone.",
    )


class ZeroShotClassifyBody(TextsBody, MaskedBody):
    """A text, or a list of them, and the labels to choose from."""

    model_config = example(
        {
            "inputs": "The harvest was poor.",
            "parameters": {"candidate_labels": ["farming", "music"]},
        }
    )

    parameters: ZeroShotClassifyParameters

    def request(self) -> ZeroShotRequest:
        parameters = self.parameters
        return ZeroShotRequest(
            self.texts,
            parameters.candidate_labels,
            parameters.truncation,
            **parameters.given("hypothesis_template", "multi_label"),
        )


INSTRUCTION_IN_PROMPT = (
    "What the texts are for, in place of the instruction in the model's prompt. Default: the "
    "prompt as it is."
)
INSTRUCTION_IN_TEMPLATE = (
    "What to look for, in place of the instruction in the model's template. Default: the "
    "template's own."
)


class PromptParameters(TruncationParameters):
    """Parameters of `/embed-sparse` and `/similarity`."""

    prompt_name: str | None = Field(
        None,
        description="Put the model's prompt of this name before every text. Default: the model's "
        "default prompt, if it has one.",
    )
    instruction: Text | None = Field(None, description=INSTRUCTION_IN_PROMPT)


class EmbedParameters(VectorForm, PromptParameters):
    """Parameters of `/embed`."""

    normalize: bool | None = Field(
        None, description="Scale vectors to length 1. Default: as the model was trained."
    )
    dimensions: Annotated[int, Range(1)] | None = Field(
        None, description="Keep the first dimensions only, and normalize again. Default: all."
    )


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


class EmbedBody(EmbedParameters, VectorsBody[EmbedParameters]):
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
            given.truncation,
            given.prompt_name,
            given.instruction,
            given.normalize,
            given.dimensions,
            given.dtypes,
        )


class SparseEmbedBody(PromptParameters, VectorsBody[PromptParameters]):
    """A text, or a list of them, to turn into weights of the vocabulary."""

    model_config = example({"inputs": "The ship left at dawn."})

    def request(self) -> SparseEmbedRequest:
        given = self.merged(PromptParameters)
        return SparseEmbedRequest(
            self.texts, given.truncation, given.prompt_name, given.instruction
        )


class EmbedAllParameters(TruncationParameters):
    """Parameters of `/embed-all`."""

    prompt_name: Literal["query", "document"] | None = Field(
        None, description="Whether the texts are queries or documents. Default: document."
    )


class EmbedAllBody(EmbedAllParameters, VectorsBody[EmbedAllParameters]):
    """A text, or a list of them, to turn into a vector for each token."""

    model_config = example({"inputs": ["Where is the ship?"], "prompt_name": "query"})

    def request(self) -> EmbedAllRequest:
        given = self.merged(EmbedAllParameters)
        return EmbedAllRequest(self.texts, given.truncation, given.prompt_name)


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
        return HybridEmbedRequest(
            self.texts,
            given.truncation,
            given.prompt_name,
            given.instruction,
            given.outputs or ("dense", "sparse", "multi_vector"),
        )


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

    @model_validator(mode="after")
    def _check_ends(self) -> Self:
        for index, (_, end) in enumerate(self.chunks):
            if end > len(self.inputs):
                raise FieldError(
                    f"chunks[{index}]",
                    f"ends at {end}, and the text has {len(self.inputs)} characters",
                )
        return self


class SimilarityInputs(Wire):
    """A sentence, and those to compare it with."""

    source_sentence: Text
    sentences: Annotated[list[Text], Size(1, LARGEST_INT, "sentences")]


class SimilarityBody(MaskedBody):
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
    parameters: PromptParameters | None = None

    def request(self) -> SimilarityRequest:
        parameters = self.parameters or PromptParameters()
        return SimilarityRequest(
            self.inputs.source_sentence,
            self.inputs.sentences,
            parameters.truncation,
            parameters.prompt_name,
            parameters.instruction,
        )

    @property
    def batch(self) -> bool:
        return True


class RerankBody(TruncationParameters, MaskedBody):
    """A query, and texts to put in order."""

    spellings = {}  # noqa: RUF012

    model_config = example(
        {"query": "Where is the ship?", "texts": ["The ship left at dawn.", "She baked bread."]}
    )

    query: Text
    texts: Annotated[list[Text], Size(1, LARGEST_INT, "texts")]
    raw_scores: bool | None = Field(
        None,
        description="Return logits instead of their sigmoids. Default: false. The scores of "
        "late-interaction models are sums of products either way.",
    )
    return_text: bool | None = Field(
        None, description="Return the texts with their scores. Default: false."
    )
    instruction: Text | None = Field(None, description=INSTRUCTION_IN_TEMPLATE)

    def request(self) -> RerankRequest:
        return RerankRequest(
            self.query, self.texts, self.truncation, **self.given("raw_scores", "instruction")
        )

    @property
    def batch(self) -> bool:
        return True


class ScoreBody(TextsBody):
    """A text, or a list of them, to be scored by how likely the model finds it."""

    model_config = example(
        {"model": "hybrid", "inputs": "The captain of the ship looked at the sea."}
    )

    parameters: TruncationParameters | None = None

    def request(self) -> ScoreRequest:
        parameters = self.parameters or TruncationParameters()
        return ScoreRequest(self.texts, parameters.truncation)
