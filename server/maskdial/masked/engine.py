"""MaskedEngine: a queue of texts, and one thread that runs them through the model in batches.

A text waits only while the session is busy: an idle engine runs a lone text at once, and what
arrives meanwhile forms the next batches. The event loops that submit are told of their results with
one call per batch.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from maskdial.errors import (
    DeadlineError,
    InferenceError,
    MaskdialError,
    OverloadedError,
    UnavailableError,
    ValidationError,
)
from maskdial.masked.batcher import Batcher
from maskdial.masked.request import MaskedInput, MaskedResult, Request
from maskdial.metrics import CancelReason, EngineMetrics

logger = logging.getLogger(__name__)

Outcome = MaskedResult | MaskdialError

# How long stop() waits after its grace for the pass under way, which cannot be interrupted.
_LAST_PASS_SECONDS = 10.0


class MaskedSession(Protocol):
    """What the engine needs of `maskdial.runtime.session.Session`."""

    @property
    def input_names(self) -> frozenset[str]: ...

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]: ...


class MaskedEngine:
    """Serves one masked model. All methods may be called from any thread.

    ``max_batch_tokens`` limits a pass in padded tokens, ``max_queue`` the texts that wait. Passes
    are as long as their longest text, or up to ``pad_multiple - 1`` tokens longer where kernels
    are faster at multiples of it, within the model's ``max_length``.
    """

    def __init__(
        self,
        session: MaskedSession,
        *,
        max_batch_tokens: int,
        max_queue: int,
        pad_token_id: int,
        pad_multiple: int = 1,
        max_length: int = 0,
        metrics: EngineMetrics,
        name: str,
    ) -> None:
        if max_queue < 1:
            raise ValueError("max_queue is at least 1")
        self.name = name
        self.max_queue = max_queue
        self._session = session
        self._gathers_rows = "rows" in session.input_names
        self._takes_types = "token_type_ids" in session.input_names
        self._pad_token_id = pad_token_id
        self._pad_multiple = pad_multiple
        self._max_length = max_length
        self._metrics = metrics
        self._thread = threading.Thread(target=self._main, name=f"maskdial-{name}", daemon=True)
        # Guards everything below; notified when a text is queued, a pass ends, or the engine stops.
        self._changed = threading.Condition()
        self._batcher: Batcher[Request] = Batcher(max_batch_tokens)
        self._running: list[Request] = []
        self._refusal: str | None = f"model {name!r} is starting"
        self._stopping = False
        self._ran_a_pass = False

    @property
    def healthy(self) -> bool:
        """Whether the engine thread runs and takes requests."""
        return self._refusal is None

    @property
    def ready(self) -> bool:
        """Whether it is healthy and a pass has succeeded, the warm-up's or another."""
        return self.healthy and self._ran_a_pass

    @property
    def num_queued(self) -> int:
        """The texts that wait for a pass."""
        return len(self._batcher)

    def start(self) -> None:
        """Starts the engine thread. An engine starts once, and not after stop().

        Raises:
            RuntimeError: it was started or stopped before.
        """
        with self._changed:
            if self._stopping:
                raise RuntimeError(f"the engine of model {self.name!r} was stopped")
            self._thread.start()
            self._refusal = None
        self._metrics.engine_up(True)

    async def warm_up(self) -> None:
        """Runs one short text, after which the engine is ready. No metric counts it.

        Raises:
            InferenceError: the pass failed.
        """
        await self._submit([MaskedInput((self._pad_token_id,), rows=(0,))], observed=False)

    def check_room(self, num_texts: int) -> None:
        """Refuses now what `submit_many` would refuse: for callers with work to do before it.

        Raises:
            OverloadedError, ValidationError, UnavailableError: as `submit_many` does.
        """
        if num_texts > self.max_queue:
            raise ValidationError(
                f"{num_texts} texts in one request, but model {self.name!r} takes at most "
                f"{self.max_queue}; send them in several requests"
            )
        with self._changed:
            if self._refusal is not None:
                raise UnavailableError(self._refusal)
            waiting = len(self._batcher)
            if waiting + num_texts > self.max_queue:
                raise OverloadedError(
                    f"the queue of model {self.name!r} has room for {self.max_queue - waiting} of "
                    f"this request's {num_texts} texts ({waiting} of {self.max_queue} wait "
                    "already); try again later"
                )

    async def submit_many(
        self, inputs: Sequence[MaskedInput], time_limit: float | None = None
    ) -> list[MaskedResult]:
        """Queues all texts of one request, or none, and waits for their results, in order.

        Cancelling the wait drops the texts that no pass has begun, and so does its end after
        ``time_limit`` seconds.

        Raises:
            OverloadedError: the queue has no room for all of them now.
            ValidationError: there are more than the queue can ever hold.
            UnavailableError: the engine is starting, draining or down.
            InferenceError: a pass with one of the texts failed; the request's others are dropped.
            DeadlineError: the time is over.
        """
        return await self._submit(inputs, time_limit, observed=True)

    def stop(self, grace: float) -> None:
        """Refuses new texts, lets those waiting and running finish for ``grace`` seconds at most,
        fails the rest with UnavailableError, and ends the thread.

        It blocks, and results are delivered by the event loops that wait for them: call it from
        another thread (``asyncio.to_thread``).
        """
        with self._changed:
            self._stopping = True
            if self._refusal is None or self._thread.ident is None:
                self._refusal = f"model {self.name!r} is shutting down"
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._batcher and not self._running, grace)
            left = self._abandon()
        for _ in left:
            self._metrics.cancelled("shutdown")
        reason = f"model {self.name!r} shut down before this request was finished"
        self._publish((request, UnavailableError(reason)) for request in left)
        if self._thread.ident is not None:
            self._thread.join(_LAST_PASS_SECONDS)
        self._metrics.engine_up(False)

    async def _submit(
        self, inputs: Sequence[MaskedInput], time_limit: float | None = None, *, observed: bool
    ) -> list[MaskedResult]:
        loop = asyncio.get_running_loop()
        now = time.perf_counter()
        requests = [Request(each, loop.create_future(), now, observed) for each in inputs]
        self._admit(requests)
        try:
            async with asyncio.timeout(time_limit):
                return await asyncio.gather(*(request.future for request in requests))
        except asyncio.CancelledError:
            self._count_cancelled(requests, "disconnect")
            raise
        except TimeoutError as error:
            self._count_cancelled(requests, "timeout")
            raise DeadlineError(
                f"the request was not finished within {time_limit:g} seconds"
            ) from error
        finally:
            self._withdraw(requests)

    def _count_cancelled(self, requests: list[Request], reason: CancelReason) -> None:
        for request in requests:
            if request.future.cancelled():
                self._metrics.cancelled(reason)

    def _admit(self, requests: list[Request]) -> None:
        with self._changed:  # reentrant, so nothing comes between the check and the queue
            self.check_room(len(requests))
            for request in requests:
                self._batcher.add(request)
            self._metrics.queue_size(len(self._batcher))
            self._changed.notify_all()

    def _withdraw(self, requests: list[Request]) -> None:
        with self._changed:
            withdrawn = [request for request in requests if self._batcher.discard(request)]
            if withdrawn:
                self._metrics.queue_size(len(self._batcher))
                self._changed.notify_all()

    def _abandon(self) -> list[Request]:
        """Takes back everything that waits or runs; the caller holds the lock."""
        left = self._running + self._batcher.clear()
        self._running = []
        self._metrics.queue_size(0)
        self._metrics.running(0)
        return left

    def _main(self) -> None:
        """The engine thread: passes, until the engine stops."""
        try:
            while batch := self._next_batch():
                self._finish(batch, self._run(batch))
        except BaseException as error:
            logger.critical("engine %r died", self.name, exc_info=True)
            self._die(error)

    def _next_batch(self) -> list[Request]:
        """Waits for texts; empty when the engine is stopping and none are left."""
        with self._changed:
            self._changed.wait_for(lambda: self._batcher or self._stopping)
            self._running = self._batcher.next_batch()
            self._metrics.queue_size(len(self._batcher))
            self._metrics.running(len(self._running))
            return self._running

    def _finish(self, batch: list[Request], outcomes: list[Outcome]) -> None:
        # Under one lock: whoever finds a text running may fail it, and it was not answered yet.
        with self._changed:
            self._publish(zip(batch, outcomes, strict=True))
            self._running = []
            self._metrics.running(0)
            self._changed.notify_all()

    def _die(self, error: BaseException) -> None:
        reason = f"the engine of model {self.name!r} died ({_describe(error)})"
        with self._changed:
            self._refusal = f"{reason}; the server has to be restarted"
            left = self._abandon()
            self._changed.notify_all()
        self._metrics.engine_up(False)
        self._publish((request, InferenceError(reason)) for request in left)

    def _run(self, batch: list[Request]) -> list[Outcome]:
        """One pass: an outcome for each text of the batch."""
        started = time.perf_counter()
        try:
            logits = self._split(batch, self._session.run(self._feeds(batch)))
        except Exception as error:
            logger.exception("a pass of model %r over %d texts failed", self.name, len(batch))
            reason = f"a pass of model {self.name!r} failed ({_describe(error)})"
            return [InferenceError(reason) for _ in batch]
        seconds = time.perf_counter() - started
        self._ran_a_pass = True
        self._observe(batch, started, seconds)
        size, tokens = len(batch), len(batch) * self._padded_length(batch)
        return [
            MaskedResult(rows, started - request.arrival, seconds, size, tokens)
            for request, rows in zip(batch, logits, strict=True)
        ]

    def _feeds(self, batch: list[Request]) -> dict[str, NDArray[Any]]:
        """The graph's inputs, right-padded; `maskdial.models.bundle` says what each one is."""
        padded_length = self._padded_length(batch)
        shape = (len(batch), padded_length)
        input_ids = np.full(shape, self._pad_token_id, np.int64)
        for row, request in zip(input_ids, batch, strict=True):
            row[: request.length] = request.input.input_ids
        lengths = np.array([request.length for request in batch], np.int32)
        feeds: dict[str, NDArray[Any]] = {"input_ids": input_ids, "lengths": lengths}
        if self._takes_types:
            token_type_ids = np.zeros(shape, np.int64)
            for row, request in zip(token_type_ids, batch, strict=True):
                if request.input.token_type_ids is not None:
                    row[: request.length] = request.input.token_type_ids
            feeds["token_type_ids"] = token_type_ids
        if self._gathers_rows:
            rows = [
                b * padded_length + position
                for b, request in enumerate(batch)
                for position in request.input.rows
            ]
            feeds["rows"] = np.array(rows, np.int64)
        return feeds

    def _padded_length(self, batch: list[Request]) -> int:
        longest = max(request.length for request in batch)
        rounded = -(-longest // self._pad_multiple) * self._pad_multiple
        return rounded if rounded <= self._max_length else longest

    def _split(
        self, batch: list[Request], logits: NDArray[np.float32]
    ) -> list[NDArray[np.float32]]:
        """Each text's part of the pass's logits."""
        if not self._gathers_rows:
            if len(logits) != len(batch):
                raise ValueError(f"{len(logits)} rows of logits for {len(batch)} texts")
            return list(logits)
        ends = np.cumsum([len(request.input.rows) for request in batch])
        if len(logits) != ends[-1]:
            raise ValueError(f"{len(logits)} rows of logits for {ends[-1]} asked for")
        return np.split(logits, ends[:-1])

    def _observe(self, batch: list[Request], started: float, seconds: float) -> None:
        observed = [request for request in batch if request.observed]
        if not observed:
            return
        for request in observed:
            self._metrics.queued(started - request.arrival)
        num_tokens = sum(request.length for request in batch)
        self._metrics.inference(seconds)
        self._metrics.batch(len(batch), num_tokens, len(batch) * self._padded_length(batch))
        self._metrics.prompt_tokens(num_tokens)

    def _publish(self, outcomes: Iterable[tuple[Request, Outcome]]) -> None:
        """Hands outcomes to the loops that wait for them, with one call per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Request, Outcome]]] = {}
        for request, outcome in outcomes:
            by_loop.setdefault(request.future.get_loop(), []).append((request, outcome))
        for loop, replies in by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, replies)
            except RuntimeError:  # the loop was closed: nobody waits any more
                logger.debug("%d results of model %r had no reader", len(replies), self.name)


def _resolve(replies: list[tuple[Request, Outcome]]) -> None:
    """Runs in the futures' own loop."""
    for request, outcome in replies:
        if request.future.done():  # the client left
            continue
        if isinstance(outcome, MaskedResult):
            request.future.set_result(outcome)
        else:
            request.future.set_exception(outcome)


def _describe(error: BaseException) -> str:
    """An exception as part of a sentence: its type and the first line of its message."""
    first_line = (str(error).splitlines() or [""])[0].strip()
    name = type(error).__name__
    return f"{name}: {first_line[:200]}" if first_line else name
