"""The wire schemas of the routes that read texts: what a body may hold.

Fields that are null count as not given; unknown fields are refused.
"""

from typing import Annotated, Literal, Self

import pydantic
from pydantic import Field, model_validator

from maskdial.api.schema import (
    LARGEST_INT,
    Range,
    Size,
    TaskBody,
    Texts,
    Wire,
    enumerate_inputs,
    shortened,
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


def _check_not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return text


_Text = Annotated[str, pydantic.AfterValidator(_check_not_blank)]


def _lower_case(value: object) -> object:
    """Clients of text-embeddings-inference write ``"Left"`` and ``"Right"``."""
    return value.lower() if isinstance(value, str) else value


class Truncation(Wire):
    """What is done with a text that is longer than the model."""

    truncate: bool | None = Field(None, description="cut it, and say so; else it is refused")
    truncation_direction: (
        Annotated[Literal["left", "right"], pydantic.BeforeValidator(_lower_case)] | None
    ) = Field(None, description="which end is cut off; right")


class FillMaskParameters(Truncation):
    """What `/fill-mask` takes."""

    top_k: Annotated[int, Range(1)] | None = Field(None, description="answers per mask; 5")
    targets: (
        Annotated[list[Annotated[str, Size(0, 256, "characters")]], Size(1, 1024, "words")] | None
    ) = Field(None, description="score only these words, one token each")


class FillMaskBody(TaskBody):
    """A text, or a list of them, each with one or more masks."""

    inputs: Texts
    parameters: FillMaskParameters | None = None


class TextPair(Wire):
    """Two texts read as one input."""

    text: str
    text_pair: str


class ClassifyParameters(Truncation):
    """What `/classify` takes."""

    top_k: Annotated[int, Range(1)] | None = Field(None, description="labels returned; all")
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = Field(
        None, description="what turns logits into scores; by the model's problem type"
    )


class ClassifyBody(TaskBody):
    """A text, a pair, or a list of texts and pairs."""

    inputs: Annotated[
        str | TextPair | list[str | TextPair], pydantic.BeforeValidator(_check_texts_or_pairs)
    ]
    parameters: ClassifyParameters | None = None


class TokenClassifyParameters(Wire):
    """What `/token-classify` takes. A long text is read in windows."""

    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] | None = Field(
        None, description="how tokens become entities, as in transformers; simple"
    )
    ignore_labels: list[str] | None = Field(None, description='labels left out; ["O"]')
    stride: Annotated[int, Range(0)] | None = Field(
        None, description="tokens that two windows of a long text share; a quarter of a window"
    )


class TokenClassifyBody(TaskBody):
    """A text, or a list of them."""

    inputs: Texts
    parameters: TokenClassifyParameters | None = None


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


class Question(Wire):
    """A question and the text that holds its answer."""

    question: str
    context: str


class QuestionAnsweringParameters(Wire):
    """What `/question-answering` takes, named as in transformers."""

    top_k: Annotated[int, Range(1)] | None = Field(None, description="answers; 1")
    doc_stride: Annotated[int, Range(0)] | None = Field(
        None,
        description="tokens that two windows of a long context share; half a window, 128 at most",
    )
    max_answer_len: Annotated[int, Range(1)] | None = Field(None, description="in tokens; 15")
    max_question_len: Annotated[int, Range(1)] | None = Field(
        None, description="tokens to which a longer question is cut; it is not cut"
    )
    max_seq_len: Annotated[int, Range(1)] | None = Field(
        None, description="tokens in one window, the question among them; 384 or the model's most"
    )
    handle_impossible_answer: bool | None = Field(
        None, description="let no answer, an empty one, compete; false"
    )
    align_to_words: bool | None = Field(None, description="answer in whole words; true")


class QuestionAnsweringBody(TaskBody):
    """A question about a context, or a list of them."""

    inputs: Annotated[Question | list[Question], pydantic.BeforeValidator(_check_questions)]
    parameters: QuestionAnsweringParameters | None = None


def _check_template(template: str) -> str:
    if "{}" not in template:
        raise ValueError("must have {} where the label goes")
    return template


class ZeroShotClassifyParameters(Truncation):
    """What `/zero-shot-classify` takes."""

    candidate_labels: Annotated[
        list[Annotated[str, Size(1, 1024, "characters")]], Size(1, 256, "labels")
    ] = Field(description="what the text may be about")
    multi_label: bool | None = Field(None, description="each label for itself; false")
    hypothesis_template: (
        Annotated[str, Size(2, 1024, "characters"), pydantic.AfterValidator(_check_template)] | None
    ) = Field(None, description='a sentence with {} for the label; "This example is {}."')


class ZeroShotClassifyBody(TaskBody):
    """A text, or a list of them, and the labels to choose from."""

    inputs: Texts
    parameters: ZeroShotClassifyParameters


class EmbedParameters(Truncation):
    """What `/embed` takes."""

    normalize: bool | None = Field(None, description="to length 1; as the model was trained")
    dimensions: Annotated[int, Range(1)] | None = Field(
        None, description="keep the first so many, and normalize again; all"
    )


class EmbedBody(EmbedParameters, TaskBody):
    """A text, or a list of them. The parameters may also stand beside the inputs."""

    inputs: Texts
    parameters: EmbedParameters | None = None

    @property
    def settings(self) -> EmbedParameters:
        """The parameters, from both places."""
        names = EmbedParameters.model_fields
        beside = {name: getattr(self, name) for name in names}
        inside = {} if self.parameters is None else self.parameters.model_dump(exclude_none=True)
        return EmbedParameters.model_validate(beside | inside)

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        for name in EmbedParameters.model_fields:
            if None not in (getattr(self, name), getattr(self.parameters, name, None)):
                raise ValueError(f"parameters.{name}: it is given beside the inputs already")
        return self


class SimilarityInputs(Wire):
    """A sentence, and those to compare with it."""

    source_sentence: _Text
    sentences: Annotated[list[_Text], Size(1, LARGEST_INT, "sentences")]


class SimilarityBody(TaskBody):
    """A sentence, and those to compare with it."""

    inputs: SimilarityInputs
    parameters: Truncation | None = None


class RerankBody(Truncation, TaskBody):
    """A query, and texts to put in order."""

    query: _Text
    texts: Annotated[list[_Text], Size(1, LARGEST_INT, "texts")]
    raw_scores: bool | None = Field(None, description="logits in the place of sigmoids; false")
    return_text: bool | None = Field(None, description="send the texts back; false")


class ScoreBody(TaskBody):
    """A text, or a list of them, to be judged by how likely the model finds it."""

    inputs: Texts
    parameters: Truncation | None = None


class TokenizeBody(TaskBody):
    """A text, or a list of them."""

    inputs: Texts
    add_special_tokens: bool | None = Field(None, description="as the model takes it; true")


def _check_ids(value: object) -> object:
    """A list of token ids, or of such lists; the model says how large an id may be."""
    if not isinstance(value, list):
        raise ValueError("must be a list of token ids, or a list of such lists")
    nested = any(isinstance(item, list) for item in value)
    for index, item in enumerate(value):
        ids = item if isinstance(item, list) else None if nested else [item]
        good = ids is not None and all(type(each) is int and each >= 0 for each in ids)
        if not good:
            kind = "a list of token ids" if nested else "a token id"
            raise ValueError(f"ids[{index}] must be {kind}, which are integers of at least 0")
    return value


class DetokenizeBody(TaskBody):
    """Token ids of a text, or of several."""

    ids: Annotated[list[int] | list[list[int]], pydantic.BeforeValidator(_check_ids)]
    skip_special_tokens: bool | None = Field(None, description="true")

    @property
    def texts(self) -> list[list[int]]:
        """The ids of each text."""
        lists = [each for each in self.ids if isinstance(each, list)]
        return lists or [[each for each in self.ids if isinstance(each, int)]]
