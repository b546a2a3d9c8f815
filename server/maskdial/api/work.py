"""What the task routes do before an engine: count, tokenize, and say which input is wrong."""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence

from tokenizers import Encoding

from maskdial.config import Config
from maskdial.errors import ValidationError
from maskdial.metrics import ModelMetrics
from maskdial.models.tokenizer import Tokenizer

# About 2 ms of tokenizing; more is done beside the event loop.
_INLINE_CHARACTERS = 4000


def check_num_inputs(num_inputs: int, config: Config) -> None:
    """Refuses a request with more texts than one request may carry.

    Raises:
        ValidationError: it does; the message has both numbers.
    """
    if num_inputs > config.max_batch_inputs:
        raise ValidationError(
            f"inputs: {num_inputs} texts; one request may carry at most "
            f"{config.max_batch_inputs} (--max-batch-inputs)"
        )


def time_limit(asked: float | None, config: Config) -> float | None:
    """The seconds that a request may take: its own limit or the server's, whichever is shorter."""
    limits = [limit for limit in (asked, config.request_timeout) if limit]
    return min(limits, default=None)


@contextlib.contextmanager
def name_input(index: int, batch: bool) -> Iterator[None]:
    """Says which input of a batch a ValidationError is about."""
    try:
        yield
    except ValidationError as error:
        if not batch:
            raise
        raise ValidationError(f"inputs[{index}]: {error.message}") from error


async def tokenize(
    tokenizer: Tokenizer,
    metrics: ModelMetrics,
    texts: Sequence[tuple[str, str | None]],
    *,
    add_special_tokens: bool = True,
) -> list[Encoding]:
    """Tokenizes texts and pairs, beside the event loop when they are long."""
    started = time.perf_counter()

    def encode() -> list[Encoding]:
        return [
            tokenizer.encode(text, pair, add_special_tokens=add_special_tokens)
            for text, pair in texts
        ]

    if sum(len(text) + len(pair or "") for text, pair in texts) <= _INLINE_CHARACTERS:
        encodings = encode()
    else:
        encodings = await asyncio.to_thread(encode)
    metrics.tokenization_duration.observe(time.perf_counter() - started)
    return encodings
