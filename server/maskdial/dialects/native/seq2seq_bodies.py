"""The bodies of `/summarize` and `/translate`, and the requests that they become.

They are the Hugging Face task API's. Null means not given; unknown fields are refused.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from maskdial.bounds import Range, Size
from maskdial.causal.generation_config import GenerationDefaults
from maskdial.causal.request import GenerationRequest, WritingTask
from maskdial.dialects.body import FieldError, TextsBody, Wire, example
from maskdial.dialects.native.generate_bodies import CausalParameters

# Of the parameters of `/generate`, what describes tokens, returns several texts, or has another
# place here
_ELSEWHERE = (
    "n",
    "best_of",
    "details",
    "decoder_input_details",
    "top_n_tokens",
    "return_full_text",
    "truncate",
    "src_lang",
    "tgt_lang",
)


class WritingParameters(CausalParameters):
    """Parameters of `/generate` for one text, and transformers' own names of the lengths."""

    max_length: Annotated[int, Range(2)] | None = Field(
        None,
        description="Maximum length as transformers counts it: with the token that the decoder "
        "starts from. Default: the checkpoint's.",
    )
    min_length: Annotated[int, Range(0)] | None = Field(
        None, description="Minimum length, counted likewise. Default: the checkpoint's."
    )

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        for name in _ELSEWHERE:
            if getattr(self, name):
                raise FieldError(name, "not available here; see /generate")
        for ours, theirs in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")):
            if getattr(self, ours) is not None and getattr(self, theirs) is not None:
                raise FieldError(theirs, f"give either {ours} or {theirs}")
        most, least = self.max_length, self.min_length
        if most is not None and least is not None and least > most:
            raise FieldError("min_length", f"must be at most max_length ({most}), not {least}")
        return self

    @property
    def most_new_tokens(self) -> int | None:
        """The maximum number of generated tokens."""
        return self.max_new_tokens if self.max_length is None else self.max_length - 1

    @property
    def least_new_tokens(self) -> int | None:
        """The minimum number of generated tokens."""
        return self.min_new_tokens if self.min_length is None else max(self.min_length - 1, 0)


class SummarizeParameters(Wire):
    """Parameters of `/summarize`."""

    clean_up_tokenization_spaces: bool | None = Field(
        None, description="Remove the spaces before punctuation. Default: false."
    )
    truncation: Literal["do_not_truncate", "longest_first", "only_first", "only_second"] | None = (
        Field(
            None,
            description="Truncate source texts that are too long, instead of refusing them. "
            "Default: do_not_truncate.",
        )
    )
    generate_parameters: WritingParameters | None = None


class TranslateParameters(SummarizeParameters):
    """Parameters of `/translate`."""

    src_lang: Annotated[str, Size(1, 64, "characters")] | None = Field(
        None, description="Language of the source text, for models with several."
    )
    tgt_lang: Annotated[str, Size(1, 64, "characters")] | None = Field(
        None, description="Language to translate to, for models with several."
    )


_NAMES = {
    **{name: f"parameters.generate_parameters.{name}" for name in WritingParameters.model_fields},
    "prompts": "inputs",
    "texts": "inputs",
    "source_language": "parameters.src_lang",
    "target_language": "parameters.tgt_lang",
}
"""What the bodies call the fields of a neutral request."""


class SummarizeBody(TextsBody):
    """A text to summarize, or a list of them."""

    model_config = example({"inputs": "Old Martha kept the lighthouse for thirty years, alone."})

    parameters: SummarizeParameters | None = None

    @property
    def options(self) -> SummarizeParameters:
        """The parameters, also if none are given."""
        return self.parameters or SummarizeParameters()

    def names(self) -> Mapping[str, str]:
        return _NAMES

    def request(self, defaults: GenerationDefaults) -> GenerationRequest:
        """The body as a dialect-neutral request to a model with these defaults."""
        return _request(self.texts, self.options, defaults, "summarization")


class TranslateBody(TextsBody):
    """A text to translate, or a list of them."""

    model_config = example({"inputs": "The ship left at dawn."})

    parameters: TranslateParameters | None = None

    @property
    def options(self) -> TranslateParameters:
        """The parameters, also if none are given."""
        return self.parameters or TranslateParameters()

    def names(self) -> Mapping[str, str]:
        return _NAMES

    def request(self, defaults: GenerationDefaults) -> GenerationRequest:
        """The body as a dialect-neutral request to a model with these defaults."""
        source, target = self.options.src_lang, self.options.tgt_lang
        return _request(self.texts, self.options, defaults, "translation", source, target)


def _request(
    texts: list[str],
    options: SummarizeParameters,
    defaults: GenerationDefaults,
    task: WritingTask,
    source_language: str | None = None,
    target_language: str | None = None,
) -> GenerationRequest:
    given = options.generate_parameters or WritingParameters()
    return GenerationRequest(
        texts,
        params=given.sampling(defaults, min_new_tokens=given.least_new_tokens or 0),
        seed=given.seed,
        max_new_tokens=given.most_new_tokens,
        grammar=given.grammar_request,
        writing=dataclasses.replace(
            given.writing,
            task=task,
            source_language=source_language,
            target_language=target_language,
            truncate_source=options.truncation in ("longest_first", "only_first"),
        ),
    )
