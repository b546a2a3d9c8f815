"""What the masked family's routes share: from texts to the engine and back to headers."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request
from tokenizers import Encoding

from maskdial.api.bodies import Truncation
from maskdial.api.work import check_num_inputs, name_input, time_limit, tokenize
from maskdial.config import Config
from maskdial.errors import ValidationError
from maskdial.http.replies import Timings, unless_gone
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.models.registry import MaskedModel

TextOrPair = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of a request as tokens, each within the model's length."""

    encodings: list[Encoding]
    num_truncated: int = 0


def admit(request: Request, model: MaskedModel, num_inputs: int) -> None:
    """Refuses what would be refused later anyway, before any of it is tokenized.

    Raises:
        ValidationError: more texts than one request may carry, or than the queue ever holds.
        OverloadedError: the queue has no room for them now.
    """
    config: Config = request.app.state.config
    check_num_inputs(num_inputs, config)
    model.engine.check_room(num_inputs)


async def read_texts(
    model: MaskedModel, texts: Sequence[TextOrPair], truncation: Truncation | None, *, batch: bool
) -> Texts:
    """Tokenizes texts and pairs; one that is too long is cut where the request allows it.

    Raises:
        ValidationError: a text is too long; the message has both lengths.
    """
    encodings = await tokenize(model.tokenizer, model.metrics, texts)
    longest = model.bundle.manifest.max_length
    num_truncated = 0
    for index, encoding in enumerate(encodings):
        length = len(encoding)
        if length <= longest:
            continue
        if truncation is None or not truncation.truncate:
            with name_input(index, batch):
                raise ValidationError(
                    f"the text has {length} tokens; model {model.bundle.name!r} takes at most "
                    f'{longest}; shorten it, or set "truncate"'
                )
        cut = await asyncio.to_thread(
            model.tokenizer.encode_cut,
            *texts[index],
            max_length=longest,
            direction=truncation.truncation_direction or "right",
        )
        num_truncated += length - len(cut)
        encodings[index] = cut
    return Texts(encodings, num_truncated)


def masked_input(encoding: Encoding, rows: tuple[int, ...] = ()) -> MaskedInput:
    """A tokenized text as the engine takes it, with the positions whose logits are wanted."""
    return MaskedInput(tuple(encoding.ids), rows, tuple(encoding.type_ids))


async def run_masked(
    request: Request, model: MaskedModel, inputs: Sequence[MaskedInput], asked: float | None
) -> list[MaskedResult]:
    """Runs the inputs of a request, within the time that it ``asked`` for and the server's limit.

    Raises:
        ClientGoneError: the client left.
        DeadlineError: the time is over.
    """
    limit = time_limit(asked, request.app.state.config)
    return await unless_gone(request, model.engine.submit_many(inputs, limit))


def masked_headers(
    inputs: Sequence[MaskedInput], results: Sequence[MaskedResult], num_truncated: int = 0
) -> dict[str, str]:
    """The reply's headers. A request's times are those of its slowest text."""
    return Timings(
        queue_seconds=max(result.queue_seconds for result in results),
        inference_seconds=max(result.inference_seconds for result in results),
        compute_tokens=sum(len(given.input_ids) for given in inputs),
        truncated_tokens=num_truncated,
    ).headers()
