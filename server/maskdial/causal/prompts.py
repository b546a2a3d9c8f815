"""Prompts: a request to generate becomes tokenized prompts, checked against the model, with their
sequences.
"""

import asyncio
import dataclasses
from dataclasses import dataclass

from maskdial.bundle.texts import check_ids, tokenizing_seconds
from maskdial.causal.beam_search import BeamParams, BeamSearch
from maskdial.causal.decoder_only import DecoderOnly
from maskdial.causal.model import CausalModel
from maskdial.causal.reader import PromptReader, Tokens, resolve_beams
from maskdial.causal.request import GenerationRequest
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sampling.words import has_words, read_words
from maskdial.causal.seq2seq import Seq2Seq
from maskdial.causal.sequence import Sequence as CausalSequence
from maskdial.causal.sequence import SharedPrompt
from maskdial.causal.stop import Reasoning
from maskdial.config import Config
from maskdial.engine.fairness import current_usage
from maskdial.engine.limits import check_num_texts
from maskdial.engine.offload import offload
from maskdial.engine.philox import settle_seed
from maskdial.errors import ValidationError, about
from maskdial.grammar.matcher import Grammar
from maskdial.grammar.source import GrammarRequest

_DEFAULT_NEW_TOKENS = 100
MAX_DESCRIBED = 250_000
"""Tokens that a reply may describe, top tokens included; about 20 MB of JSON."""
MAX_SEED = 2**63


@dataclass(frozen=True, slots=True)
class Prompt:
    """One tokenized prompt, or source text, and its sequences: none where it is written by
    unmasking.

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
        return [] if self.sequences and self.sequences[0].num_source else self.ids

    @property
    def num_cached(self) -> int:
        """Tokens taken from the prefix cache, once the prompt is prefilled."""
        return self.sequences[0].num_cached if self.sequences else 0


async def read_prompts(
    request: GenerationRequest, model: CausalModel, config: Config
) -> list[Prompt]:
    has_encoder = model.manifest.text_to_text is not None
    reader = Seq2Seq(request, model) if has_encoder else DecoderOnly(request, model)
    params = await _read_words(_resolve_params(request, model, reader), model)
    beams = _resolve_beams(request, params, model, reader)
    if request.full_prompt:
        _check_looks_ahead(model, params)
    num_prompts = max(len(request.prompts), 1)
    check_num_texts(num_prompts, config)
    num_sequences = num_prompts * request.num_sequences
    check_size(num_sequences, params.max_new_tokens, request, config)
    model.engine.check_room(num_sequences)
    given, wanted, reasoning = request.prompts, request.grammar, None
    borders: tuple[int, ...] = ()
    if request.conversation is not None:
        cache = model.engine.prefix_cache
        if cache is not None and cache.needs_states:
            prompt = await request.conversation.render_with_borders(model)
            rendered, borders = prompt.text, prompt.borders
        else:  # blocks can be cut anywhere
            rendered = await request.conversation.render(model)
        given = [rendered]
        if request.grammar_for is not None:
            wanted = await asyncio.to_thread(request.grammar_for, rendered)
        if request.reasoning_for is not None:
            reasoning = request.reasoning_for(rendered)
    grammar = await _compile(wanted, model)
    warnings: tuple[str, ...] = ()
    if wanted is not None and grammar is not None:
        warnings = (*wanted.warnings, *grammar.warnings)

    def read() -> tuple[list[Tokens], list[int]]:
        predicted = model.tokenizer.encode(request.prediction, add_special_tokens=False).ids
        tokenized = [reader.read(prompt, index, borders) for index, prompt in enumerate(given)]
        return tokenized, predicted[: model.max_length]

    with model.metrics.tokenization_duration.time():
        texts = [prompt for prompt in given if isinstance(prompt, str)]
        tokenized, predicted = await offload(read, tokenizing_seconds([*texts, request.prediction]))
    for index, tokens in enumerate(tokenized):
        if request.full_prompt and len(tokens.ids) > model.max_full_tokens:
            with about("prompts", index):
                raise ValidationError(
                    f"the prompt has {len(tokens.ids)} tokens; under the prefix mask it is read in "
                    f"one pass, of at most {model.max_full_tokens} (--prefill-chunk-tokens); "
                    "shorten it"
                )
    if request.describe_tokens and params.prompt_logprobs:
        num_read = sum(len(tokens.ids) for tokens in tokenized) * request.num_sequences
        _check_described(num_read + num_sequences * params.max_new_tokens, params)
    current_usage().note(
        model,
        *([tokens.ids for tokens in tokenized], params, wanted, beams, request.num_sequences),
        *(request.spelled_tokens, request.full_prompt, model.kv_cache_dtype),
    )

    return [
        Prompt(
            prompt if isinstance(prompt, str) else None,
            tokens.ids,
            tokens.num_truncated,
            _make_sequences(
                request,
                reader.start(tokens.ids),
                params,
                grammar,
                beams,
                reasoning,
                predicted,
                model,
                tokens.borders,
            ),
            tokens.offsets,
            warnings,
        )
        for prompt, tokens in zip(given, tokenized, strict=True)
    ]


def _check_looks_ahead(model: CausalModel, params: SamplingParams) -> None:
    if model.manifest.text_to_text is not None:
        raise ValidationError(
            f"model {model.name!r} reads its source text in both directions anyway; leave out the "
            "prefix mask",
            field="mask",
        )
    model.check_looks_ahead("prefix")
    if params.prompt_logprobs:
        raise ValidationError(
            "under the prefix mask, each token of the prompt sees the next one, which has no "
            "log-probability then; leave it out",
            field="prompt_logprobs",
        )


async def _read_words(params: SamplingParams, model: CausalModel) -> SamplingParams:
    if not has_words(params):
        return params
    vocab_size = model.manifest.vocab_size
    return await asyncio.to_thread(read_words, params, model.tokenizer, vocab_size)


async def _compile(wanted: GrammarRequest | None, model: CausalModel) -> Grammar | None:
    if wanted is None:
        return None
    with about(wanted.field):
        return await asyncio.wrap_future(model.grammars.submit(wanted.kind, wanted.value))


def check_size(
    num_sequences: int, max_new_tokens: int, request: GenerationRequest, config: Config
) -> None:
    """Refuses more texts than the queue ever holds, and replies that would be too large.

    Raises:
        ValidationError: there are, or one would be.
    """
    if num_sequences > config.max_queue:
        raise ValidationError(
            f"the request asks for {num_sequences} texts; the queue holds at most "
            f"{config.max_queue} (--max-queue); send several requests"
        )
    if request.describe_tokens:
        _check_described(num_sequences * max_new_tokens, request.params)


def _check_described(num_tokens: int, params: SamplingParams) -> None:
    num_described = num_tokens * (1 + params.top_n_tokens)
    if num_described > MAX_DESCRIBED:
        raise ValidationError(
            f"the reply may describe {num_described:,} tokens; one request may ask for at most "
            f"{MAX_DESCRIBED:,}: ask for fewer texts, tokens or top tokens",
            field="describe_tokens",
        )


def _resolve_params(
    request: GenerationRequest, model: CausalModel, reader: PromptReader
) -> SamplingParams:
    """The parameters with the model's settings, checked against it."""
    settings = {"min_new_tokens": request.params.min_new_tokens, **reader.settings()}
    if request.max_new_tokens is not None and not request.params.min_new_tokens:
        # A checkpoint's minimum gives way to a request's maximum.
        settings["min_new_tokens"] = min(settings["min_new_tokens"], request.max_new_tokens)
    context = model.max_length
    default = reader.max_new_tokens or model.defaults.new_tokens(_DEFAULT_NEW_TOKENS, context)
    params = dataclasses.replace(
        request.params,
        # Clients send limits that are meant for larger models.
        max_new_tokens=min(
            request.max_new_tokens or max(default, settings["min_new_tokens"]), context
        ),
        top_n_tokens=min(request.params.top_n_tokens, model.manifest.vocab_size),
        **settings,
    )
    if params.min_new_tokens > context:
        raise ValidationError(
            f"must be between 0 and {context} (the context of model {model.name!r}), not "
            f"{params.min_new_tokens}",
            field="min_new_tokens",
        )
    if params.min_new_tokens > params.max_new_tokens:
        raise ValidationError(
            f"must be at most {params.max_new_tokens}, the maximum number of tokens, not "
            f"{params.min_new_tokens}",
            field="min_new_tokens",
        )
    biased = [token_id for token_id, _ in params.logit_bias]
    for field, ids in (("logit_bias", biased), ("stop_token_ids", [*params.stop_token_ids])):
        with about(field):
            check_ids(ids, model)
    return params


def _check_copies(request: GenerationRequest, params: SamplingParams) -> None:
    if request.num_sequences > 1 and params.greedy:
        raise ValidationError(
            "without sampling, all texts are the same; sample at a temperature above 0",
            field="num_sequences",
        )


def _resolve_beams(
    request: GenerationRequest, params: SamplingParams, model: CausalModel, reader: PromptReader
) -> BeamParams:
    """How to search, checked against the model and the number of texts."""
    has_grammar = request.grammar is not None or request.grammar_for is not None
    writing = reader.writing(params, has_grammar=has_grammar)
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


def _make_sequences(
    request: GenerationRequest,
    start: tuple[list[int], list[int]],
    params: SamplingParams,
    grammar: Grammar | None,
    beams: BeamParams,
    reasoning: Reasoning | None,
    predicted: list[int],
    model: CausalModel,
    borders: tuple[int, ...],
) -> tuple[CausalSequence, ...]:
    """The sequences of a prompt. Copy i has the first one's seed plus i, and gives the text that it
    would give alone.
    """
    prompt_ids, source_ids = start
    first_seed = settle_seed(request.seed)
    first = not any(map(model.tokenizer.is_text, prompt_ids))
    searches = beams.num_beams > 1
    shared = SharedPrompt() if request.num_sequences > 1 and not searches else None

    def make(copy: int) -> CausalSequence:
        return CausalSequence(
            prompt_ids,
            params,
            seed=(first_seed + copy) % MAX_SEED,
            source_ids=source_ids,
            priority=request.priority,
            cache_salt=request.cache_salt,
            grammar=None if grammar is None else grammar.matcher(first=first),
            shared_prompt=shared,
            spelled_tokens=request.spelled_tokens,
            reasoning=reasoning,
            prediction=predicted,
            adapter=model.adapter,
            full_prompt=request.full_prompt,
            borders=borders,
        )

    sequences = tuple(map(make, range(request.num_sequences)))
    if searches:  # which its sequences know
        BeamSearch(sequences, [make(0) for _ in range(beams.num_beams)], beams)
    return sequences
