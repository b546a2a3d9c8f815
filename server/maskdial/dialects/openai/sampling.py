"""What `/v1/completions` and `/v1/chat/completions` share: sampling, constraints, streams.

The fields are OpenAI's, with those extensions of vLLM that mean something here.
"""

from abc import ABC
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from maskdial.bounds import Range
from maskdial.bundle.tokenizer import TextOrIds
from maskdial.causal.generation_config import GenerationDefaults
from maskdial.causal.model import WritingModel
from maskdial.causal.request import GenerationRequest
from maskdial.causal.sampling.params import Count, NewTokens
from maskdial.dialects.body import FieldError
from maskdial.dialects.guided import Choices, GuidedFields, Schema, given_grammars, one_of
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.openai.base import OpenAIBody
from maskdial.dialects.sampling import (
    AnySeed,
    AnyStops,
    SamplingFields,
    Scheduling,
    parameter,
    rest_of_context,
)
from maskdial.dialects.unmasking import UnmaskingFields
from maskdial.dialects.unsupported import Gbnf, Lora
from maskdial.grammar.source import GrammarRequest


class StreamOptions(Lenient):
    """When a stream reports its usage."""

    habits = frozenset({"include_obfuscation"})
    within = "stream_options"

    include_usage: bool | None = Field(
        None, description="Send a last chunk with the usage. Default: false."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="Put the usage so far on every chunk. Default: false."
    )


class JsonSchemaFormat(Lenient):
    """A JSON schema with its name. The text always satisfies it, ``strict`` or not."""

    model_config = ConfigDict(validate_by_name=True)
    habits = frozenset({"name", "description", "strict"})
    within = "response_format.json_schema"

    schema_: Schema = Field(None, alias="schema", description="Default: any JSON object.")


class ResponseFormat(Lenient):
    """What the text must be.

    ``json`` and ``regex`` with a ``value`` are text-generation-inference's; InferenceClient sends
    JSON schemas as the ``value`` of ``json_object``.
    """

    within = "response_format"

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: JsonSchemaFormat | None = None
    value: Schema = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("needs json_schema, with a schema in it")
        if self.type == "regex" and not isinstance(self.value, str):
            raise ValueError("needs value, a regular expression")
        return self

    def grammar(self) -> GrammarRequest | None:
        """As a neutral request; None for any text."""
        if self.type == "text":
            return None
        if self.type == "regex":
            return GrammarRequest("regex", self.value)
        schema = self.value if self.json_schema is None else self.json_schema.schema_
        return GrammarRequest("json", schema)


class StructuredOutputs(Lenient):
    """vLLM's way to say what the text must be: one of the fields."""

    within = "structured_outputs"

    json_: Schema = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = Field(None, description="A Lark grammar.")


class SamplingBody(SamplingFields, Scheduling, OpenAIBody, ABC):
    """How to sample and schedule: the fields of every route that generates text.

    Those that OpenAI does not have are vLLM's.
    """

    renamed = {"repeat_penalty": "repetition_penalty"}  # noqa: RUF012

    # Where vLLM takes values of its own for what is the default anyway
    top_k: Annotated[int, Range(-1), AfterValidator(lambda k: max(k, 0))] | None = Field(
        None, description="Sample from the k most likely tokens; 0 and -1 disable it. Default: 0."
    )
    seed: AnySeed | None = Field(
        None,
        description="Random seed; text i has the seed plus i. Default, and with -1: a new one.",
    )
    stop: AnyStops | None = Field(
        None, description="Texts that end the generation, and are not part of it."
    )
    min_new_tokens: Count | None = parameter("min_new_tokens", "min_tokens")
    include_stop: bool | None = Field(
        None,
        alias="include_stop_str_in_output",
        description="Keep the stop text. Default: false.",
    )
    truncate: NewTokens | None = Field(
        None,
        alias="truncate_prompt_tokens",
        description="Keep only this many of the prompt's last tokens.",
    )

    @property
    def describes_tokens(self) -> bool:
        """Whether the reply describes each token."""
        return False

    @property
    def num_top(self) -> int:
        """How many of the most likely tokens each token is described with."""
        return 0

    @property
    def constraint(self) -> GrammarRequest | None:
        """What the text must match."""
        return None

    def rest_of_context(self, model: WritingModel, num_texts: int = 1) -> int:
        """The limit on a text that has none: what the context leaves, and what a reply may describe
        of it.
        """
        return rest_of_context(
            model, num_texts * (1 + self.num_top) if self.describes_tokens else 0
        )

    def generation(
        self,
        defaults: GenerationDefaults,
        prompts: Sequence[TextOrIds] = (),
        *,
        prompt_logprobs: bool = False,
        **others: Any,
    ) -> GenerationRequest:
        """The body as a dialect-neutral request, beside what a route spells in its own way."""
        return GenerationRequest(
            prompts,
            params=self.sampling(
                defaults,
                do_sample=True,
                include_stop=bool(self.include_stop),
                top_n_tokens=self.num_top,
                prompt_logprobs=prompt_logprobs,
            ),
            grammar=self.constraint,
            describe_tokens=self.describes_tokens,
            **self.given("seed", "truncate", "priority", "cache_salt"),
            **others,
        )


class GenerationBody(GuidedFields, SamplingBody, UnmaskingFields):
    """The fields that both generation routes have."""

    habits = OpenAIBody.habits | {"parallel_tool_calls"}
    neutral = {  # noqa: RUF012
        "best_of": (1,),
        "documents": ([],),
        "length_penalty": (1.0,),
        "max_tokens": (-1,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True, False),
        "suffix": ("",),
        "use_beam_search": (False,),
    }
    renamed = {  # noqa: RUF012
        **SamplingBody.renamed,
        "json_schema": "guided_json",
        "n_predict": "max_tokens",
    }

    max_tokens: Annotated[int, Range(1)] | None = None
    n: Annotated[int, Range(1, 128)] | None = Field(
        None, description="Number of texts to return for each prompt. Default: 1."
    )
    stream: bool | None = Field(None, description="Reply with server-sent events. Default: false.")
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = Field(None, description="What the text must be.")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="Extension: what the text must be."
    )
    lora: Lora = None
    grammar_: Gbnf = Field(None, alias="grammar")

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "only a stream has options; set stream")
        return self

    def generation(
        self, defaults: GenerationDefaults, prompts: Sequence[TextOrIds] = (), **others: Any
    ) -> GenerationRequest:
        return super().generation(defaults, prompts, unmasking=self.unmasking, **others)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def echoes_only(self) -> bool:
        """Whether the reply has the prompt and no text."""
        return False

    def names(self) -> Mapping[str, str]:
        """What the body calls the fields of a neutral request, where the names differ."""
        return {
            "prompts": "prompt",
            "texts": "prompt",
            "num_tokens": "max_tokens",
            "max_new_tokens": "max_tokens",
            "min_new_tokens": "min_tokens",
            "num_sequences": "n",
            "infill": "suffix",
            "describe_tokens": "logprobs",
            "truncate": "truncate_prompt_tokens",
            "grammar": next(iter(self.grammars()), "response_format"),
        }

    def grammars(self) -> dict[str, GrammarRequest]:
        """The grammars that were given, by the names of their fields."""
        outputs = self.structured_outputs or StructuredOutputs()
        found = super().grammars() | given_grammars(
            {
                "structured_outputs.json": ("json", outputs.json_),
                "structured_outputs.json_object": ("json", {} if outputs.json_object else None),
                "structured_outputs.regex": ("regex", outputs.regex),
                "structured_outputs.choice": ("lark", one_of(outputs.choice)),
                "structured_outputs.grammar": ("lark", outputs.grammar),
            }
        )
        from_format = None if self.response_format is None else self.response_format.grammar()
        return found if from_format is None else {"response_format": from_format} | found
