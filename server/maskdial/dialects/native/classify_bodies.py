"""The bodies of `/classify` and `/zero-shot-classify`."""

from typing import Annotated, Literal

import pydantic
from pydantic import Field

from maskdial.bounds import Range, Size
from maskdial.dialects.body import AT_LEAST_ONE, AnyText, TextsBody, Wire, enumerate_inputs, example
from maskdial.dialects.masked_body import MaskedBody, Text, TruncationParameters
from maskdial.masked.tasks.classify import ClassifyRequest, ScoreFunction
from maskdial.masked.tasks.task import TextOrPair
from maskdial.masked.tasks.zero_shot import ZeroShotRequest


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
    windows: Literal["max"] | None = Field(
        None,
        description="Read a text that is longer than the model in windows; each label has its "
        "largest score, with that window's place. Default: such a text is refused, or truncated.",
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
            texts,
            parameters.truncation,
            parameters.function_to_apply,
            parameters.top_k,
            parameters.windows is not None,
        )


def _check_template(template: str) -> str:
    if "{}" not in template:
        raise ValueError("must have {} where the label goes")
    return template


class ZeroShotClassifyParameters(TruncationParameters):
    """Parameters of `/zero-shot-classify`."""

    candidate_labels: Annotated[
        list[Annotated[Text, Size(1, 1024, "characters")]], Size(1, 256, "labels")
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
