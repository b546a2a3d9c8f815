"""A request to generate text: what to continue, how, until when, for whom.

Every dialect parses its bodies into a `GenerationRequest` and renders the result. Errors name the
fields of `GenerationRequest` and of its `SamplingParams`.
"""

import asyncio
import contextlib
import dataclasses
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Encoding

from maskdial.causal.beam_search import BeamParams, BeamSearch
from maskdial.causal.events import Finish, TokenEvent
from maskdial.causal.grammar.matcher import Grammar
from maskdial.causal.grammar.source import GrammarKind, GrammarValue
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence as CausalSequence
from maskdial.causal.sequence import SharedPrompt, draw_seed
from maskdial.causal.stream import TokenStream
from maskdial.config import Config
from maskdial.errors import DeadlineError, ValidationError, about
from maskdial.masked.tasks.task import check_characters, check_ids, tokenizing_seconds
from maskdial.models.served import CausalModel
from maskdial.models.tokenizer import TextOrIds
from maskdial.requests.merge import MergedStreams, NumberedEvent
from maskdial.requests.offload import offload
from maskdial.requests.text_to_text import (
    TextToTextSettings,
    Writing,
    check_has_no_encoder,
    resolve_beams,
)
from maskdial.requests.timing import Deadline, Timings
from maskdial.requests.understanding import check_num_texts

_DEFAULT_NEW_TOKENS = 100
_MAX_DESCRIBED = 250_000  # tokens; about 20 MB of JSON
_MAX_SEED = 2**63


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """What the text must match: ``value`` is a schema, a regular expression or a Lark grammar.

    ``field`` is what an error about it names.
    """

    kind: GrammarKind
    value: GrammarValue
    field: str = "grammar"


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a prompt is rendered from, by the model's chat template.

    Attributes:
        messages: mappings of ``role``, ``content`` and whatever else templates read.
        tools: what the model may call, in OpenAI's form.
        variables: further variables of the template.
        add_generation_prompt: whether to open the assistant's next turn.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    add_generation_prompt: bool = True

    async def render(self, model: CausalModel) -> str:
        """The prompt.

        Raises:
            ValidationError: the model has no chat template, or it fails; ``field`` says on what.
        """
        with about("messages"):
            rendering = model.chat_template.submit(
                self.messages,
                tools=self.tools,
                variables=self.variables,
                add_generation_prompt=self.add_generation_prompt,
            )
            return await asyncio.wrap_future(rendering)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Prompts or a conversation to continue.

    Attributes:
        prompts: texts, or token ids that are used unchanged: no special tokens are added. Empty
            for a conversation. For an encoder-decoder model, source texts.
        conversation: rendered as the prompt, in place of ``prompts``.
        params: how to sample; its ``max_new_tokens`` is ignored.
        max_new_tokens: limit per text. None: the model's default, or 100, or less if the context is
            shorter.
        num_sequences: texts to generate for each prompt.
        grammar: what the texts must match.
        grammar_for: chooses the grammar once a conversation is rendered, in place of ``grammar``.
        truncate: keep only this many of a prompt's last tokens, or of a source text's first ones.
        writing: what encoder-decoder models are told beside it.
        priority: lower values are scheduled earlier.
        cache_salt: prompts share cached prefixes only with requests of the same salt.
        describe_tokens: whether the reply describes each token.
    """

    prompts: Sequence[TextOrIds] = ()
    conversation: Conversation | None = None
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    max_new_tokens: int | None = None
    num_sequences: int = 1
    grammar: GrammarRequest | None = None
    grammar_for: Callable[[str], GrammarRequest | None] | None = None
    truncate: int | None = None
    writing: Writing = dataclasses.field(default_factory=Writing)
    priority: int = 0
    cache_salt: str = ""
    describe_tokens: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """One tokenized prompt, or source text, and its sequences.

    ``text`` is None if the prompt came as token ids; ``num_truncated`` tokens were cut off.
    """

    text: str | None
    ids: list[int]
    num_truncated: int
    sequences: tuple[CausalSequence, ...]

    @property
    def context_ids(self) -> list[int]:
        """The tokens that the generated ones follow in a text; a source text is another text."""
        return [] if self.sequences[0].num_source else self.ids

    @property
    def num_cached(self) -> int:
        """Tokens taken from the prefix cache, once the prompt is prefilled."""
        # Copies of a prompt fork from the sequence that prefilled it, and reuse nothing themselves.
        return max(sequence.num_reused for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class Text:
    """One generated text, token by token."""

    events: list[TokenEvent]

    @property
    def finish(self) -> Finish:
        """How it ended."""
        finish = self.events[-1].finish
        assert finish is not None, "a stream ends with its finish or an error"
        return finish

    @property
    def mean_logprob(self) -> float:
        """Mean natural log-probability of its tokens, which ranks the texts of ``best_of``."""
        return statistics.fmean(event.logprob for event in self.events)


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and the texts generated for it."""

    prompt: Prompt
    texts: list[Text]

    def best(self, n: int) -> list[Text]:
        """All texts, in order; if there are more than ``n``, the most likely first."""
        if len(self.texts) <= n:
            return self.texts
        return sorted(self.texts, key=lambda text: text.mean_logprob, reverse=True)


class Generation:
    """An admitted request: its prompts are tokenized, its sequences ready to run.

    Create it with `prepare`; then either `complete` it or `stream` it, once.
    """

    def __init__(self, prompts: list[Prompt], model: CausalModel, deadline: Deadline) -> None:
        self.prompts = prompts
        self._model = model
        self._deadline = deadline

    @classmethod
    async def prepare(
        cls, request: GenerationRequest, model: CausalModel, config: Config, deadline: Deadline
    ) -> "Generation":
        """Checks a request against the model, compiles its grammar and tokenizes its prompts.

        Raises:
            ValidationError: the model cannot do what is asked; ``field`` says what.
            OverloadedError: the queue has no room for it.
            DeadlineError: the time is up.
        """
        try:
            async with deadline.enforced():
                return cls(await _read_prompts(request, model, config), model, deadline)
        except DeadlineError:
            model.metrics.cancelled["timeout"].inc()
            raise

    async def complete(self) -> list[Completion]:
        """Runs all sequences; if one fails, all are abandoned.

        Raises:
            MaskdialError: why one of them failed.
        """
        async with contextlib.AsyncExitStack() as stack:
            streams = iter(await self._start(stack))
            with about_grammar(), self._deadline.explained():
                return [
                    Completion(prompt, [await _read(next(streams)) for _ in prompt.sequences])
                    for prompt in self.prompts
                ]

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[AsyncIterator[NumberedEvent]]:
        """Runs all sequences and yields their events as they come, each with its sequence's index.

        Sequences are numbered prompt by prompt, and copy by copy within a prompt. Leaving the block
        abandons those that run.

        Raises:
            OverloadedError: the queue is full.
            MaskdialError: why one of them failed.
        """
        async with contextlib.AsyncExitStack() as stack:
            merged = MergedStreams()
            # The streams are left before their readers are cancelled; an expired timeout would
            # otherwise be counted as a disconnect.
            stack.push_async_callback(merged.aclose)
            streams = await self._start(stack)
            with about_grammar(), self._deadline.explained():
                async with contextlib.aclosing(merged.read(streams)) as events:
                    yield events

    async def _start(self, stack: contextlib.AsyncExitStack) -> list[TokenStream]:
        return [
            await stack.enter_async_context(
                self._model.engine.stream(sequence, self._deadline.remaining())
            )
            for prompt in self.prompts
            for sequence in prompt.sequences
        ]


async def _read(stream: TokenStream) -> Text:
    return Text([event async for event in stream])


def timings(completions: Sequence[Completion]) -> Timings:
    """A request's times are those of its slowest sequence; each prompt is prefilled once."""
    finishes = [text.finish for each in completions for text in each.texts]
    return Timings(
        queue_seconds=max(finish.queue_seconds for finish in finishes),
        inference_seconds=max(finish.inference_seconds for finish in finishes),
        compute_tokens=sum(len(each.prompt.ids) for each in completions)
        + sum(finish.generated_tokens for finish in finishes),
        truncated_tokens=sum(each.prompt.num_truncated for each in completions),
    )


@contextlib.contextmanager
def about_grammar() -> Iterator[None]:
    """Has a ValidationError name the grammar, which may also fail while it is used."""
    with about("grammar"):
        yield


async def _read_prompts(
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
    grammar = await _compile(wanted, model)
    if settings is not None:
        return await _read_sources(request, model, settings, params, grammar, beams)
    if request.truncate is None:
        for index, prompt in enumerate(given):
            if isinstance(prompt, str):
                with about("prompts", index):
                    check_characters(prompt, model.max_length, model)
    tokenized = await _tokenize(given, model, add_special_tokens=request.conversation is None)
    prompts = []
    for index, (prompt, (ids, num_special)) in enumerate(zip(given, tokenized, strict=True)):
        kept = _fit(ids, num_special, request.truncate, model, index)
        sequences = _make_sequences(request, kept, params, grammar, model, beams)
        text = prompt if isinstance(prompt, str) else None
        prompts.append(Prompt(text, kept, len(ids) - len(kept), sequences))
    if request.describe_tokens and params.prompt_logprobs:
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


async def _tokenize(
    prompts: Sequence[TextOrIds], model: CausalModel, *, add_special_tokens: bool
) -> list[tuple[list[int], int]]:
    """Each prompt's ids, and how many special tokens the tokenizer put before its text.

    A chat template writes the special tokens itself.
    """

    def encode() -> list[tuple[list[int], int]]:
        return [
            _with_leading(model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
            if isinstance(prompt, str)
            else (_checked_ids(prompt, model, index), 0)
            for index, prompt in enumerate(prompts)
        ]

    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    with model.metrics.tokenization_duration.time():
        return await offload(encode, tokenizing_seconds(texts))


def _with_leading(encoding: Encoding) -> tuple[list[int], int]:
    mask = encoding.special_tokens_mask
    return encoding.ids, mask.index(0) if 0 in mask else len(mask)


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
    default = _DEFAULT_NEW_TOKENS
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
    limit = model.defaults.new_tokens(default, context)
    max_new_tokens = request.max_new_tokens or min(max(limit, params.min_new_tokens), context)
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


def _fit(
    ids: list[int], num_special: int, truncate: int | None, model: CausalModel, index: int
) -> list[int]:
    """The last ``truncate`` tokens of a prompt, if they leave room in the context.

    The ``num_special`` tokens that the tokenizer put before a text are kept, and count, as in
    transformers.
    """
    kept = ids
    if truncate is not None and truncate < len(kept):
        num_before = min(num_special, truncate - 1)
        kept = kept[:num_before] + kept[num_before - truncate :]
    if not kept:
        raise ValidationError(
            "the prompt has no tokens; write at least one word", field="prompts", index=index
        )
    if len(kept) >= model.max_length:
        raise ValidationError(
            f"the prompt has {len(kept)} tokens; model {model.name!r} has a context of "
            f"{model.max_length}, so a prompt has at most {model.max_length - 1}; shorten or "
            "truncate it",
            field="prompts",
            index=index,
        )
    return kept


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
