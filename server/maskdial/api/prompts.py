"""From a `/generate` body to the sequences that the engine runs."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import Encoding

from maskdial.api.generate_bodies import GenerateBody, GenerateParameters
from maskdial.api.work import check_num_inputs, name_input, tokenize
from maskdial.causal.grammar.matcher import Grammar
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence, SharedPrompt, draw_seed
from maskdial.config import Config
from maskdial.errors import ValidationError
from maskdial.models.registry import CausalModel

_DEFAULT_NEW_TOKENS = 100
_MAX_DESCRIBED = 250_000  # about 20 MB of JSON
_MAX_SEED = 2**63


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request: its text, its token ids, how many of them were cut off, and the
    sequences that continue it.
    """

    text: str
    ids: list[int]
    num_truncated: int
    sequences: tuple[Sequence, ...]


async def read_prompts(body: GenerateBody, model: CausalModel, config: Config) -> list[Prompt]:
    """Checks a body against the model, tokenizes its prompts and makes their sequences.

    Raises:
        ValidationError: the model cannot do what the body asks; the message names the field.
        OverloadedError: the queue has no room for it.
    """
    parameters = body.parameters or GenerateParameters()
    params = _sampling_params(parameters, model)
    num_prompts = max(len(body.prompts), 1)
    check_num_inputs(num_prompts, config)
    num_sequences = num_prompts * parameters.num_sequences
    _check_size(num_sequences, parameters, params, config)
    model.engine.check_room(num_sequences)
    grammar = None
    if parameters.grammar is not None:
        grammar = await _compile(parameters, model)
    texts = body.prompts
    if body.messages is not None:
        texts = [await asyncio.to_thread(model.chat_template.render, body.conversation)]
    encodings = await tokenize(
        model.tokenizer,
        model.metrics,
        [(text, None) for text in texts],
        add_special_tokens=body.messages is None,  # a chat template writes its own
    )
    prompts = []
    for index, (text, encoding) in enumerate(zip(texts, encodings, strict=True)):
        with name_input(index, body.batch):
            ids = _fit(encoding, parameters.truncate, model)
        sequences = _make_sequences(body, ids, params, grammar, parameters.num_sequences)
        prompts.append(Prompt(text, ids, len(encoding.ids) - len(ids), sequences))
    return prompts


def _check_size(
    num_sequences: int, parameters: GenerateParameters, params: SamplingParams, config: Config
) -> None:
    """Refuses more texts than the queue ever holds, and replies that would be too large."""
    if num_sequences > config.max_queue:
        raise ValidationError(
            f"the request asks for {num_sequences} texts; the queue holds at most "
            f"{config.max_queue} (--max-queue); send several requests"
        )
    num_described = num_sequences * params.max_new_tokens * (1 + params.top_n_tokens)
    if parameters.details and num_described > _MAX_DESCRIBED:
        raise ValidationError(
            f"parameters.details: the reply may describe {num_described:,} tokens; one request "
            f"may ask for at most {_MAX_DESCRIBED:,}: fewer texts, tokens or top_n_tokens"
        )


def _sampling_params(parameters: GenerateParameters, model: CausalModel) -> SamplingParams:
    """The engine's parameters, checked against the model."""
    context, name = model.max_length, model.bundle.name
    min_new_tokens = parameters.min_new_tokens or 0
    max_new_tokens = parameters.max_new_tokens or min(
        max(_DEFAULT_NEW_TOKENS, min_new_tokens), context
    )
    for field, least, value in (("max", 1, max_new_tokens), ("min", 0, min_new_tokens)):
        if value > context:
            raise ValidationError(
                f"parameters.{field}_new_tokens: must be between {least} and {context} (the "
                f"context of model {name!r}), not {value}"
            )
    token_ids = {
        "logit_bias": [token_id for token_id, _ in parameters.token_biases],
        "stop_token_ids": parameters.stop_token_ids or [],
    }
    vocab_size = model.bundle.manifest.vocab_size
    for field, ids in token_ids.items():
        if ids and max(ids) >= vocab_size:
            raise ValidationError(
                f"parameters.{field}: model {name!r} has token ids from 0 to {vocab_size - 1}, "
                f"not {max(ids)}"
            )
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        do_sample=parameters.samples,
        temperature=_given(parameters.temperature, 1.0),
        top_k=parameters.top_k or 0,
        top_p=_given(parameters.top_p, 1.0),
        min_p=parameters.min_p or 0.0,
        typical_p=_given(parameters.typical_p, 1.0),
        repetition_penalty=_given(parameters.repetition_penalty, 1.0),
        frequency_penalty=parameters.frequency_penalty or 0.0,
        presence_penalty=parameters.presence_penalty or 0.0,
        logit_bias=parameters.token_biases,
        seed=parameters.seed,
        stop=parameters.stop_texts,
        stop_token_ids=frozenset(token_ids["stop_token_ids"]),
        ignore_eos=bool(parameters.ignore_eos),
        top_n_tokens=min(parameters.top_n_tokens or 0, vocab_size),
        prompt_logprobs=bool(parameters.decoder_input_details),
    )
    if parameters.num_sequences > 1 and params.greedy:
        raise ValidationError(
            "parameters.n and best_of: without sampling all texts are the same; set do_sample or "
            "a temperature above 0"
        )
    return params


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


async def _compile(parameters: GenerateParameters, model: CausalModel) -> Grammar:
    wanted = parameters.grammar
    assert wanted is not None, "the caller looked"
    with name_grammar():
        return await asyncio.wrap_future(model.grammars.submit(wanted.type, wanted.value))


@contextlib.contextmanager
def name_grammar() -> Iterator[None]:
    """Says that a ValidationError is about the grammar, which may also fail while it is used."""
    try:
        yield
    except ValidationError as error:
        raise ValidationError(f"parameters.grammar: {error.message}") from error


def _fit(encoding: Encoding, truncate: int | None, model: CausalModel) -> list[int]:
    """The last ``truncate`` tokens of a prompt, if they leave room in the context.

    What the tokenizer puts before a text stays, as in transformers, and is one of them.
    """
    kept: list[int] = encoding.ids
    if truncate is not None and truncate < len(kept):
        mask = encoding.special_tokens_mask
        num_before = mask.index(0) if 0 in mask else len(mask)
        num_before = min(num_before, truncate - 1)
        kept = kept[:num_before] + kept[num_before - truncate :]
    if not kept:
        raise ValidationError("the prompt has no tokens; write at least one word")
    if len(kept) >= model.max_length:
        raise ValidationError(
            f"the prompt has {len(kept)} tokens; model {model.bundle.name!r} has a context of "
            f"{model.max_length}, so a prompt has at most {model.max_length - 1}; shorten it, or "
            "set truncate"
        )
    return kept


def _make_sequences(
    body: GenerateBody, ids: list[int], params: SamplingParams, grammar: Grammar | None, count: int
) -> tuple[Sequence, ...]:
    """The copies of a prompt. Copy i is what its own seed gives alone: the first seed plus i."""
    first_seed = draw_seed() if params.seed is None else params.seed
    shared = SharedPrompt() if count > 1 else None
    return tuple(
        Sequence(
            ids,
            dataclasses.replace(params, seed=(first_seed + copy) % _MAX_SEED),
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            grammar=None if grammar is None else grammar.matcher(),
            shared_prompt=shared,
        )
        for copy in range(count)
    )
