"""The route `/token-classify`."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
from fastapi import APIRouter, Request, Response
from tokenizers import Encoding

from maskdial.api.bodies import TokenClassifyBody, TokenClassifyParameters
from maskdial.api.masked import admit, masked_headers, masked_input, run_masked
from maskdial.api.schema import parse_body
from maskdial.api.work import name_input, tokenize
from maskdial.errors import ValidationError
from maskdial.http.replies import body_schema, json_reply
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.masked.tasks import token_classify as task
from maskdial.models.registry import MaskedModel, Models

T = TypeVar("T")

router = APIRouter(tags=["masked"])

# About 5 ms of windows or entities; more is made beside the event loop.
_INLINE_TOKENS = 1000


@dataclass(frozen=True, slots=True)
class _Text:
    """A text of a request, its tokens, and how many of them are not special."""

    text: str
    encoding: Encoding
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Reading:
    """How texts are read: in windows with room for so many of their tokens, of which neighbours
    share ``stride``.
    """

    room: int
    stride: int

    @classmethod
    def choose(cls, model: MaskedModel, stride: int | None) -> Self:
        """Windows as long as the model takes; neighbours share a quarter where no stride is given.

        Raises:
            ValidationError: the stride is not less than the window.
        """
        max_length = model.bundle.manifest.max_length
        room = max_length - model.tokenizer.num_special_tokens(pair=False)
        if stride is None:
            return cls(room, room // 4)
        if stride >= room:
            raise ValidationError(
                f"parameters.stride: must be less than {room}, the tokens of a text in one window "
                f"of model {model.bundle.name!r} ({max_length} with special ones), not {stride}"
            )
        return cls(room, stride)

    def count_windows(self, text: _Text) -> int:
        return task.count_windows(text.num_tokens, self.room, self.stride)


@router.post("/token-classify", openapi_extra=body_schema(TokenClassifyBody))
async def token_classify(request: Request) -> Response:
    """Tags the tokens of a text, and merges them into entities."""
    return await serve_token_classify(request, await request.body(), None)


async def serve_token_classify(request: Request, content: bytes, name: str | None) -> Response:
    """Answers a `/token-classify` body with the named model, or the one that the body means."""
    body = parse_body(TokenClassifyBody, content)
    models: Models = request.app.state.models
    model = models.for_masked_task("token-classify", name or body.model)
    request.state.model = model.bundle.name
    parameters = body.parameters or TokenClassifyParameters()

    reading = _Reading.choose(model, parameters.stride)
    batch = isinstance(body.inputs, list)
    items = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    admit(request, model, len(items))
    encodings = await tokenize(model.tokenizer, model.metrics, [(item, None) for item in items])
    num_special = model.tokenizer.num_special_tokens(pair=False)
    texts = [
        _Text(item, encoding, len(encoding) - num_special)
        for item, encoding in zip(items, encodings, strict=True)
    ]
    _check_num_windows(model, texts, reading, batch=batch)

    few = sum(text.num_tokens for text in texts) <= _INLINE_TOKENS
    inputs = await _compute(few, lambda: list(_window_inputs(model, texts, reading)))
    # A text may hold nothing that the tokenizer keeps.
    results = await run_masked(request, model, inputs, body.timeout) if inputs else []
    headers = masked_headers(inputs, results) if inputs else {}

    def reply() -> Response:
        answers = _answer_all(model, texts, reading, results, parameters)
        return json_reply(answers if batch else answers[0], headers=headers)

    return await _compute(few, reply)


async def _compute(few: bool, work: Callable[[], T]) -> T:
    return work() if few else await asyncio.to_thread(work)


def _check_num_windows(
    model: MaskedModel, texts: Sequence[_Text], reading: _Reading, *, batch: bool
) -> None:
    """Refuses what needs more windows than the queue holds, before they are made.

    Raises:
        ValidationError: it never could hold them.
        OverloadedError: it has no room for them now.
    """
    most = model.engine.max_queue
    counts = [reading.count_windows(text) for text in texts]
    remedy = f"(stride {reading.stride}); this server reads at most {most} windows in one request"
    for index, (text, count) in enumerate(zip(texts, counts, strict=True)):
        if count > most:
            with name_input(index, batch):
                raise ValidationError(
                    f"the text has {text.num_tokens:,} tokens, which are {count:,} windows of "
                    f"{reading.room} {remedy}"
                )
    if sum(counts) > most:
        raise ValidationError(
            f"inputs: {len(texts)} texts are {sum(counts):,} windows of {reading.room} tokens "
            f"{remedy}"
        )
    model.engine.check_room(sum(counts))


def _window_inputs(
    model: MaskedModel, texts: Sequence[_Text], reading: _Reading
) -> Iterator[MaskedInput]:
    """Each text's windows, which ask for the tokens that they answer for: every token once."""
    for text in texts:
        plan = task.plan_windows(text.num_tokens, reading.room, reading.stride)
        if len(plan) > 1:
            encodings = model.tokenizer.windows(
                text.text, max_length=model.bundle.manifest.max_length, stride=reading.stride
            )
        else:
            encodings = [text.encoding] * len(plan)
        for window, encoding in zip(plan, encodings, strict=True):
            positions = task.text_positions(encoding)
            first, end = window.tokens.start - window.start, window.tokens.stop - window.start
            yield masked_input(encoding, tuple(positions[first:end].tolist()))


def _answer_all(
    model: MaskedModel,
    texts: Sequence[_Text],
    reading: _Reading,
    results: Sequence[MaskedResult],
    parameters: TokenClassifyParameters,
) -> list[list[task.TaggedToken] | list[task.Entity]]:
    """Each text's answer, from the results of its windows."""
    ignore_labels = ("O",) if parameters.ignore_labels is None else parameters.ignore_labels
    left = iter(results)
    answers: list[list[task.TaggedToken] | list[task.Entity]] = []
    for text in texts:
        windows = [next(left).logits for _ in range(reading.count_windows(text))]
        if not windows:
            answers.append([])
            continue
        answers.append(
            task.classify_tokens(
                np.concatenate(windows),
                task.read_tokens(text.text, text.encoding, model.tokenizer),
                model.bundle.manifest.labels,
                model.tokenizer,
                strategy=parameters.aggregation_strategy or "simple",
                ignore_labels=ignore_labels,
            )
        )
    return answers
