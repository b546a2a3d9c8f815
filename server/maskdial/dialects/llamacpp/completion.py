"""`POST /completion` and `/apply-template`, as llama.cpp has them."""

from collections.abc import Mapping
from typing import Annotated

import pydantic
from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from maskdial.bounds import Range
from maskdial.bundle.tokenizer import TextOrIds
from maskdial.causal.model import WritingModel
from maskdial.causal.request import GenerationRequest
from maskdial.causal.sampling.params import LastN
from maskdial.dialects.body import AT_LEAST_ONE, TaskBody, TokenId, example
from maskdial.dialects.call import Call, task_route
from maskdial.dialects.flow import write
from maskdial.dialects.guided import GuidedFields
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.llamacpp.infill import CompletionRenderer, InfillReply
from maskdial.dialects.openai.tokens import PromptBody, render
from maskdial.dialects.sampling import PENALTY_LAST_N, AnySeed, AnyStops, SamplingFields
from maskdial.dialects.unsupported import Gbnf, Lora
from maskdial.errors import ValidationError
from maskdial.http.replies import json_reply

_NEW_TOKENS = 100


def _check_prompt(value: object) -> object:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return value
    raise ValueError("must be a text that is not empty, or a list of token ids")


_Ids = Annotated[list[TokenId], Field(json_schema_extra=AT_LEAST_ONE)]


class CompletionBody(SamplingFields, GuidedFields, Lenient, TaskBody):
    """A prompt to continue."""

    model_config = example({"model": "hybrid", "prompt": "Once upon a time", "n_predict": 40})

    habits = frozenset(
        {
            *("cache_prompt", "id_slot", "n_cache_reuse", "n_indent", "n_keep", "n_probs"),
            *("penalize_nl", "response_fields", "return_progress", "return_tokens", "samplers"),
            *("slot_id", "t_max_predict_ms", "t_max_prompt_ms", "timings_per_token"),
        }
    )
    neutral = {"image_data": ([],), "n_cmpl": (1,)}  # noqa: RUF012
    renamed = {  # noqa: RUF012
        "json_schema": "guided_json",
        "max_tokens": "n_predict",
        "repeat_penalty": "repetition_penalty",
    }
    spellings = {  # noqa: RUF012
        "prompts": "prompt",
        "max_new_tokens": "n_predict",
        "penalty_last_n": "repeat_last_n",
    }

    prompt: Annotated[
        TextOrIds, pydantic.PlainValidator(_check_prompt, json_schema_input_type=str | _Ids)
    ] = Field(description="A text, or token ids, which are used unchanged.")
    n_predict: Annotated[int, Range(-1)] | None = Field(
        None,
        description="Maximum number of tokens to generate; -1 for what the context leaves. "
        f"Default: the model's, or {_NEW_TOKENS}.",
    )
    stop: AnyStops | None = Field(
        None, description="Texts that end the text, and are not part of it."
    )
    penalty_last_n: LastN | None = PENALTY_LAST_N
    seed: AnySeed | None = Field(None, description="Random seed. Default, and with -1: a new one.")
    stream: bool | None = Field(
        None, description="Reply with server-sent events, one per token. Default: false."
    )
    lora: Lora = None
    grammar: Gbnf = None

    def names(self) -> Mapping[str, str]:
        """What the body calls the fields of a neutral request, where the names differ."""
        return {"grammar": next(iter(self.grammars()), "guided_grammar"), **super().names()}

    def request(self, model: WritingModel) -> GenerationRequest:
        """The body as a dialect-neutral request."""
        if self.n_predict == 0:
            raise ValidationError("must be at least 1, or -1, not 0", field="max_new_tokens")
        limit = self.n_predict
        return GenerationRequest(
            [self.prompt],
            params=self.sampling(model.defaults, do_sample=True, include_stop=False),
            max_new_tokens=model.max_length if limit == -1 else limit,
            is_limited=limit != -1,
            grammar=self.constraint,
            **self.given("seed"),
        )


class TemplateReply(TypedDict):
    """A conversation as the model reads it."""

    prompt: str


class TemplateBody(PromptBody):
    """A conversation to render."""

    model_config = example(
        {"model": "hybrid", "messages": [{"role": "user", "content": "Hello"}]},
        required=["messages"],
    )


async def completion(call: Call[CompletionBody]) -> Response:
    """Continues a prompt, as llama.cpp does; with `"stream": true` as server-sent events."""
    model = await call.writer()
    generation = await call.generation(call.body.request(model), model)
    renderer = CompletionRenderer(model.name, generation)
    return await write(call, generation, renderer, streams=bool(call.body.stream))


async def apply_template(call: Call[TemplateBody]) -> Response:
    """A conversation as the model's chat template writes it."""
    if call.body.messages is None:
        raise ValidationError("this field is required", field="messages")
    model = await call.writer()
    return json_reply({"prompt": await render(call.body, model)})


ROUTES = (
    task_route(
        "/completion", completion, CompletionBody, InfillReply, streams=True, tags=["llama.cpp"]
    ),
    task_route("/apply-template", apply_template, TemplateBody, TemplateReply, tags=["llama.cpp"]),
)
