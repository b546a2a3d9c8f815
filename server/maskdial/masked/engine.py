"""MaskedEngine: a queue of texts, and one thread that runs them through the model in batches.

A text waits only while the session is busy: an idle engine runs a lone text at once, and what
arrives during a pass forms the next batches. Equal texts of a key that wait together are
computed once; with an `AnswerCache`, one whose answer is kept does not wait at all.

Texts in the background run in passes of their own, while no other text waits. One that arrives
stops such a pass, whose texts wait again; the next pass of the background is half as large then,
so that it gets done between others.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from maskdial.engine import trace
from maskdial.engine.fairness import current_usage
from maskdial.engine.life import Engine, failure_of, publish
from maskdial.engine.offload import offload
from maskdial.errors import (
    DeadlineError,
    InferenceError,
    MaskdialError,
    OverloadedError,
    ValidationError,
)
from maskdial.masked.answer_cache import AnswerCache
from maskdial.masked.batcher import Batcher
from maskdial.masked.request import MaskedInput, MaskedResult, MaskedWork, Reply
from maskdial.metrics import CancelReason, MaskedMetrics
from maskdial.runtime.adapter import Adapter, address_of
from maskdial.runtime.session import PassStop

_SECONDS_PER_NUMBER = 16e-9
"""Of a digest: each token, and each row."""


class MaskedSession(Protocol):
    """What the engine needs of `maskdial.runtime.session.Session`."""

    @property
    def input_names(self) -> frozenset[str]: ...

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]: ...
    def run_until(
        self, feeds: Mapping[str, NDArray[Any]], stop: PassStop
    ) -> NDArray[np.float32] | None: ...


class MaskedEngine(Engine):
    """Serves one masked model. All methods may be called from any thread.

    Args:
        session: the model.
        max_batch_tokens: maximum number of tokens of a pass, padding included.
        max_queue: maximum number of waiting texts.
        pad_token_id: fills the rows of shorter texts.
        free_padding: the padding of a pass, in tokens, that costs no more than another pass.
        pad_multiple: passes are padded to a multiple of this many tokens, where kernels are faster
            at those.
        max_length: the model's, in tokens, which padding to a multiple does not exceed.
        soft_columns: of `CanvasInput.soft`, for a model that writes canvases.
        answers: what is kept of passes; None for nothing.
        metrics: the model's instruments.
        name: the model's, for messages.
    """

    failure = InferenceError

    def __init__(
        self,
        session: MaskedSession,
        *,
        max_batch_tokens: int,
        max_queue: int,
        pad_token_id: int,
        free_padding: int,
        pad_multiple: int = 1,
        max_length: int = 0,
        soft_columns: int = 0,
        answers: AnswerCache | None = None,
        metrics: MaskedMetrics,
        name: str,
    ) -> None:
        if max_queue < 1:
            raise ValueError("max_queue must be at least 1")
        super().__init__(name, metrics)
        self.max_queue = max_queue
        self.max_batch_tokens = max_batch_tokens
        self._session = session
        self._gathers_rows = "rows" in session.input_names
        self._scores_pairs = "pairs" in session.input_names
        self._takes_types = "token_type_ids" in session.input_names
        self._takes_adapters = "adapters" in session.input_names
        self._pad_token_id = pad_token_id
        self._pad_multiple = pad_multiple
        self._max_length = max_length
        self._soft_columns = soft_columns
        self._answers = answers
        self._of_texts = metrics
        self._batcher: Batcher[MaskedWork] = Batcher(max_batch_tokens, free_padding)
        self._background: Batcher[MaskedWork] = Batcher(max_batch_tokens, free_padding)
        self._running: list[MaskedWork] = []
        self._stop: PassStop | None = None  # of a pass of the background

    def check_room(self, num_texts: int) -> None:
        """Refuses now what `submit_many` would refuse: for callers with work to do before it.

        It is a request's first texts that need room; see `ClientUsage.takes_room`.

        Raises:
            OverloadedError: the queue has no room for all of them now.
            ValidationError: there are more than the queue can ever hold.
            UnavailableError: the engine is draining or dead.
        """
        if not current_usage().takes_room:
            with self._changed:
                self._check_accepting()
            return
        if num_texts > self.max_queue:
            raise ValidationError(
                f"{num_texts} texts in one request, but model {self._name!r} takes at most "
                f"{self.max_queue}; send them in several requests"
            )
        with self._changed:
            self._check_accepting()
            waiting = len(self._batcher)
            if waiting + num_texts > self.max_queue:
                raise OverloadedError(
                    f"the queue of model {self._name!r} has room for {self.max_queue - waiting} of "
                    f"this request's {num_texts} texts ({waiting} of {self.max_queue} wait "
                    "already); try again later",
                    retry_after=self._finished.seconds_for(waiting),
                )

    async def submit_many(
        self,
        inputs: Sequence[MaskedInput],
        timeout: float | None = None,  # noqa: ASYNC109 (its end is counted, and is a DeadlineError)
        adapter: Adapter | None = None,
    ) -> list[MaskedResult]:
        """Queues all texts of one request, or none, and waits for their results, in order; call it
        in that request's task. All have the same ``adapter``.

        If the caller is cancelled or ``timeout`` seconds pass, the texts that no pass has begun are
        dropped.

        Raises:
            OverloadedError: the queue has no room for all of them now.
            ValidationError: there are more than the queue can ever hold.
            UnavailableError: the engine is draining or dead.
            InferenceError: a pass with one of the texts failed; the request's others are dropped.
            DeadlineError: the timeout is over.
        """
        loop = asyncio.get_running_loop()
        now = time.perf_counter()
        usage = current_usage()
        owner = "" if self._answers is not None and self._answers.shared else usage.key
        beside = owner, "" if adapter is None else adapter.digest
        seconds = sum(each.length + len(each.rows) for each in inputs) * _SECONDS_PER_NUMBER
        requests = list[MaskedWork]()
        try:
            async with asyncio.timeout(timeout):
                keys = await offload(lambda: [each.digest(*beside) for each in inputs], seconds)
                requests += [
                    MaskedWork(each, key, loop.create_future(), now, usage, adapter)
                    for each, key in zip(inputs, keys, strict=True)
                ]
                trace.note(*requests)
                self._admit(requests)
                if len(requests) == 1:  # a future around a single one would wake the loop once more
                    return [await requests[0].future]
                return await asyncio.gather(*(request.future for request in requests))
        except asyncio.CancelledError:
            self._count_cancelled(requests, "disconnect")
            raise
        except TimeoutError as error:
            self._count_cancelled(requests, "timeout")
            raise DeadlineError(
                f"the request was not finished within {timeout:g} seconds"
            ) from error
        finally:
            self._withdraw(requests)

    def step(self) -> None:
        """Runs the next batch and hands its results to the event loop."""
        with self._changed:
            batch, stop = self._batcher.next_batch(), None
            if not batch:
                batch, stop = self._background.next_batch(), PassStop()
            self._running, self._stop = batch, stop
            self._report()
        if not batch:  # its texts were withdrawn since they were seen
            return
        replies = self._run(batch, stop)
        # Under one lock: a text that `_abandon` finds running has not been answered.
        with self._changed:
            running, self._running, self._stop = self._running, [], None
            self._metrics.requests_running.set(0)
            if stop is None:
                self._finished.add(len(batch))
            else:
                self._resize_background(stopped=replies is None)
            if replies is None:
                for work in running:
                    if not work.future.done():  # its caller has left
                        self._background.add(work)
            else:
                if running:  # not abandoned meanwhile
                    self._keep(batch, replies)
                publish(zip(batch, replies, strict=True))

    def _warm_up(self) -> None:
        self._compute([MaskedInput((self._pad_token_id,), rows=(0,))], [0])

    @property
    def _has_work(self) -> bool:
        return bool(self._batcher or self._background)

    def _abandon(self) -> list[MaskedWork]:
        left = self._running + self._batcher.clear() + self._background.clear()
        self._running = []
        self._report()
        return left

    def _report(self) -> None:
        self._metrics.queue_size.set(len(self._batcher))
        self._metrics.requests_running.set(len(self._running))

    def _admit(self, requests: list[MaskedWork]) -> None:
        with self._changed:  # reentrant: nothing comes between the check and the queue
            kept = self._kept(requests)
            waiting = [each for each in requests if each not in kept]
            self.check_room(len(waiting))  # before a kept answer makes the request one that began
            for request in waiting:
                self._queue_of(request).add(request)
            for request, answer in kept.items():
                request.usage.has_begun = True
                request.put(MaskedResult(answer, 0.0, 0.0, 0, 0, is_cached=True))
            if self._batcher and self._stop is not None:
                self._stop.set()
            self._metrics.queue_size.set(len(self._batcher))
            self._changed.notify()
        if self._answers is not None:
            looked_up = sum(each.length for each in requests if each.may_be_kept)
            self._of_texts.answer_cache_queries.inc(looked_up)
            self._of_texts.answer_cache_hits.inc(sum(each.length for each in kept))

    def _kept(self, requests: list[MaskedWork]) -> dict[MaskedWork, NDArray[np.float32]]:
        """Those whose answers are kept, and these."""
        if self._answers is None:
            return {}
        looked_up = [each for each in requests if each.may_be_kept]
        found = ((each, self._answers.get(each.key)) for each in looked_up)
        return {each: answer for each, answer in found if answer is not None}

    def _keep(self, batch: list[MaskedWork], replies: list[Reply]) -> None:
        if self._answers is None:
            return
        for request, reply in zip(batch, replies, strict=True):
            if request.may_be_kept and isinstance(reply, MaskedResult):
                self._answers.put(request.key, reply.logits)
        self._of_texts.answer_cache_bytes.set(self._answers.num_bytes)

    def _count_down(self) -> None:
        super()._count_down()
        with self._changed:
            if self._answers is not None:
                self._answers.clear()
            self._of_texts.answer_cache_bytes.set(0)

    def _withdraw(self, requests: list[MaskedWork]) -> None:
        with self._changed:
            withdrawn = [each for each in requests if self._queue_of(each).discard(each)]
            if withdrawn:
                self._metrics.queue_size.set(len(self._batcher))

    def _queue_of(self, request: MaskedWork) -> Batcher[MaskedWork]:
        return self._background if request.usage.background else self._batcher

    def _resize_background(self, *, stopped: bool) -> None:
        """Finds the size of the background's passes that get done between the others."""
        size = self._background.max_batch_tokens
        size = size // 2 if stopped else size + max(size // 4, 1)
        self._background.max_batch_tokens = min(max(size, 1), self.max_batch_tokens)

    def _count_cancelled(self, requests: list[MaskedWork], reason: CancelReason) -> None:
        self._metrics.cancelled[reason].inc(sum(each.future.cancelled() for each in requests))

    def _run(self, batch: list[MaskedWork], stop: PassStop | None) -> list[Reply] | None:
        """One pass: a reply to each text of the batch; None if it was stopped."""
        distinct = dict[bytes, MaskedWork]()
        for request in batch:  # followers are last: who had its turn pays
            distinct.setdefault(request.key, request)
        computed = list(distinct.values())
        inputs = [request.input for request in computed]
        started = time.perf_counter()
        try:
            adapters = [address_of(request.adapter) for request in computed]
            logits = self._compute(inputs, adapters, stop)
        except Exception as error:  # ONNX Runtime's exceptions share no other base
            failure = failure_of(error, InferenceError, f"a pass of model {self._name!r}")
            return [failure] * len(batch)
        if logits is None:
            return None
        seconds = time.perf_counter() - started
        size, padded_tokens = len(inputs), len(inputs) * self._padded_length(inputs)
        num_tokens = sum(each.length for each in inputs)
        for request in computed:
            request.usage.tokens += request.length
        for request in batch:
            request.usage.has_begun = True
            if stop is None:
                self._metrics.queue_duration.observe(started - request.arrived_at)
        self._metrics.observe_pass(seconds, size, num_tokens, padded_tokens)
        self._metrics.prompt_tokens.inc(num_tokens)
        rows = dict(zip(distinct, logits, strict=True))
        made = dict[tuple[bytes, int], NDArray[np.float32] | MaskdialError]()
        for request in batch:  # equal texts of a request are reduced once, too
            place = request.key, id(request.input.reduce)
            if place not in made:
                made[place] = self._reduced(request.input, rows[request.key])
        replies = list[Reply]()
        for request in batch:
            found = made[request.key, id(request.input.reduce)]
            if isinstance(found, MaskdialError):
                replies.append(found)
                continue
            waited = started - request.arrived_at
            replies.append(MaskedResult(found, waited, seconds, size, padded_tokens))
        return replies

    def _reduced(
        self, given: MaskedInput, rows: NDArray[np.float32]
    ) -> NDArray[np.float32] | MaskdialError:
        """The rows of a text, or what its input makes of them; read-only."""
        if given.reduce is None:
            return rows
        try:
            found = given.reduce(rows)
        except Exception as error:  # another text's result is none of its business
            return failure_of(
                error, InferenceError, f"reading the result of a pass of model {self._name!r}"
            )
        found.flags.writeable = False
        return found

    def _compute(
        self,
        inputs: Sequence[MaskedInput],
        adapters: Sequence[int],
        stop: PassStop | None = None,
    ) -> list[NDArray[np.float32]] | None:
        """The logits of each text, as in `MaskedResult`; None if the pass was stopped."""
        feeds = self._feeds(inputs, adapters)
        logits = self._session.run(feeds) if stop is None else self._session.run_until(feeds, stop)
        return None if logits is None else self._split(inputs, logits)

    def _feeds(
        self, inputs: Sequence[MaskedInput], adapters: Sequence[int]
    ) -> dict[str, NDArray[Any]]:
        """The graph's inputs, right-padded; `maskdial.bundle.bundle` describes them."""
        padded_length = self._padded_length(inputs)
        shape = (len(inputs), padded_length)
        input_ids = np.full(shape, self._pad_token_id, np.int64)
        for row, each in zip(input_ids, inputs, strict=True):
            row[: each.length] = each.input_ids
        lengths = np.array([each.length - each.num_unattended for each in inputs], np.int32)
        feeds: dict[str, NDArray[Any]] = {"input_ids": input_ids, "lengths": lengths}
        if self._takes_adapters:
            feeds["adapters"] = np.array(adapters, np.int64)
        if self._takes_types:
            token_type_ids = np.zeros(shape, np.int64)
            for row, each in zip(token_type_ids, inputs, strict=True):
                if each.token_type_ids is not None:
                    row[: each.length] = each.token_type_ids
            feeds["token_type_ids"] = token_type_ids
        if self._gathers_rows:
            rows = [
                text * padded_length + position
                for text, each in enumerate(inputs)
                for position in each.rows
            ]
            feeds["rows"] = np.array(rows, np.int64)
        if self._scores_pairs:
            feeds["pairs"] = _pairs(inputs)
        if self._soft_columns:
            feeds |= self._canvases(inputs)
        return feeds

    def _canvases(self, inputs: Sequence[MaskedInput]) -> dict[str, NDArray[Any]]:
        """What a graph that writes canvases reads of each token of them."""
        sizes = [len(each.rows) for each in inputs]
        soft = np.zeros((sum(sizes), self._soft_columns), np.float32)
        temperatures = np.ones(len(soft), np.float32)
        first = 0
        for each, size in zip(inputs, sizes, strict=True):
            if each.canvas is not None:
                soft[first : first + size] = each.canvas.soft
                temperatures[first : first + size] = each.canvas.temperature
            first += size
        return {
            "canvas": np.array(sizes, np.int32),
            "soft": soft,
            "temperatures": temperatures,
        }

    def _padded_length(self, inputs: Sequence[MaskedInput]) -> int:
        longest = max(each.length for each in inputs)
        rounded = -(-longest // self._pad_multiple) * self._pad_multiple
        return rounded if rounded <= self._max_length else longest

    def _split(
        self, inputs: Sequence[MaskedInput], logits: NDArray[np.float32]
    ) -> list[NDArray[np.float32]]:
        """Each text's part of a pass's logits, read-only."""
        logits.flags.writeable = False  # some texts may share theirs
        if not self._gathers_rows:
            if len(logits) != len(inputs):
                raise ValueError(f"{len(logits)} rows of logits for {len(inputs)} texts")
            return list(logits)
        ends = np.cumsum(
            [each.num_pairs if self._scores_pairs else len(each.rows) for each in inputs]
        )
        if len(logits) != ends[-1]:
            raise ValueError(f"{len(logits)} rows of logits for {ends[-1]} asked for")
        return np.split(logits, ends[:-1])


def _pairs(inputs: Sequence[MaskedInput]) -> NDArray[np.int64]:
    """Each row with each label of its text, (num_pairs, 2), by their places among all rows."""
    found, first = [], 0
    for each in inputs:
        labels = np.arange(first, first + each.num_labels)
        others = np.arange(first + each.num_labels, first + len(each.rows))
        pairs = np.empty((len(others), len(labels), 2), np.int64)
        pairs[:, :, 0], pairs[:, :, 1] = others[:, None], labels
        found.append(pairs.reshape(-1, 2))
        first += len(each.rows)
    return np.concatenate(found)
