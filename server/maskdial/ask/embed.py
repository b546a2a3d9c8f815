"""Vectors of more texts than may queue at once."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.tokenizer import TextOrIds
from maskdial.config import Config
from maskdial.engine.timing import Deadline, Timed
from maskdial.errors import ValidationError
from maskdial.masked import run
from maskdial.masked.model import MaskedModel
from maskdial.masked.tasks.embed import EmbedRequest

_MAX_TEXTS = 2048  # as OpenAI


def _check_num_texts(texts: Sequence[TextOrIds], config: Config) -> None:
    max_texts = max(_MAX_TEXTS, config.max_batch_inputs)
    if len(texts) > max_texts:
        raise ValidationError(
            f"{len(texts)} texts; one request may carry at most {max_texts}", field="texts"
        )


async def embed_all(
    wanted: EmbedRequest, model: MaskedModel, config: Config, deadline: Deadline
) -> Timed[NDArray[np.float32]]:
    """Embeds the texts of a request, in pieces of as many as may queue at once.

    Raises:
        ValidationError: the model cannot do what is asked, or not for so many texts.
        OverloadedError: the queue has no room.
        DeadlineError: the time is up.
    """
    _check_num_texts(wanted.texts, config)
    size = config.max_batch_inputs
    pieces = [
        await _embed(
            start,
            replace(wanted, texts=wanted.texts[start : start + size]),
            model,
            config,
            deadline,
        )
        for start in range(0, wanted.num_texts, size)
    ]
    vectors = np.concatenate([piece.content for piece in pieces])
    return Timed(vectors, reduce(add, (piece.timings for piece in pieces)))


async def _embed(
    start: int, piece: EmbedRequest, model: MaskedModel, config: Config, deadline: Deadline
) -> Timed[NDArray[np.float32]]:
    """Embeds a piece of the texts, those from the index ``start`` on."""
    try:
        return await run.answer(piece, model, config, deadline)
    except ValidationError as error:
        if error.index is None:
            raise
        raise ValidationError(
            error.message, field=error.field, index=start + error.index
        ) from error
