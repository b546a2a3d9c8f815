"""What `Model.generate` and `Model.chat` ask of the causal family, and what they return."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict, get_type_hints

import pydantic
from pydantic import TypeAdapter

from maskdial.ask.write import Writer, prepare
from maskdial.bundle.tokenizer import TextOrIds
from maskdial.causal.chat.message import ChatMessage
from maskdial.causal.chat.request import ChatRequest, Reply, read_reply
from maskdial.causal.events import FinishReason
from maskdial.causal.generate import Text
from maskdial.causal.generation_config import GenerationDefaults
from maskdial.causal.request import GenerationRequest
from maskdial.causal.sampling.params import CONTROLS, SamplingParams
from maskdial.config import Config
from maskdial.engine.timing import Deadline
from maskdial.errors import ValidationError
from maskdial.grammar.source import GrammarKind, GrammarRequest, GrammarValue

JsonSchema = Mapping[str, Any] | str


class Sampling(TypedDict, total=False):
    """The parameters of sampling, with the meaning and the defaults of `SamplingParams`."""

    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    min_new_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop: bool
    ignore_eos: bool
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: Literal[0, 2]
    mirostat_tau: float
    mirostat_eta: float


@dataclass(frozen=True, slots=True)
class Generated:
    """A generated text, token by token.

    ``logprobs`` are natural, under the model's own distribution. ``seed`` is None for a greedy one.
    """

    text: str
    finish_reason: FinishReason
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    seed: int | None

    @classmethod
    def of(cls, text: Text) -> "Generated":
        """What the engine has written."""
        finish = text.finish
        return cls(
            finish.generated_text,
            finish.reason,
            tuple(event.token_id for event in text.events),
            tuple(event.logprob for event in text.events),
            finish.seed,
        )


_TYPES: Mapping[str, TypeAdapter[Any]] = {
    name: TypeAdapter(hint)
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
    if name in Sampling.__annotations__
}
"""Each checks the bounds of a parameter."""


def params(defaults: GenerationDefaults, given: Mapping[str, Any], samples: bool) -> SamplingParams:
    """How to sample.

    Args:
        defaults: the model's.
        given: those of `Sampling` that the caller gives.
        samples: whether to draw tokens if no parameter means that.

    Raises:
        ValidationError: a parameter is unknown or out of its bounds.
        TypeError: it is none of `Sampling`.
    """
    unknown = given.keys() - _TYPES.keys()
    if unknown:
        raise TypeError(f"there is no parameter {min(unknown)!r}")
    values = {name: value for name, value in given.items() if value is not None}
    values.setdefault("do_sample", samples or not CONTROLS.isdisjoint(values))
    if "logit_bias" in values:
        values["logit_bias"] = tuple(values["logit_bias"].items())
    if "stop" in values:  # an empty string would end every text at once
        values["stop"] = tuple(filter(None, values["stop"]))
    for name in ("bad_words", "dry_sequence_breakers"):
        if name in values:
            values[name] = tuple(values[name])
    if "stop_token_ids" in values:
        values["stop_token_ids"] = frozenset(values["stop_token_ids"])
    for name, value in values.items():
        try:
            _TYPES[name].validate_python(value, strict=True)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            cause = first.get("ctx", {}).get("error", first["msg"])
            raise ValidationError(str(cause), field=name) from error
    return defaults.sampling(values)


def grammar_of(
    schema: JsonSchema | None, regex: str | None, lark: str | None
) -> GrammarRequest | None:
    """What the text has to match.

    Raises:
        ValidationError: there are several.
    """
    wanted: dict[str, tuple[GrammarKind, GrammarValue]] = {}
    if schema is not None:
        wanted["schema"] = "json", schema if isinstance(schema, str) else dict(schema)
    if regex is not None:
        wanted["regex"] = "regex", regex
    if lark is not None:
        wanted["grammar"] = "lark", lark
    if len(wanted) > 1:
        raise ValidationError(f"a text can match one of {' and '.join(wanted)} only")
    return next(
        (GrammarRequest(kind, value, field=name) for name, (kind, value) in wanted.items()), None
    )


async def complete(
    prompts: Sequence[TextOrIds],
    model: Writer,
    config: Config,
    params: SamplingParams,
    grammar: GrammarRequest | None,
    max_new_tokens: int | None,
    seed: int | None,
) -> list[Generated]:
    """One text for each prompt."""
    request = GenerationRequest(
        prompts, params=params, seed=seed, max_new_tokens=max_new_tokens, grammar=grammar
    )
    prepared = await prepare(request, model, None, config, Deadline(None, config))
    return [Generated.of(each.texts[0]) for each in await prepared.complete()]


async def reply(
    messages: Sequence[ChatMessage | Mapping[str, Any]],
    model: Writer,
    config: Config,
    grammar: GrammarRequest | None,
    sampling: Mapping[str, Any],
    *,
    max_new_tokens: int | None,
    seed: int | None,
    **others: Any,
) -> Reply:
    """The reply to a conversation.

    Args:
        messages: the conversation.
        model: replies.
        config: has the limits.
        grammar: what the content has to match.
        sampling: the parameters that the caller gives.
        max_new_tokens: limit; None: what the context leaves.
        seed: of the random numbers.
        others: fields of `ChatRequest`.
    """
    context = model.max_length
    defaults = replace(model.defaults, do_sample=True)
    request = ChatRequest(
        [each if isinstance(each, ChatMessage) else ChatMessage(**each) for each in messages],
        GenerationRequest(
            params=params(defaults, {"include_stop": False, **sampling}, samples=True),
            seed=seed,
            max_new_tokens=max_new_tokens or model.defaults.new_tokens(context, context),
            is_limited=max_new_tokens is not None,
            grammar=grammar,
        ),
        **others,
    )
    prepared = await prepare(
        request.generation_for(model), model, None, config, Deadline(None, config)
    )
    (completion,) = await prepared.complete()
    return read_reply(request, completion.prompt, completion.texts[0].events, model)
