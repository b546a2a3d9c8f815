"""The wire schemas of the task routes: what a body may hold, and the sentence when it does not.

Fields that are null count as not given; unknown fields are refused.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from maskdial.errors import ValidationError

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number, both inclusive; the error names them both."""

    low: float
    high: float | None = None

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        bounds = {"minimum": self.low} | ({} if self.high is None else {"maximum": self.high})
        return {**handler(schema), **bounds}

    def _check(self, value: float) -> float:
        if self.low <= value and (self.high is None or value <= self.high):
            return value
        bounds = (
            f"at least {self.low:g}"
            if self.high is None
            else f"between {self.low:g} and {self.high:g}"
        )
        raise ValueError(f"must be {bounds}, not {value:g}")


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _check_texts(value: object) -> object:
    if isinstance(value, list) and not value:
        raise ValueError("must hold at least one text")
    for where, item in _enumerate_inputs(value):
        if not isinstance(item, str):
            raise ValueError(f"{where}must be a string")
        if not item.strip():
            raise ValueError(f"{where}must not be empty")
    return value


def _check_texts_or_pairs(value: object) -> object:
    if isinstance(value, list) and not value:
        raise ValueError("must hold at least one text")
    for where, item in _enumerate_inputs(value):
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


def _enumerate_inputs(value: object) -> list[tuple[str, object]]:
    """The items of ``inputs``, each with the words that begin an error about it."""
    if isinstance(value, list):
        return [(f"inputs[{index}] ", item) for index, item in enumerate(value)]
    return [("", value)]


class FillMaskParameters(_Wire):
    """What `/fill-mask` takes."""

    top_k: Annotated[int, Range(1)] | None = Field(None, description="answers per mask; 5")
    targets: list[str] | None = Field(None, description="score only these words, one token each")


class FillMaskBody(_Wire):
    """A text, or a list of them, each with one or more masks."""

    inputs: Annotated[str | list[str], pydantic.BeforeValidator(_check_texts)]
    parameters: FillMaskParameters | None = None
    model: str | None = None


class TextPair(_Wire):
    """Two texts read as one input."""

    text: str
    text_pair: str


class ClassifyParameters(_Wire):
    """What `/classify` takes."""

    top_k: Annotated[int, Range(1)] | None = Field(None, description="labels returned; all")
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = Field(
        None, description="what turns logits into scores; by the model's problem type"
    )


class ClassifyBody(_Wire):
    """A text, a pair, or a list of texts and pairs."""

    inputs: Annotated[
        str | TextPair | list[str | TextPair], pydantic.BeforeValidator(_check_texts_or_pairs)
    ]
    parameters: ClassifyParameters | None = None
    model: str | None = None


class GenerateParameters(_Wire):
    """What `/generate` takes, named as in text-generation-inference."""

    max_new_tokens: Annotated[int, Range(1)] | None = Field(None, description="100")
    do_sample: bool | None = Field(
        None, description="whether to sample; by whether a sampling parameter is given"
    )
    temperature: Annotated[float, Range(0, 100)] | None = Field(None, description="0: greedy")
    top_k: Annotated[int, Range(0)] | None = Field(None, description="0: off")
    top_p: Annotated[float, Range(0, 1)] | None = Field(None, description="1: off")
    repetition_penalty: Annotated[float, Range(0.01, 100)] | None = Field(
        None, description="1: off"
    )
    seed: Annotated[int, Range(0, 2**63 - 1)] | None = Field(None, description="drawn if absent")
    stop: list[str] | None = Field(None, description="texts that end the generation")
    return_full_text: bool | None = Field(None, description="begin with the prompt")
    details: bool | None = Field(None, description="tokens, log-probabilities and the reason")


class GenerateBody(_Wire):
    """A prompt, or a list of them where the reply is not streamed."""

    inputs: Annotated[str | list[str], pydantic.BeforeValidator(_check_texts)]
    parameters: GenerateParameters | None = None
    stream: bool | None = None
    model: str | None = None


def parse_body(schema: type[Body], content: bytes) -> Body:
    """Reads a JSON body.

    Raises:
        ValidationError: it is not JSON or not as the schema says; the message names the field.
    """
    try:
        return schema.model_validate_json(content)
    except pydantic.ValidationError as error:
        raise ValidationError(_describe(error)) from error


def _describe(error: pydantic.ValidationError) -> str:
    """The first problem as a sentence, without echoing what was sent."""
    first = error.errors(include_url=False, include_input=False)[0]
    kind = first["type"]
    if kind == "json_invalid":
        return f"the body is not valid JSON: {first['ctx']['error']}"
    if not first["loc"]:
        return f"the body must be a JSON object: {first['msg']}"
    field = _field_name(first["loc"])
    if kind == "extra_forbidden":
        return f"{field}: unknown field"
    if kind == "missing":
        return f"{field}: this field is required"
    message = str(first["ctx"]["error"]) if kind == "value_error" else first["msg"]
    return message if message.startswith(field) else f"{field}: {message}"


def _field_name(loc: tuple[int | str, ...]) -> str:
    name = ""
    for part in loc:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name
