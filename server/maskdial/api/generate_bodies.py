"""The wire schemas of `/generate`: prompts and conversations, sampling parameters, grammars.

Fields that are null count as not given; unknown fields are refused.
"""

from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field, ValidationInfo, field_validator, model_validator

from maskdial.api.schema import LARGEST_INT, Range, Size, TaskBody, Wire, check_texts, shortened

_TokenId = Annotated[int, Range(0)]


def _check_grammar_value(value: object) -> object:
    if value is None or isinstance(value, str | dict | bool):
        return value
    raise ValueError("must be an object, a string, true or false")


class Grammar(Wire):
    """What the generated text has to be, named as in text-generation-inference.

    ``value`` is a JSON schema (as an object or its text; without one, ``json`` is any object), a
    regular expression, or a Lark grammar.
    """

    type: Literal["json", "json_schema", "regex", "lark"]
    value: Annotated[
        str | dict[str, Any] | bool | None, pydantic.BeforeValidator(_check_grammar_value)
    ] = Field(None, validate_default=True)

    @field_validator("value")
    @classmethod
    def _check_text(cls, value: object, info: ValidationInfo) -> object:
        kind = info.data.get("type")
        if kind in ("regex", "lark") and not (isinstance(value, str) and value):
            raise ValueError(f"must be a string that holds a {kind} grammar")
        return value


_StopText = Annotated[str, Size(0, 1024, "characters")]


def _check_token_keys(biases: dict[str, float]) -> dict[str, float]:
    for key in biases:
        canonical = key.isascii() and key.isdecimal() and str(int(key[:11])) == key
        if not canonical or int(key) > LARGEST_INT:
            raise ValueError(f'a key must be a token id, such as "42", not {shortened(key)!r}')
    return biases


class GenerateParameters(Wire):
    """What `/generate` takes, named as in text-generation-inference, vLLM and transformers."""

    max_new_tokens: Annotated[int, Range(1)] | None = Field(None, description="100")
    min_new_tokens: Annotated[int, Range(0)] | None = Field(
        None, description="until then neither end-of-sequence nor stop ends the text; 0"
    )
    do_sample: bool | None = Field(
        None, description="whether to sample; by whether a sampling parameter is given"
    )
    temperature: Annotated[float, Range(0, 100)] | None = Field(None, description="0: greedy")
    top_k: Annotated[int, Range(0)] | None = Field(None, description="0: off")
    top_p: Annotated[float, Range(0, 1)] | None = Field(None, description="1: off")
    min_p: Annotated[float, Range(0, 1)] | None = Field(
        None, description="a share of the likeliest token's probability; 0: off"
    )
    typical_p: Annotated[float, Range(0, 1, above_low=True)] | None = Field(
        None, description="1: off"
    )
    repetition_penalty: Annotated[float, Range(0.01, 100)] | None = Field(
        None, description="on tokens of the prompt and the text; 1: off"
    )
    frequency_penalty: Annotated[float, Range(-2, 2)] | None = Field(
        None, description="for each time that a token was generated; 0: off"
    )
    presence_penalty: Annotated[float, Range(-2, 2)] | None = Field(
        None, description="on tokens that were generated; 0: off"
    )
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Range(-100, 100)]],
            Size(0, 1024, "token ids"),
            pydantic.AfterValidator(_check_token_keys),
        ]
        | None
    ) = Field(None, description="token id to what is added to its logit")
    seed: Annotated[int, Range(0, 2**63 - 1)] | None = Field(None, description="drawn if absent")
    stop: Annotated[list[_StopText], Size(0, 64, "texts")] | None = Field(
        None, description="texts that end the generation"
    )
    stop_token_ids: Annotated[list[_TokenId], Size(0, 256, "token ids")] | None = Field(
        None, description="tokens that end the generation"
    )
    ignore_eos: bool | None = Field(None, description="go on after the end-of-sequence token")
    return_full_text: bool | None = Field(None, description="begin with the prompt")
    truncate: Annotated[int, Range(1)] | None = Field(
        None, description="keep the prompt's last tokens, so many; all"
    )
    details: bool | None = Field(None, description="tokens, log-probabilities and the reason")
    decoder_input_details: bool | None = Field(
        None, description="the prompt's tokens and log-probabilities, in details.prefill"
    )
    top_n_tokens: Annotated[int, Range(0, 20)] | None = Field(
        None, description="the likeliest tokens beside each chosen one; 0"
    )
    n: Annotated[int, Range(1, 128)] | None = Field(None, description="texts in the reply; 1")
    best_of: Annotated[int, Range(1, 128)] | None = Field(
        None, description="texts generated, of which the n best are the reply; n"
    )
    grammar: Grammar | None = Field(None, description="what the text has to be")
    watermark: Literal[False] | None = Field(None, description="texts are not watermarked")

    @field_validator("min_new_tokens")
    @classmethod
    def _not_above_max(cls, value: int | None, info: ValidationInfo) -> int | None:
        most = info.data.get("max_new_tokens")
        if value is not None and most is not None and value > most:
            raise ValueError(f"must be at most max_new_tokens ({most}), not {value}")
        return value

    @field_validator("best_of")
    @classmethod
    def _not_below_n(cls, value: int | None, info: ValidationInfo) -> int | None:
        n = info.data.get("n")
        if value is not None and n is not None and value < n:
            raise ValueError(f"must be at least n ({n}), not {value}")
        return value

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn: as asked, or else if a parameter of sampling is given."""
        if self.do_sample is not None:
            return self.do_sample
        given = (self.temperature, self.top_k, self.top_p, self.min_p, self.typical_p)
        return any(value is not None for value in given)

    @property
    def num_sequences(self) -> int:
        """How many texts are generated for each prompt."""
        return self.best_of or self.n or 1

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """``stop`` without empty texts, which would end every text at once."""
        return tuple(text for text in self.stop or () if text)

    @property
    def token_biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as pairs of token id and bias."""
        return tuple((int(key), bias) for key, bias in (self.logit_bias or {}).items())


def _join_parts(content: object) -> object:
    """The text of a message in parts, one a line, as vLLM joins them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError('must be a string or a list of {"type": "text", "text": "..."}')
    for index, part in enumerate(content):
        shaped = isinstance(part, dict) and part.keys() == {"type", "text"}
        if not shaped or part["type"] != "text" or not isinstance(part["text"], str):
            raise ValueError(f'part {index} must be {{"type": "text", "text": "..."}}')
    return "\n".join(part["text"] for part in content)


class TextPart(Wire):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Wire):
    """One message of a conversation. ``content`` may be sent in parts, and is joined then."""

    role: Annotated[str, Size(1, 64, "characters")]
    content: Annotated[
        str, pydantic.BeforeValidator(_join_parts, json_schema_input_type=str | list[TextPart])
    ]


def _check_prompts(value: object) -> object:
    return "" if value is None else check_texts(value)


class GenerateBody(TaskBody):
    """A prompt, a list of them where the reply is not streamed, or a conversation.

    ``inputs`` is empty when there are ``messages``.
    """

    inputs: Annotated[str | list[str], pydantic.BeforeValidator(_check_prompts)] = Field(
        "", description="a prompt, or several; or else there are messages"
    )
    messages: Annotated[list[ChatMessage], Size(1, 1024, "messages")] | None = Field(
        None, description="a conversation, written as the model's chat template says"
    )
    parameters: GenerateParameters | None = None
    stream: bool | None = None
    priority: Annotated[int, Range(-100, 100)] | None = Field(
        None, description="lower is earlier; 0"
    )
    cache_salt: Annotated[str, Size(1, 256, "characters")] | None = Field(
        None, description="prompts share cached prefixes only with requests of the same salt"
    )

    @model_validator(mode="after")
    def _check_one_prompt(self) -> Self:
        if not self.inputs and self.messages is None:
            raise ValueError("inputs: give a prompt as inputs, or a conversation as messages")
        if self.inputs and self.messages is not None:
            raise ValueError("messages: give either inputs or messages, not both")
        return self

    @property
    def batch(self) -> bool:
        """Whether the prompts are a list, so that the reply is one."""
        return isinstance(self.inputs, list)

    @property
    def prompts(self) -> list[str]:
        """The prompts of ``inputs``, also if it is one; none for a conversation."""
        if self.messages is not None:
            return []
        return self.inputs if isinstance(self.inputs, list) else [self.inputs]

    @property
    def conversation(self) -> list[dict[str, str]]:
        """The messages as a chat template takes them; none without ``messages``."""
        return [message.model_dump() for message in self.messages or ()]
