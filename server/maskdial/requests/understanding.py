"""A request to a masked model, whatever its task: admit, read, submit, answer."""

import time
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from maskdial.config import Config
from maskdial.errors import DeadlineError, ValidationError
from maskdial.masked.tasks.task import TaskRequest
from maskdial.models.served import MaskedModel
from maskdial.requests.offload import offload
from maskdial.requests.timing import Deadline, Timings

T = TypeVar("T")

MAX_TOKENIZE_CHARACTERS = 500_000
"""What one request may have tokenized for its own sake; a token takes 70 bytes of the reply."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What a request gets: the task's answer, and the reply's timings."""

    content: T
    timings: Timings


class Wait(Protocol):
    """Awaits the engine on behalf of a client, which may leave meanwhile."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> Awaitable[T]: ...


async def answer(
    request: TaskRequest[T],
    model: MaskedModel,
    config: Config,
    deadline: Deadline,
    wait: Wait,
) -> Answer[T]:
    """Answers a request with a model that serves its task.

    Short texts are read without giving way to other requests, and only then is there anything to
    ``wait`` for: requests that arrive together are queued together, and share a pass.

    Raises:
        ValidationError: the request does not fit the model, or carries too many texts.
        OverloadedError: the queue has no room for it.
        DeadlineError: the time is up.
    """
    check_num_texts(request.num_texts, config)
    request.check(model)
    model.engine.check_room(request.num_inputs)
    started = time.perf_counter()
    reading = await offload(partial(request.read, model), request.read_seconds, deadline)
    model.metrics.tokenization_duration.observe(time.perf_counter() - started)
    try:
        results = await wait(model.engine.submit_many(reading.inputs, deadline.remaining()))
    except DeadlineError as error:
        raise deadline.missed() from error
    content = await offload(partial(reading.answer, results), reading.seconds)
    # A request's times are those of its slowest input.
    timings = Timings(
        queue_seconds=max((result.queue_seconds for result in results), default=0.0),
        inference_seconds=max((result.inference_seconds for result in results), default=0.0),
        compute_tokens=sum(len(given.input_ids) for given in reading.inputs),
        truncated_tokens=reading.num_truncated,
    )
    return Answer(content, timings)


def check_num_texts(num_texts: int, config: Config) -> None:
    """Refuses a request with more texts than one request may carry.

    Raises:
        ValidationError: it does; the message has both numbers.
    """
    if num_texts > config.max_batch_inputs:
        raise ValidationError(
            f"{num_texts} texts; one request may carry at most {config.max_batch_inputs} "
            "(--max-batch-inputs)",
            field="texts",
        )


def check_num_characters(texts: Sequence[str]) -> None:
    """Refuses a request to tokenize more than a reply with every token can hold.

    Raises:
        ValidationError: it does; the message has both numbers.
    """
    num_characters = sum(map(len, texts))
    if num_characters > MAX_TOKENIZE_CHARACTERS:
        raise ValidationError(
            f"{num_characters:,} characters; one request may have at most "
            f"{MAX_TOKENIZE_CHARACTERS:,} of them tokenized; send several",
            field="texts",
        )
