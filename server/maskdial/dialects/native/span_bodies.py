"""The bodies of the tasks that find spans of a text: `/token-classify`, `/redact` and
`/question-answering`.
"""

from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field, model_validator

from maskdial.bounds import Range, Size
from maskdial.dialects.body import AT_LEAST_ONE, AnyText, TextsBody, Wire, enumerate_inputs, example
from maskdial.dialects.masked_body import Labels, MaskedBody
from maskdial.errors import shortened
from maskdial.masked.tasks.entities import EntitiesRequest
from maskdial.masked.tasks.question_answering import QAPair, QuestionAnsweringRequest
from maskdial.masked.tasks.redact import TEMPLATE, Cover, RedactRequest
from maskdial.masked.tasks.token_classify import AggregationStrategy, TokenClassifyRequest


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
