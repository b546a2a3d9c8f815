"""Texts by unmasking and in canvases: a request, admitted and run.

Its tokens are those of any other text, but come a block or a canvas at a time.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from maskdial.bundle.manifest import Manifest
from maskdial.bundle.texts import tokenizing_seconds
from maskdial.bundle.tokenizer import IncrementalDecoder, TextOrIds, Tokenizer
from maskdial.causal.block_diffusion import BlockRequest, check_block
from maskdial.causal.chat.template import ChatTemplate
from maskdial.causal.events import Finish, TokenEvent
from maskdial.causal.generate import Completion, Text
from maskdial.causal.generation_config import GenerationDefaults
from maskdial.causal.model import CausalModel, ChatForm
from maskdial.causal.prompts import MAX_SEED, Prompt, check_size
from maskdial.causal.request import GenerationRequest, Writing
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.stream import MergedStreams
from maskdial.causal.tools.reply import ReplyFormat
from maskdial.config import Config
from maskdial.engine.fairness import current_usage
from maskdial.engine.limits import check_num_texts
from maskdial.engine.offload import offload
from maskdial.engine.philox import settle_seed
from maskdial.engine.timing import Deadline, Timed, Timings
from maskdial.errors import ValidationError, about
from maskdial.masked import run
from maskdial.masked.model import MaskedModel
from maskdial.masked.tasks.denoise import DenoiseRequest
from maskdial.masked.tasks.masked_diffusion import UnmaskRequest
from maskdial.unmasking.canvas import FilledToken
from maskdial.unmasking.text import (
    TextPlan,
    TextSoFar,
    check_fits,
    read_prompt,
)
from maskdial.unmasking.unmasker import Unmasking

_DEFAULT_TOKENS = 100  # each mask is a row of every pass, so that a whole context takes long
_AT_ONCE = 8
"""Texts of a request that are written at the same time: what they make of a pass's logits is short
work on the event loop, which the passes of hundreds would hold for seconds."""
_SAMPLING = ("do_sample", "temperature", "max_new_tokens", "include_stop")
"""What is read of `SamplingParams`, or means nothing without another parameter."""


@dataclass(frozen=True, slots=True)
class UnmaskingModel:
    """A model that writes by unmasking: of the masked family under the full mask or in canvases,
    causal under the block mask.
    """

    served: MaskedModel | CausalModel

    @property
    def name(self) -> str:
        return self.served.name

    @property
    def manifest(self) -> Manifest:
        return self.served.manifest

    @property
    def tokenizer(self) -> Tokenizer:
        return self.served.tokenizer

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and its text together."""
        return self.served.max_length

    @property
    def chat_template(self) -> ChatTemplate:
        """What conversations are written with."""
        if isinstance(self.served, CausalModel):
            return self.served.chat_template
        return self._form.template

    @property
    def reply_format(self) -> ReplyFormat:
        """How its tool calls and its reasoning are told from its text."""
        if isinstance(self.served, CausalModel):
            return self.served.reply_format
        return self._form.reply_format

    @property
    def defaults(self) -> GenerationDefaults:
        """What a checkpoint says of sampling is meant for texts that are written token by token.

        Masks are filled with the likeliest tokens; canvases are drawn as the model does it.
        """
        return GenerationDefaults(temperature=1.0 if self.writes_canvases else 0.0)

    @property
    def writes_canvases(self) -> bool:
        """Whether it has a way of its own to unmask."""
        return self.manifest.denoising is not None

    @property
    def mask_token_id(self) -> int | None:
        """The token that a prompt may not have; None for a model that fills no masks."""
        if isinstance(self.served, CausalModel):
            return self.served.mask_token_id
        return None if self.writes_canvases else self.served.tokenizer.mask_token_id

    @property
    def _form(self) -> ChatForm:
        assert isinstance(self.served, MaskedModel)
        form = self.served.chat_form
        assert isinstance(form, ChatForm), "a model that writes texts has one"
        return form


@dataclass(frozen=True, slots=True)
class UnmaskedBlock:
    """What a finished block, or a pass, adds to a text.

    Attributes:
        tokens: the new ones, in the text's order; the text's last one has its finish.
        unmasked: what the last pass has unmasked, each token by itself; None where that is not
            asked for.
    """

    tokens: Sequence[TokenEvent]
    unmasked: Sequence[TokenEvent] | None = None

    @property
    def finish(self) -> Finish | None:
        """How the text ended, if it did with this block."""
        return self.tokens[-1].finish if self.tokens else None


class UnmaskedGeneration:
    """An admitted request: its prompts are tokenized, its texts planned.

    Create it with `prepare`; then either `complete` it or `stream` it, once.

    Attributes:
        prompts: the prompts.
        warnings: none.
        shows_passes: whether a stream has what each pass unmasks.
    """

    warnings: Sequence[str] = ()

    def __init__(self, prompts: list[Prompt], texts: "list[_Text]", *, shows_passes: bool) -> None:
        self.prompts = prompts
        self.shows_passes = shows_passes
        self._texts = texts

    @classmethod
    async def prepare(
        cls, request: GenerationRequest, model: UnmaskingModel, config: Config, deadline: Deadline
    ) -> "UnmaskedGeneration":
        """Checks a request against the model, and tokenizes its prompts.

        Raises:
            ValidationError: the model cannot do what is asked; ``field`` says what.
            OverloadedError: the queue has no room for it.
            DeadlineError: the time is up.
        """
        served = model.served
        if isinstance(served, CausalModel):
            check_block(served)
        _refuse_others(request, model)
        num_prompts = max(len(request.prompts), 1)
        check_num_texts(num_prompts, config)
        num_texts = num_prompts * request.num_sequences
        check_size(num_texts, _most_tokens(request), request, config)
        served.engine.check_room(num_texts)
        async with deadline.enforced():
            given = await _prompts_of(request, model)
        reads = [partial(_read, each, index, request, model) for index, each in enumerate(given)]
        seconds = tokenizing_seconds([each for each in given if isinstance(each, str)])
        with served.metrics.tokenization_duration.time():
            read = await offload(lambda: [each() for each in reads], seconds, deadline)
        prompts, texts, turns = [], [], asyncio.Semaphore(_AT_ONCE)
        for prompt, (before, after, num_tokens) in zip(given, read, strict=True):
            prompts.append(Prompt(prompt if isinstance(prompt, str) else None, before, 0, ()))
            seed = settle_seed(request.seed)
            for copy in range(request.num_sequences):
                plan = _plan(request, num_tokens, (seed + copy) % MAX_SEED)
                parts = _parts(before, after, plan, model, request, config, deadline)
                texts.append(_Text(parts, turns, model, before, plan, request.spelled_tokens))
        current_usage().note(served, read, request.num_sequences, plan)
        return cls(prompts, texts, shows_passes=bool(request.unmasking.stream_unmasking))

    def timings(self, _: Sequence[Completion]) -> Timings:
        """Those of its slowest text; all passes so far are counted."""
        return Timings.beside([text.timings for text in self._texts])

    async def complete(self) -> list[Completion]:
        """Writes all texts; if one fails, all are abandoned.

        Raises:
            MaskdialError: why one of them failed.
        """
        events: list[list[TokenEvent]] = [[] for _ in self._texts]
        async with self.stream() as blocks:
            async for index, block in blocks:
                events[index] += block.tokens
        texts = map(Text, events)
        num_copies = len(self._texts) // len(self.prompts)
        return [
            Completion(prompt, [next(texts) for _ in range(num_copies)]) for prompt in self.prompts
        ]

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[AsyncIterator[tuple[int, UnmaskedBlock]]]:
        """Writes all texts, and yields their blocks as they come, each with its text's index.

        Texts are numbered prompt by prompt, and copy by copy within a prompt. Leaving the block
        abandons those that are being written.

        Raises:
            MaskdialError: why one of them failed.
        """
        async with contextlib.AsyncExitStack() as leaving:
            streams = [
                await leaving.enter_async_context(contextlib.aclosing(text.blocks()))
                for text in self._texts
            ]
            merged = MergedStreams[UnmaskedBlock]()
            await leaving.enter_async_context(contextlib.aclosing(merged))
            yield await leaving.enter_async_context(contextlib.aclosing(merged.read(streams)))


def _refuse_others(request: GenerationRequest, model: UnmaskingModel) -> None:
    """Refuses what means nothing where a text is unmasked, or written in canvases.

    Raises:
        ValidationError: it is asked for; ``field`` says what.
    """
    canvases = model.writes_canvases
    why = f"is for the causal mask; model {model.name!r} writes by unmasking"
    if canvases:
        why = f"means nothing to model {model.name!r}, which writes whole canvases; leave it out"
    for field in _others_asked_for(request, model):
        raise ValidationError(why, field=field)


def _others_asked_for(request: GenerationRequest, model: UnmaskingModel) -> Iterator[str]:
    plain = replace(model.defaults.sampling({}), max_new_tokens=1)
    for each in dataclasses.fields(SamplingParams):
        taken = each.name in _SAMPLING and not (
            model.writes_canvases and each.name == "temperature"
        )
        if not taken and getattr(request.params, each.name) != getattr(plain, each.name):
            yield each.name
    unasked = GenerationRequest()
    for name in ("grammar", "truncate", "infill", "prediction"):
        if getattr(request, name) != getattr(unasked, name):
            yield name
    for each in dataclasses.fields(Writing):
        if getattr(request.writing, each.name) != getattr(unasked.writing, each.name):
            yield each.name
    if model.writes_canvases:
        yield from (name for name in request.unmasking.given if name != "steps")


async def _prompts_of(request: GenerationRequest, model: UnmaskingModel) -> Sequence[TextOrIds]:
    """The prompts, or the rendered one of a conversation.

    Raises:
        ValidationError: the conversation cannot be rendered, or its reply has to match a grammar.
    """
    if request.conversation is None:
        return request.prompts
    rendered = await request.conversation.render(model)
    if request.grammar_for is not None:
        grammar = await asyncio.to_thread(request.grammar_for, rendered)
        if grammar is not None:
            raise ValidationError(
                f"bounds the tokens of a text, and model {model.name!r} writes by unmasking; "
                "leave it to the model (auto)",
                field=grammar.field,
            )
    if request.reasoning_for is not None:
        reasoning = request.reasoning_for(rendered)
        if reasoning is not None and reasoning.budget is not None:
            raise ValidationError(
                f"bounds the tokens of a text, and model {model.name!r} writes by unmasking; "
                "leave it out",
                field="thinking_budget",
            )
    return [rendered]


def _most_tokens(request: GenerationRequest) -> int:
    """How many tokens a text may have, where the context has room for them."""
    most = request.max_new_tokens or _DEFAULT_TOKENS
    return most if request.is_limited else min(most, _DEFAULT_TOKENS)


def _read(
    prompt: TextOrIds, index: int, request: GenerationRequest, model: UnmaskingModel
) -> tuple[list[int], list[int], int]:
    """The tokens before a text and after it, and how many are to be written.

    Raises:
        ValidationError: the model does not have them, or they are too many together.
    """
    with about("prompts", index if len(request.prompts) > 1 else None):
        before, after = read_prompt(
            prompt,
            model.served,
            model.max_length,
            model.mask_token_id,
            rendered=request.conversation is not None,
        )
        if not before and model.writes_canvases:
            raise ValidationError("has no tokens; send at least one")
        num_given = len(before) + len(after)
        num_tokens = _most_tokens(request)
        denoising = model.manifest.denoising
        whole = 1 if denoising is None else denoising.canvas_length
        if request.max_new_tokens is None or not request.is_limited:
            room = (model.max_length - num_given) // whole * whole
            num_tokens = max(min(num_tokens, room), 1)
        check_fits(num_given, -(-num_tokens // whole) * whole, model.name, model.max_length)
    return before, after, num_tokens


def _plan(request: GenerationRequest, num_tokens: int, seed: int) -> TextPlan:
    how, params = request.unmasking, request.params
    temperature = params.temperature if params.do_sample else 0.0
    return TextPlan(
        num_tokens,
        how.block_length,
        how.steps,
        Unmasking(how.order or "confidence", how.threshold, temperature),
        seed,
        each_pass=bool(how.stream_unmasking),
    )


def _parts(
    before: Sequence[int],
    after: Sequence[int],
    plan: TextPlan,
    model: UnmaskingModel,
    request: GenerationRequest,
    config: Config,
    deadline: Deadline,
) -> AsyncGenerator[Timed[TextSoFar]]:
    """The text after each of its blocks or canvases, or of its passes.

    Raises:
        ValidationError: the plan contradicts itself, or the model.
    """
    served = model.served
    if isinstance(served, CausalModel):
        blocks = BlockRequest(before, after, plan, request.priority).checked(served)
        return blocks.write(served, deadline)
    kind = DenoiseRequest if model.writes_canvases else UnmaskRequest
    unmask = kind(before, after, plan)
    unmask.check(served)
    return _passes(unmask, served, config, deadline)


async def _passes(
    request: UnmaskRequest | DenoiseRequest, model: MaskedModel, config: Config, deadline: Deadline
) -> AsyncGenerator[Timed[TextSoFar]]:
    part = await run.answer(request, model, config, deadline)
    yield Timed(part.content.text, part.timings)
    while part.content.rest is not None:
        part = await run.proceed(part.content.rest, model, deadline)
        yield Timed(part.content.text, part.timings)


class _Text:
    """One text, as tokens with their texts.

    Attributes:
        timings: of all passes so far.
    """

    def __init__(
        self,
        parts: AsyncGenerator[Timed[TextSoFar]],
        turns: asyncio.Semaphore,
        model: UnmaskingModel,
        before: Sequence[int],
        plan: TextPlan,
        spelled_tokens: Sequence[tuple[int, str]],
    ) -> None:
        self.timings = Timings(0.0, 0.0, 0)
        self._parts = parts
        self._turns = turns
        self._shows_passes = plan.each_pass
        self._tokenizer = model.tokenizer
        self._decoder: IncrementalDecoder = model.tokenizer.decoder(before)
        self._spellings = dict(spelled_tokens)
        self._texts: list[str] = []

    async def blocks(self) -> AsyncGenerator[UnmaskedBlock]:
        """What each block, or each pass, adds; to be called once."""
        async with self._turns, contextlib.aclosing(self._parts) as parts:
            async for part in parts:
                yield self._push(part)

    def _push(self, part: Timed[TextSoFar]) -> UnmaskedBlock:
        self.timings += part.timings
        text = part.content
        new = text.tokens[len(self._texts) :]
        tokens = [self._event(token, self._decode(token)) for token in new]
        if text.finished:
            tokens[-1] = self._finished(tokens[-1], text)
        if not self._shows_passes:
            return UnmaskedBlock(tokens)
        first = len(text.prompt_ids)
        unmasked = [
            replace(self._event(each, self._spelled(each)), index=each.position - first + 1)
            for each in sorted(text.unmasked, key=lambda each: each.position)
        ]
        return UnmaskedBlock(tokens, unmasked)

    def _decode(self, token: FilledToken) -> str:
        if token.token in self._spellings:
            # No character goes on after it
            text = self._decoder.flush() + self._spellings[token.token]
        else:
            text = self._decoder.push(token.token)
        self._texts.append(text)
        return text

    def _spelled(self, token: FilledToken) -> str:
        return self._tokenizer.decode([token.token], skip_special_tokens=False)

    def _event(self, token: FilledToken, text: str) -> TokenEvent:
        return TokenEvent(
            index=len(self._texts),
            token_id=token.token,
            text=text,
            logprob=token.logprob,
            special=token.token in self._tokenizer.special_ids,
            step=token.step,
        )

    def _finished(self, last: TokenEvent, text: TextSoFar) -> TokenEvent:
        """The last token, with what is left of a character at the end."""
        rest = self._decoder.flush()
        self._texts.append(rest)
        finish = Finish(
            reason="eos_token" if text.ended else "length",
            generated_text="".join(self._texts),
            generated_tokens=len(text.tokens),
            seed=text.seed,
            input_length=len(text.prompt_ids),
            queue_seconds=self.timings.queue_seconds,
            inference_seconds=self.timings.inference_seconds,
        )
        return replace(last, text=last.text + rest, finish=finish)
