"""A request to a masked model, for any task: admit, read, submit, answer."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from maskdial.config import Config
from maskdial.engine.fairness import current_usage
from maskdial.engine.limits import check_num_texts
from maskdial.engine.offload import offload
from maskdial.engine.timing import Deadline, T, Timed, Timings
from maskdial.errors import DeadlineError
from maskdial.masked.model import MaskedModel
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.masked.tasks.task import Reading, TaskRequest
from maskdial.runtime.adapter import Adapter


async def answer(
    request: TaskRequest[T],
    model: MaskedModel,
    config: Config,
    deadline: Deadline,
) -> Timed[T]:
    """Answers a request with a model that serves its task.

    Short texts are read without giving way to other requests: those that arrive together are queued
    together, and share a pass. An answer that needs further passes has their inputs queued behind
    those that came meanwhile; none of them is refused for lack of room.

    Raises:
        ValidationError: the request does not fit the model, or carries too many texts.
        OverloadedError: the queue has no room for it.
        DeadlineError: the time is up.
    """
    check_num_texts(request.num_texts, config)
    request.check(model)
    adapter = request.adapter(model)
    if adapter is not model.adapter:
        model = replace(model, adapter=adapter)
    model.engine.check_room(request.least_inputs(model))
    asked, request = request, await request.prepared(model, deadline)
    started = time.perf_counter()
    reading = await offload(partial(request.read, model), request.read_seconds, deadline)
    current_usage().note(model, asked, [each.input_ids for each in reading.inputs])
    model.metrics.tokenization_duration.observe(time.perf_counter() - started)
    return await proceed(reading, model, deadline)


async def proceed(reading: Reading[T], model: MaskedModel, deadline: Deadline) -> Timed[T]:
    """Runs the passes of a reading, until its answer is none.

    Args:
        reading: of the request.
        model: that it was read for.
        deadline: of the request.

    Raises:
        As `answer`.
    """
    timings = Timings(0.0, 0.0, 0)
    while True:
        try:
            results = await model.engine.submit_many(
                _for_head(reading.inputs, model.adapter), deadline.remaining(), model.adapter
            )
        except DeadlineError as error:
            raise deadline.missed() from error
        timings += _timings(reading, results)
        content = await offload(partial(reading.answer, results), reading.seconds)
        if not isinstance(content, Reading):
            return Timed(content, timings)
        reading = content


def _for_head(inputs: Sequence[MaskedInput], adapter: Adapter | None) -> Sequence[MaskedInput]:
    """Inputs whose hidden states become logits by the adapter's head, if it has one."""
    if adapter is None or adapter.head is None:
        return inputs
    head = adapter.head
    return [
        replace(each, rows=each.rows or tuple(head.rows(each.length)), reduce=head)
        for each in inputs
    ]


def num_cached(inputs: Sequence[MaskedInput], results: Sequence[MaskedResult]) -> int:
    """The tokens of those inputs whose answers were kept."""
    pairs = zip(inputs, results, strict=True)
    return sum(given.length for given, result in pairs if result.is_cached)


def _timings(reading: Reading[T], results: Sequence[MaskedResult]) -> Timings:
    """Those of inputs that were queued together are those of the slowest."""
    return Timings(
        queue_seconds=max((result.queue_seconds for result in results), default=0.0),
        inference_seconds=max((result.inference_seconds for result in results), default=0.0),
        compute_tokens=sum(len(given.input_ids) for given in reading.inputs),
        truncated_tokens=reading.num_truncated,
        cached_tokens=num_cached(reading.inputs, results),
    )
