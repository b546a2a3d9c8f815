"""`POST /v1/completions`: prompts to continue, as texts or as token ids."""

from collections.abc import Iterable
from itertools import chain
from typing import Annotated, Any, Self

import pydantic
from fastapi import Request, Response
from pydantic import Field, model_validator

from maskdial.causal.events import TokenEvent
from maskdial.dialects.openai_errors import openai_route
from maskdial.dialects.openai_generation import FINISH_REASONS, answer
from maskdial.dialects.openai_logprobs import CompletionLogprobs, DescribedToken
from maskdial.dialects.openai_replies import CompletionReply
from maskdial.dialects.openai_sampling import GenerationBody
from maskdial.dialects.openai_schema import (
    AnyInput,
    TextsOrIds,
    Unsupported,
    check_input,
    inputs_of,
    is_batch,
)
from maskdial.dialects.schema import FieldError, Range, example, read_body
from maskdial.models.served import CausalModel
from maskdial.models.tokenizer import Tokenizer, TokenSpeller
from maskdial.requests.generation import Completion, Generation, Text
from maskdial.requests.generation_request import GenerationRequest
from maskdial.requests.prompts import Prompt

_DEFAULT_MAX_TOKENS = 16


class CompletionsBody(GenerationBody):
    """Prompts to continue."""

    model_config = example({"model": "hybrid", "prompt": "Once upon a time", "max_tokens": 40})

    prompt: Annotated[
        TextsOrIds, pydantic.PlainValidator(check_input, json_schema_input_type=AnyInput)
    ] = Field(
        description="A text, a list of texts, a list of token ids, or a list of such lists. Token "
        "ids are used unchanged."
    )
    max_tokens: Annotated[int, Range(1)] | None = Field(
        None, description="Maximum number of tokens to generate. Default: 16."
    )
    echo: bool | None = Field(None, description="Prepend the prompt. Default: false.")
    logprobs: Annotated[int, Range(0, 5)] | None = Field(
        None, description="Describe each token, with this many of the most likely ones."
    )
    best_of: Annotated[int, Range(1, 128)] | None = Field(
        None, description="Generate this many texts for each prompt, and return the n best."
    )
    suffix: Annotated[Any, Unsupported("no model here can fill in text before a suffix")] = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise FieldError("best_of", f"must be at least n ({self.n or 1}), not {self.best_of}")
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise FieldError("best_of", "a stream cannot wait for the best text; leave it out")
        if self.stream and self.echo and self.logprobs is not None:
            raise FieldError("logprobs", "those of the prompt are not available in a stream")
        return self

    @property
    def batch(self) -> bool:
        return is_batch(self.prompt)

    @property
    def describes_tokens(self) -> bool:
        return self.logprobs is not None

    @property
    def num_top(self) -> int:
        return self.logprobs or 0

    def request(self, model: CausalModel) -> GenerationRequest:
        return GenerationRequest(
            inputs_of(self.prompt),
            params=self.sampling_params(
                model.defaults,
                top_n_tokens=self.num_top,
                prompt_logprobs=bool(self.echo) and self.describes_tokens,
            ),
            max_new_tokens=self.max_tokens
            or model.defaults.new_tokens(_DEFAULT_MAX_TOKENS, model.max_length),
            num_sequences=self.best_of or self.n or 1,
            grammar=self.grammar(),
            truncate=self.truncate_prompt_tokens,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            describe_tokens=self.describes_tokens,
        )


class CompletionsWriter:
    """Writes `text_completion` objects, which are the same in streams."""

    id_prefix = "cmpl"
    object = chunk_object = "text_completion"
    seconds_per_token = 0.0
    num_reasoning = None

    def __init__(self, body: CompletionsBody, generation: Generation, tokenizer: Tokenizer) -> None:
        self._body = body
        self._prompts = generation.prompts
        self._tokenizer = tokenizer
        self._streams: dict[int, CompletionLogprobs] = {}
        self._echoed: set[int] = set()

    def choice(self, completion: Completion, text: Text) -> dict[str, Any]:
        """The text, after its prompt if that is wanted."""
        prompt = completion.prompt
        content: dict[str, Any] = {
            "text": self._echo(prompt) + text.finish.generated_text,
            "logprobs": None,
            "finish_reason": FINISH_REASONS[text.finish.reason],
        }
        if self._body.describes_tokens:
            echoed = _prompt_tokens(prompt, text) if self._body.echo else ()
            generated = map(_generated_token, text.events)
            content["logprobs"] = self._logprobs(prompt).describe(chain(echoed, generated))
        return content

    def chunks(self, index: int, event: TokenEvent) -> Iterable[tuple[int, dict[str, Any]]]:
        """One chunk per token; the first of a text has its prompt, if that is wanted."""
        prompt = self._prompts[index // (self._body.n or 1)]
        text = event.text
        if index not in self._echoed:
            self._echoed.add(index)
            text = self._echo(prompt) + text
        logprobs = None
        if self._body.describes_tokens:
            if index not in self._streams:
                self._streams[index] = self._logprobs(prompt)
            logprobs = self._streams[index].describe([_generated_token(event)])
        reason = None if event.finish is None else FINISH_REASONS[event.finish.reason]
        yield index, {"text": text, "logprobs": logprobs, "finish_reason": reason}

    def _echo(self, prompt: Prompt) -> str:
        if not self._body.echo:
            return ""
        if prompt.text is None:
            return self._tokenizer.decode(prompt.ids, skip_special_tokens=False)
        return prompt.text

    def _logprobs(self, prompt: Prompt) -> CompletionLogprobs:
        if not self._body.echo:
            return CompletionLogprobs(TokenSpeller(self._tokenizer, prompt.context_ids))
        length = TokenSpeller(self._tokenizer, ()).num_characters(prompt.ids)
        offset = len(self._echo(prompt)) - length
        return CompletionLogprobs(TokenSpeller(self._tokenizer, ()), offset)


def _prompt_tokens(prompt: Prompt, text: Text) -> Iterable[DescribedToken]:
    """A prompt's tokens. Nothing precedes the first, so it has no probability."""
    first, *others = prompt.ids
    yield DescribedToken(first, None)
    for token_id, each in zip(others, text.finish.prompt_logprobs, strict=True):
        yield DescribedToken(token_id, each.logprob, each.top)


def _generated_token(event: TokenEvent) -> DescribedToken:
    return DescribedToken(event.token_id, event.logprob, event.top, len(event.text))


async def completions(request: Request) -> Response:
    """Continues a prompt, or several; with `"stream": true` as server-sent events."""
    body = await read_body(CompletionsBody, await request.body())

    def writer(generation: Generation, model: CausalModel) -> CompletionsWriter:
        return CompletionsWriter(body, generation, model.tokenizer)

    return await answer(request, body, writer)


ROUTES = (
    openai_route("/v1/completions", completions, CompletionsBody, CompletionReply, streams=True),
)
