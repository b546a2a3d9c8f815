"""`POST /v1/completions`: prompts to continue, as texts or as token ids."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, Self

import pydantic
from fastapi import Response
from pydantic import Field, model_validator

from maskdial.ask.write import AnyGeneration
from maskdial.bounds import Range
from maskdial.bundle.token_offsets import OffsetCounter, spelled_offsets
from maskdial.bundle.tokenizer import TokenSpeller
from maskdial.causal.events import TokenEvent
from maskdial.causal.generate import Completion, Text
from maskdial.causal.model import WritingModel
from maskdial.causal.prompts import Prompt
from maskdial.causal.request import GenerationRequest, Infilling
from maskdial.dialects.body import FieldError, example
from maskdial.dialects.call import Call
from maskdial.dialects.flow import write
from maskdial.dialects.logprobs import CompletionLogprobs, DescribedToken
from maskdial.dialects.openai.base import AnyInput, TextsOrIds, check_input, inputs_of, is_batch
from maskdial.dialects.openai.errors import FORM
from maskdial.dialects.openai.generation import FINISH_REASONS, ChoiceRenderer, ending
from maskdial.dialects.openai.replies import CompletionReply
from maskdial.dialects.openai.sampling import GenerationBody
from maskdial.dialects.unsupported import Unsupported

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
    max_tokens: Annotated[int, Range(0)] | None = Field(
        None,
        description="Maximum number of tokens to generate; 0 is for an echo alone. Default: 16.",
    )
    echo: bool | None = Field(None, description="Prepend the prompt. Default: false.")
    logprobs: Annotated[int, Range(0, 5)] | None = Field(
        None, description="Describe each token, with this many of the most likely ones."
    )
    best_of: Annotated[int, Range(1, 128)] | None = Field(
        None, description="Generate this many texts for each prompt, and return the n best."
    )
    suffix: str | None = Field(
        None,
        description="The text after the one that is written, for models with fill-in-the-middle "
        "tokens.",
    )

    prompt_embeds: Annotated[Any, Unsupported("prompts are texts or token ids here")] = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.max_tokens == 0:
            if not self.echo:
                raise FieldError("max_tokens", "must be at least 1, not 0, unless echo is true")
            if self.min_new_tokens:
                raise FieldError(
                    "min_tokens", "there are none with a max_tokens of 0; leave it out"
                )
        if self.suffix is not None and self.echo:
            raise FieldError("echo", "the text stands between prompt and suffix; leave it out")
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

    @property
    def echoes_only(self) -> bool:
        return self.max_tokens == 0

    def request(self, model: WritingModel) -> GenerationRequest:
        defaults = model.defaults
        # An echo alone takes one token as well, which is dropped: it costs no further pass.
        limit = 1 if self.echoes_only else self.max_tokens
        return self.generation(
            defaults,
            inputs_of(self.prompt),
            prompt_logprobs=bool(self.echo) and self.describes_tokens,
            max_new_tokens=limit or defaults.new_tokens(_DEFAULT_MAX_TOKENS, model.max_length),
            is_limited=limit is not None,
            num_sequences=self.best_of or self.n or 1,
            infill=None if self.suffix is None else Infilling(self.suffix),
        )


class CompletionsRenderer(ChoiceRenderer[CompletionsBody]):
    """Writes `text_completion` objects, which are the same in streams."""

    id_prefix = "cmpl"
    object = chunk_object = "text_completion"
    empty = {"text": "", "logprobs": None, "finish_reason": None}  # noqa: RUF012

    def __init__(
        self, body: CompletionsBody, generation: AnyGeneration, model: WritingModel
    ) -> None:
        super().__init__(body, generation, model)
        self._streams: dict[int, _Described] = {}
        self._echoed: set[int] = set()

    def choice(self, completion: Completion, text: Text) -> dict[str, Any]:
        """The text, after its prompt if that is wanted."""
        prompt = completion.prompt
        content: dict[str, Any] = {
            "text": self._echo(prompt),
            "logprobs": None,
            "finish_reason": "length",
        }
        events: list[TokenEvent] = []
        if not self._body.echoes_only:
            events = text.events
            content["text"] += text.finish.generated_text
            content |= ending(text.finish, FINISH_REASONS[text.finish.reason])
        if self._body.describes_tokens:
            described = self._described(prompt)
            echoed = self._prompt_tokens(prompt, text) if self._body.echo else ()
            content["logprobs"] = described.logprobs.describe(
                chain(echoed, map(described.token, events))
            )
        return content

    def chunks(self, index: int, event: TokenEvent) -> Iterable[tuple[int, dict[str, Any]]]:
        """One chunk per token; the first of a text has its prompt, if that is wanted."""
        prompt = self._prompts[index // (self._body.n or 1)]
        if self._body.echoes_only:
            yield index, {"text": self._echo(prompt), "logprobs": None, "finish_reason": "length"}
            return
        text = event.text
        if index not in self._echoed:
            self._echoed.add(index)
            text = self._echo(prompt) + text
        logprobs = None
        if self._body.describes_tokens:
            if index not in self._streams:
                self._streams[index] = self._described(prompt)
            described = self._streams[index]
            logprobs = described.logprobs.describe([described.token(event)])
        content = {"text": text, "logprobs": logprobs, "finish_reason": None}
        if event.finish is not None:
            content |= ending(event.finish, FINISH_REASONS[event.finish.reason])
        yield index, content

    def _echo(self, prompt: Prompt) -> str:
        if not self._body.echo:
            return ""
        if prompt.text is None:
            return self._tokenizer.decode(prompt.ids, skip_special_tokens=False)
        return prompt.text

    def _described(self, prompt: Prompt) -> "_Described":
        before = () if self._body.echo else prompt.context_ids
        start = len(self._echo(prompt))
        return _Described(
            CompletionLogprobs(TokenSpeller(self._tokenizer, before)),
            OffsetCounter(self._tokenizer, prompt.context_ids, start),
        )

    def _prompt_tokens(self, prompt: Prompt, text: Text) -> Iterable[DescribedToken]:
        """A prompt's tokens. Nothing precedes the first, so it has no probability."""
        offsets = prompt.offsets
        if offsets is None:
            offsets = spelled_offsets(prompt.ids, self._tokenizer)
        yield DescribedToken(prompt.ids[0], offsets[0], None)
        others = zip(prompt.ids[1:], offsets[1:], text.finish.prompt_logprobs, strict=True)
        for token_id, offset, each in others:
            yield DescribedToken(token_id, offset, each.logprob, each.top)


@dataclass(frozen=True, slots=True)
class _Described:
    """The log-probabilities of a text, and the place in it of the next generated token."""

    logprobs: CompletionLogprobs
    counter: OffsetCounter

    def token(self, event: TokenEvent) -> DescribedToken:
        """A generated token; call it for each in turn."""
        offset = self.counter.push(event.token_id)
        return DescribedToken(event.token_id, offset, event.logprob, event.top)


async def completions(call: Call[CompletionsBody]) -> Response:
    """Continues a prompt, or several; with `"stream": true` as server-sent events."""
    return await answer(call, CompletionsRenderer)


MakeRenderer = Callable[[CompletionsBody, AnyGeneration, WritingModel], CompletionsRenderer]
"""Makes the renderer of an admitted request."""


async def answer(call: Call[Any], make_renderer: MakeRenderer) -> Response:
    """Answers a body as one reply or as a stream."""
    body = call.body
    model = await call.writer()
    generation = await call.generation(body.request(model), model)
    renderer = make_renderer(body, generation, model)
    return await write(call, generation, renderer, streams=bool(body.stream))


ROUTES = (
    FORM.route("/v1/completions", completions, CompletionsBody, CompletionReply, streams=True),
)
