"""A request to a masked model, for any task: admit, read, submit, answer."""

import time
from functools import partial

from maskdial.config import Config
from maskdial.engine.limits import check_num_texts
from maskdial.engine.offload import offload
from maskdial.engine.timing import Deadline, T, Timed, Timings
from maskdial.errors import DeadlineError
from maskdial.masked.model import MaskedModel
from maskdial.masked.tasks.task import TaskRequest


async def answer(
    request: TaskRequest[T],
    model: MaskedModel,
    config: Config,
    deadline: Deadline,
) -> Timed[T]:
    """Answers a request with a model that serves its task.

    Short texts are read without giving way to other requests: those that arrive together are queued
    together, and share a pass.

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
        results = await model.engine.submit_many(
            reading.inputs, deadline.remaining(), model.adapter
        )
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
    return Timed(content, timings)
