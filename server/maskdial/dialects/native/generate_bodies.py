"""The bodies of `/generate`: prompts and conversations, sampling parameters, grammars.

They are text-generation-inference's, with parameters of vLLM and transformers. Null means not
given.
"""

from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field, ValidationInfo, field_validator, model_validator

from maskdial.bounds import Range, Size
from maskdial.causal.generation_config import GenerationDefaults
from maskdial.causal.request import MAX_BEAMS, Conversation, GenerationRequest, Writing
from maskdial.causal.sampling.params import Count, NewTokens, SamplingParams
from maskdial.dialects.body import (
    AT_LEAST_ONE,
    MAX_MESSAGES,
    AnyText,
    FieldError,
    TaskBody,
    Wire,
    check_texts,
    example,
    join_parts,
)
from maskdial.dialects.guided import Schema
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.sampling import SamplingFields, Scheduling, parameter
from maskdial.dialects.unmasking import UnmaskingFields
from maskdial.grammar.source import GrammarRequest, RequestGrammarKind


def _check_early_stopping(value: object) -> object:
    if isinstance(value, bool) or value == "never":
        return value
    raise ValueError('must be true, false or "never"')


class GrammarParameter(Wire):
    """What a text has to match, as in text-generation-inference.

    ``value`` is a JSON schema (as an object or a string; without one, ``json`` is any object), a
    regular expression, or a Lark grammar.
    """

    type: RequestGrammarKind
    value: Schema = Field(None, validate_default=True)

    @property
    def request(self) -> GrammarRequest:
        """As a neutral request."""
        return GrammarRequest(self.type, self.value)

    @field_validator("value")
    @classmethod
    def _check_text(cls, value: object, info: ValidationInfo) -> object:
        kind = info.data.get("type")
        if kind in ("regex", "lark") and not (isinstance(value, str) and value):
            raise ValueError(f"must be a string that holds a {kind} grammar")
        return value


class CausalParameters(SamplingFields):
    """Parameters of `/generate`, named as in text-generation-inference, vLLM and transformers."""

    max_new_tokens: NewTokens | None = Field(
        None, description="Maximum number of tokens to generate. Default: the model's, or 100."
    )
    min_new_tokens: Count | None = parameter("min_new_tokens")
    do_sample: bool | None = Field(
        None,
        description="Sample instead of greedy decoding. Default: true if a sampling parameter is "
        "given, otherwise the model's. Where sampling parameters have a default here, a model may "
        "have another: /info shows it.",
    )
    return_full_text: bool | None = Field(
        None, description="Prepend the prompt to the generated text. Default: false."
    )
    truncate: Annotated[int, Range(1)] | None = Field(
        None,
        description="Keep only this many of the prompt's last tokens, or of a source text's first "
        "ones. Default: all.",
    )
    details: bool | None = Field(
        None,
        description="Return tokens, log-probabilities and the finish reason. Default: false.",
    )
    decoder_input_details: bool | None = Field(
        None,
        description="Return the prompt's tokens and log-probabilities in details.prefill. "
        "Default: false.",
    )
    top_n_tokens: Annotated[int, Range(0, 20)] | None = Field(
        None, description="Return the most likely tokens at each position. Default: 0."
    )
    n: Annotated[int, Range(1, 128)] | None = Field(
        None, description="Number of texts to return. Default: 1."
    )
    best_of: Annotated[int, Range(1, 128)] | None = Field(
        None,
        description="Number of texts to generate, of which the n best are returned. Default: n.",
    )
    grammar: GrammarParameter | None = Field(None, description="What the text has to match.")
    no_repeat_ngram_size: Annotated[int, Range(0, 1000)] | None = Field(
        None,
        description="No sequence of this many tokens occurs twice; 0 disables it. Default: 0, or "
        "the checkpoint's for encoder-decoder models.",
    )
    num_beams: Annotated[int, Range(1, MAX_BEAMS)] | None = Field(
        None,
        description="Number of beams of a beam search; 1 is none. Default: 1, or the checkpoint's "
        "for encoder-decoder models.",
    )
    length_penalty: Annotated[float, Range(-100, 100)] | None = Field(
        None,
        description="Exponent of a text's length, by which a beam search divides its score. "
        "Default: 1, or the checkpoint's for encoder-decoder models.",
    )
    early_stopping: (
        Annotated[bool | Literal["never"], pydantic.BeforeValidator(_check_early_stopping)] | None
    ) = Field(
        None,
        description="Whether a beam search ends once it has a text for each beam, or never before "
        "no text can become better. Default: false, or the checkpoint's for encoder-decoder "
        "models.",
    )
    src_lang: Annotated[str, Size(1, 64, "characters")] | None = Field(
        None, description="Language of the source text, for models with several."
    )
    tgt_lang: Annotated[str, Size(1, 64, "characters")] | None = Field(
        None, description="Language to write in, for models with several."
    )
    watermark: Literal[False] | None = Field(None, description="Watermarking is not supported.")

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
    def grammar_request(self) -> GrammarRequest | None:
        """What the text has to match."""
        return None if self.grammar is None else self.grammar.request

    @property
    def writing(self) -> Writing:
        """What encoder-decoder models are told beside it."""
        return Writing(
            num_beams=self.num_beams,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            source_language=self.src_lang,
            target_language=self.tgt_lang,
        )

    @property
    def num_sequences(self) -> int:
        """How many texts to generate for each prompt."""
        return self.best_of or self.n or 1

    def sampling(self, defaults: GenerationDefaults, **others: Any) -> SamplingParams:
        if self.do_sample is None:
            by_default = defaults.do_sample and (self.num_beams or 1) == 1
            others["do_sample"] = self.has_controls or by_default
        return super().sampling(
            defaults, prompt_logprobs=bool(self.decoder_input_details), **others
        )


class GenerateParameters(Lenient, CausalParameters, UnmaskingFields):
    """Parameters of `/generate` under either mask."""

    within = "parameters"


class TextPart(Lenient):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(Lenient):
    """One message of a conversation. Parts of its ``content`` are joined."""

    within = "messages"

    role: Annotated[str, Size(1, 64, "characters")]
    content: Annotated[
        str, pydantic.BeforeValidator(join_parts, json_schema_input_type=str | list[TextPart])
    ]


def _check_prompts(value: object) -> object:
    return "" if value is None else check_texts(value)


class GenerateBody(Lenient, Scheduling, TaskBody):
    """A prompt, a list of prompts (not streamed), or a conversation."""

    model_config = example(
        {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 40}},
        oneOf=[
            {"required": ["inputs"], "properties": {"messages": {"type": "null"}}},
            {"required": ["messages"], "properties": {"inputs": False}},
        ],
    )

    spellings = {  # noqa: RUF012
        "prompts": "inputs",
        "num_tokens": "parameters.max_new_tokens",
        "texts": "inputs",
        "num_sequences": "parameters.n",
        "describe_tokens": "parameters.details",
        "prompt_logprobs": "parameters.decoder_input_details",
        "source_language": "parameters.src_lang",
        "target_language": "parameters.tgt_lang",
    }

    inputs: Annotated[
        AnyText | Annotated[list[AnyText], Field(json_schema_extra=AT_LEAST_ONE)],
        pydantic.BeforeValidator(_check_prompts),
    ] = Field("", description="A prompt, or a list of prompts; alternatively, messages.")
    messages: Annotated[list[ChatMessage], Size(1, MAX_MESSAGES, "messages")] | None = Field(
        None, description="A conversation, rendered with the model's chat template."
    )
    parameters: GenerateParameters | None = None
    stream: bool | None = Field(
        None, description="Reply with server-sent events, one per token. Default: false."
    )

    @model_validator(mode="before")
    @classmethod
    def _check_places(cls, body: object) -> object:
        """A parameter in the wrong place is no unknown field: it was meant."""
        for name in body if isinstance(body, dict) else ():
            if name in GenerateParameters.model_fields and name not in cls.model_fields:
                raise FieldError(name, "this is one of the parameters; send it within them")
        return body

    @model_validator(mode="after")
    def _check_one_prompt(self) -> Self:
        if not self.inputs and self.messages is None:
            raise ValueError("inputs: give a prompt as inputs, or a conversation as messages")
        if self.inputs and self.messages is not None:
            raise ValueError("messages: give either inputs or messages, not both")
        return self

    @property
    def prompt(self) -> str:
        """The prompt, if it is one."""
        return self.inputs if isinstance(self.inputs, str) else ""

    def request(self, defaults: GenerationDefaults) -> GenerationRequest:
        """The body as a dialect-neutral request to a model with these defaults."""
        parameters = self.parameters or GenerateParameters()
        prompts: list[str] = []
        if self.messages is None:
            prompts = self.inputs if isinstance(self.inputs, list) else [self.inputs]
        return GenerationRequest(
            prompts,
            None
            if self.messages is None
            else Conversation([each.model_dump() for each in self.messages]),
            parameters.sampling(defaults),
            num_sequences=parameters.num_sequences,
            grammar=parameters.grammar_request,
            writing=parameters.writing,
            describe_tokens=bool(parameters.details),
            unmasking=parameters.unmasking,
            **parameters.given("seed", "max_new_tokens", "truncate"),
            **self.given("priority", "cache_salt"),
        )
