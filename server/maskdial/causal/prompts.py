"""Prompts: a request to generate becomes tokenized prompts, checked against the model, with their
sequences.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from maskdial.bundle.texts import check_characters, check_ids, check_media, tokenizing_seconds
from maskdial.bundle.tokenizer import TextOrIds
from maskdial.causal.beam_search import BeamParams, BeamSearch
from maskdial.causal.grammar.matcher import Grammar
from maskdial.causal.model import CausalModel
from maskdial.causal.request import GenerationRequest, GrammarRequest
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.seq2seq import TextToTextSettings, check_has_no_encoder, resolve_beams
from maskdial.causal.sequence import Sequence as CausalSequence
from maskdial.causal.sequence import SharedPrompt, draw_seed
from maskdial.config import Config
from maskdial.engine.limits import check_num_texts
from maskdial.engine.offload import offload
from maskdial.errors import ValidationError, about

_DEFAULT_NEW_TOKENS = 100
_MAX_DESCRIBED = 250_000  # tokens; about 20 MB of JSON
_MAX_SEED = 2**63


@dataclass(frozen=True, slots=True)
class Prompt:
    """One tokenized prompt, or source text, and its sequences.

    ``text`` is None if the prompt came as token ids; ``num_truncated`` tokens were cut off.
    ``offsets`` are where the tokens begin in the text, if there is one and the reply describes its
    tokens. ``warnings`` tell which constraints of the request's schemas are not enforced.
    """

    text: str | None
    ids: list[int]
    num_truncated: int
    sequences: tuple[CausalSequence, ...]
    offsets: list[int] | None = None
    warnings: tuple[str, ...] = ()

    @property
    def context_ids(self) -> list[int]:
        """The tokens that the generated ones follow in a text; a source text is another text."""
        return [] if self.sequences[0].num_source else self.ids

    @property
    def num_cached(self) -> int:
        """Tokens taken from the prefix cache, once the prompt is prefilled."""
        return self.sequences[0].num_cached


async def read_prompts(
    request: GenerationRequest, model: CausalModel, config: Config
) -> list[Prompt]:
    settings = _settings(request, model)
    params = _resolve_params(request, model, settings)
    beams = _resolve_beams(request, params, model, settings)
    num_prompts = max(len(request.prompts), 1)
    check_num_texts(num_prompts, config)
    num_sequences = num_prompts * request.num_sequences
    _check_size(num_sequences, request, params, config)
    model.engine.check_room(num_sequences)
    given, wanted = request.prompts, request.grammar
    if request.conversation is not None:
        rendered = await request.conversation.render(model)
        given = [rendered]
        if request.grammar_for is not None:
            wanted = await asyncio.to_thread(request.grammar_for, rendered)
        if request.reasoning_for is not None:
            params = dataclasses.replace(params, reasoning=request.reasoning_for(rendered))
    grammar = await _compile(wanted, model)
    warnings: tuple[str, ...] = ()
    if wanted is not None and grammar is not None:
        warnings = (*wanted.warnings, *grammar.warnings)
    if settings is not None:
        prompts = await _read_sources(request, model, settings, params, grammar, beams)
        return [dataclasses.replace(prompt, warnings=warnings) for prompt in prompts]
    if request.truncate is None:
        for index, prompt in enumerate(given):
            if isinstance(prompt, str):
                with about("prompts", index):
                    check_characters(prompt, model.max_length, model)
    describes_prompts = request.describe_tokens and params.prompt_logprobs
    tokenized = await _tokenize(
        given,
        model,
        add_special_tokens=request.conversation is None,
        with_offsets=describes_prompts,
    )
    prompts = []
    for index, (prompt, tokens) in enumerate(zip(given, tokenized, strict=True)):
        kept = _fit(tokens, request.truncate, model, index)
        sequences = _make_sequences(request, kept.ids, params, grammar, model, beams)
        text = prompt if isinstance(prompt, str) else None
        num_truncated = len(tokens.ids) - len(kept.ids)
        prompts.append(Prompt(text, kept.ids, num_truncated, sequences, kept.offsets, warnings))
    if describes_prompts:
        num_prompt = sum(len(prompt.ids) for prompt in prompts) * request.num_sequences
        _check_described(num_prompt + num_sequences * params.max_new_tokens, params)
    return prompts


def _settings(request: GenerationRequest, model: CausalModel) -> TextToTextSettings | None:
    """What an encoder-decoder model's files say for a request; None for a model without encoder."""
    text_to_text = model.manifest.text_to_text
    if text_to_text is None:
        check_has_no_encoder(request.writing, model.name)
        return None
    if request.conversation is not None:
        raise ValidationError(
            f"model {model.name!r} reads a source text and does not chat; send the text to "
            "/generate, /summarize or /translate",
            field="messages",
        )
    if request.params.prompt_logprobs:
        raise ValidationError(
            f"model {model.name!r} reads its source text in one pass, so the text's tokens have no "
            "log-probabilities",
            field="prompt_logprobs",
        )
    return TextToTextSettings(text_to_text, request.writing)


async def _read_sources(
    request: GenerationRequest,
    model: CausalModel,
    settings: TextToTextSettings,
    params: SamplingParams,
    grammar: Grammar | None,
    beams: BeamParams,
) -> list[Prompt]:
    """The source texts of an encoder-decoder model, with their sequences."""

    def read() -> list[tuple[list[int], int]]:
        sources = enumerate(request.prompts)
        return [settings.read(each, model, request.truncate, index) for index, each in sources]

    with model.metrics.tokenization_duration.time():
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        tokenized = await offload(read, tokenizing_seconds(texts))
    return [
        Prompt(
            prompt if isinstance(prompt, str) else None,
            ids,
            num_truncated,
            _make_sequences(request, ids, params, grammar, model, beams),
        )
        for prompt, (ids, num_truncated) in zip(request.prompts, tokenized, strict=True)
    ]


async def _compile(wanted: GrammarRequest | None, model: CausalModel) -> Grammar | None:
    if wanted is None:
        return None
    with about(wanted.field):
        return await asyncio.wrap_future(model.grammars.submit(wanted.kind, wanted.value))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A tokenized prompt: its ids, how many special tokens the tokenizer put before its text, and
    where in the text they begin, if that is wanted.
    """

    ids: list[int]
    num_special: int = 0
    offsets: list[int] | None = None

    def last(self, number: int) -> "_Tokens":
        """The last tokens; special ones before the text are kept, and count."""
        num_before = min(self.num_special, number - 1)
        rest = slice(num_before - number, None)
        offsets = self.offsets
        if offsets is not None:
            offsets = offsets[:num_before] + offsets[rest]
        return _Tokens(self.ids[:num_before] + self.ids[rest], num_before, offsets)


async def _tokenize(
    prompts: Sequence[TextOrIds],
    model: CausalModel,
    *,
    add_special_tokens: bool,
    with_offsets: bool,
) -> list[_Tokens]:
    """The tokens of each prompt. A chat template writes the special tokens itself."""

    def read(text: str) -> _Tokens:
        encoding = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        mask = encoding.special_tokens_mask
        num_special = mask.index(0) if 0 in mask else len(mask)
        offsets = model.tokenizer.offsets(text, encoding) if with_offsets else None
        return _Tokens(encoding.ids, num_special, offsets)

    def encode() -> list[_Tokens]:
        return [
            read(prompt) if isinstance(prompt, str) else _Tokens(_checked_ids(prompt, model, index))
            for index, prompt in enumerate(prompts)
        ]

    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    with model.metrics.tokenization_duration.time():
        return await offload(encode, tokenizing_seconds(texts))


def _checked_ids(ids: Sequence[int], model: CausalModel, index: int) -> list[int]:
    with about("prompts", index):
        check_ids(ids, model)
    return list(ids)


def _check_size(
    num_sequences: int, request: GenerationRequest, params: SamplingParams, config: Config
) -> None:
    """Refuses more texts than the queue ever holds, and replies that would be too large."""
    if num_sequences > config.max_queue:
        raise ValidationError(
            f"the request asks for {num_sequences} texts; the queue holds at most "
            f"{config.max_queue} (--max-queue); send several requests"
        )
    if request.describe_tokens:
        _check_described(num_sequences * params.max_new_tokens, params)


def _check_described(num_tokens: int, params: SamplingParams) -> None:
    num_described = num_tokens * (1 + params.top_n_tokens)
    if num_described > _MAX_DESCRIBED:
        raise ValidationError(
            f"the reply may describe {num_described:,} tokens; one request may ask for at most "
            f"{_MAX_DESCRIBED:,}: ask for fewer texts, tokens or top tokens",
            field="describe_tokens",
        )


def _resolve_params(
    request: GenerationRequest, model: CausalModel, settings: TextToTextSettings | None
) -> SamplingParams:
    """The parameters with their defaults, checked against the model."""
    params, context = request.params, model.max_length
    default = model.defaults.new_tokens(_DEFAULT_NEW_TOKENS, context)
    ngram_size = request.writing.no_repeat_ngram_size
    if settings is not None:
        default = settings.max_new_tokens or default
        params = settings.params(params)
    elif ngram_size is not None:
        params = dataclasses.replace(params, no_repeat_ngram_size=ngram_size)
    if request.max_new_tokens is not None and not request.params.min_new_tokens:
        # A checkpoint's minimum gives way to a request's maximum.
        least = min(params.min_new_tokens, request.max_new_tokens)
        params = dataclasses.replace(params, min_new_tokens=least)
    max_new_tokens = request.max_new_tokens or min(max(default, params.min_new_tokens), context)
    for field, least, value in (
        ("max_new_tokens", 1, max_new_tokens),
        ("min_new_tokens", 0, params.min_new_tokens),
    ):
        if value > context:
            raise ValidationError(
                f"must be between {least} and {context} (the context of model {model.name!r}), "
                f"not {value}",
                field=field,
            )
    if params.min_new_tokens > max_new_tokens:
        raise ValidationError(
            f"must be at most {max_new_tokens}, the maximum number of tokens, not "
            f"{params.min_new_tokens}",
            field="min_new_tokens",
        )
    biased = [token_id for token_id, _ in params.logit_bias]
    for field, ids in (("logit_bias", biased), ("stop_token_ids", [*params.stop_token_ids])):
        with about(field):
            check_ids(ids, model)
    return dataclasses.replace(
        params,
        max_new_tokens=max_new_tokens,
        top_n_tokens=min(params.top_n_tokens, model.manifest.vocab_size),
    )


def _check_copies(request: GenerationRequest, params: SamplingParams) -> None:
    if request.num_sequences > 1 and params.greedy:
        raise ValidationError(
            "without sampling, all texts are the same; sample at a temperature above 0",
            field="num_sequences",
        )


def _resolve_beams(
    request: GenerationRequest,
    params: SamplingParams,
    model: CausalModel,
    settings: TextToTextSettings | None,
) -> BeamParams:
    """How to search, checked against the model and the number of texts."""
    has_grammar = request.grammar is not None or request.grammar_for is not None
    writing = request.writing
    if settings is not None:
        writing = settings.writing(params, has_grammar=has_grammar)
    beams = resolve_beams(writing, params, has_grammar=has_grammar)
    if beams.num_beams == 1:
        _check_copies(request, params)
        return beams
    if beams.num_beams > model.slots:
        raise ValidationError(
            f"a beam takes a slot, and model {model.name!r} has {model.slots} (--slots); set "
            "num_beams to no more",
            field="num_beams",
        )
    if request.num_sequences > beams.num_beams:
        raise ValidationError(
            f"a search with {beams.num_beams} beams finds as many texts, not "
            f"{request.num_sequences}",
            field="num_sequences",
        )
    return beams


def _fit(tokens: _Tokens, truncate: int | None, model: CausalModel, index: int) -> _Tokens:
    """The last ``truncate`` tokens of a prompt, as in transformers, if they leave room in the
    context.
    """
    if truncate is not None and truncate < len(tokens.ids):
        tokens = tokens.last(truncate)
    with about("prompts", index):
        check_media(tokens.ids, model)
    if not tokens.ids:
        raise ValidationError(
            "the prompt has no tokens; write at least one word", field="prompts", index=index
        )
    if len(tokens.ids) >= model.max_length:
        raise ValidationError(
            f"the prompt has {len(tokens.ids)} tokens; model {model.name!r} has a context of "
            f"{model.max_length}, so a prompt has at most {model.max_length - 1}; shorten or "
            "truncate it",
            field="prompts",
            index=index,
        )
    return tokens


def _make_sequences(
    request: GenerationRequest,
    ids: list[int],
    params: SamplingParams,
    grammar: Grammar | None,
    model: CausalModel,
    beams: BeamParams,
) -> tuple[CausalSequence, ...]:
    """The sequences of a prompt. Copy i has the first one's seed plus i, and gives the text that it
    would give alone.

    For an encoder-decoder model, ``ids`` are a source text's, and each sequence begins with the
    token that the decoder starts from.
    """
    text_to_text = model.manifest.text_to_text
    prompt_ids, source_ids = ids, []
    if text_to_text is not None:
        prompt_ids, source_ids = [text_to_text.start_token_id], ids
    first_seed = draw_seed() if params.seed is None else params.seed
    searches = beams.num_beams > 1
    shared = SharedPrompt() if request.num_sequences > 1 and not searches else None

    def make(copy: int) -> CausalSequence:
        return CausalSequence(
            prompt_ids,
            dataclasses.replace(params, seed=(first_seed + copy) % _MAX_SEED),
            source_ids=source_ids,
            priority=request.priority,
            cache_salt=request.cache_salt,
            grammar=None if grammar is None else grammar.matcher(),
            shared_prompt=shared,
        )

    sequences = tuple(map(make, range(request.num_sequences)))
    if searches:  # which its sequences know
        BeamSearch(sequences, [make(0) for _ in range(beams.num_beams)], beams)
    return sequences
