"""Request: one text on its way through the masked engine, from its token ids to its logits."""

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class MaskedInput:
    """One tokenized text (or pair).

    ``rows`` are the token positions whose logits are wanted, for a graph that gathers rows
    (fill-mask); a classifier has one row per text and ignores them. ``token_type_ids`` are zeros
    when they are not given.

    Raises:
        ValueError: no tokens, type ids of another length, or a row outside the text.
    """

    input_ids: tuple[int, ...]
    rows: tuple[int, ...] = ()
    token_type_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        length = len(self.input_ids)
        if not length:
            raise ValueError("a text has at least one token")
        if self.token_type_ids is not None and len(self.token_type_ids) != length:
            raise ValueError(f"{len(self.token_type_ids)} token type ids for {length} tokens")
        if self.rows and not (min(self.rows) >= 0 and max(self.rows) < length):
            raise ValueError(f"rows {self.rows} do not all lie in a text of {length} tokens")


@dataclass(frozen=True, slots=True)
class MaskedResult:
    """What the model said about one text.

    ``logits`` are float32: (num_rows, vocab_size) in the order of the input's rows, or
    (num_labels,) from a classifier. The text waited ``queue_seconds``; the pass that it shared took
    ``inference_seconds`` over ``batch_size`` texts and ``batch_tokens`` tokens, padding included.
    """

    logits: NDArray[np.float32]
    queue_seconds: float
    inference_seconds: float
    batch_size: int
    batch_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """An input in the engine, with its own reply channel.

    ``arrival`` is a ``time.perf_counter`` reading. ``observed`` is False for a warm-up, which no
    metric counts.
    """

    input: MaskedInput
    future: asyncio.Future[MaskedResult]
    arrival: float
    observed: bool = True

    @property
    def length(self) -> int:
        return len(self.input.input_ids)
