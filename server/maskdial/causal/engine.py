"""CausalEngine: continuous batching of text generation on one thread."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.sampler import Sample, sample
from maskdial.causal.scheduler import Plan, Prefill, Scheduler
from maskdial.causal.sequence import Detokenizer, Sequence, State, TokenEvent
from maskdial.causal.stream import Reply, ReplyChannel, TokenStream, publish
from maskdial.errors import GenerationError, MaskdialError, UnavailableError, ValidationError
from maskdial.metrics import EngineMetrics

_log = logging.getLogger(__name__)

_LAST_STEP_SECONDS = 10.0


class ModelRunner(Protocol):
    """What the engine needs of a model; `maskdial.causal.runner` describes the methods."""

    @property
    def bytes_per_token(self) -> int: ...
    def copy(self, source: int, target: int, num_tokens: int) -> None: ...
    def prefill(
        self, slot: int, token_ids: NDArray[np.int64], start: int
    ) -> NDArray[np.float32]: ...
    def decode(
        self, token_ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True)
class _Output:
    """What a pass gave: logits (num_sequences, vocab_size), or why it failed, or neither."""

    sequences: tuple[Sequence, ...]
    logits: NDArray[np.float32] | None
    error: str | None = None


class CausalEngine:
    """Generates text for many sequences at once, one token each per `step`.

    A failed pass ends the sequences in it with `GenerationError`, and the engine goes on. Any other
    fault ends the thread: every sequence fails at once and ``healthy`` turns False.

    Args:
        runner: the model.
        detokenizer: turns tokens into text.
        slots: sequences that run at once.
        max_length: tokens of prompt and text together.
        prefill_chunk_tokens: most prompt tokens between two decode steps.
        max_queue: sequences that may wait for a slot.
        eos_token_ids: tokens that end a text.
        metrics: where to report.
        name: the model's, for messages.
    """

    def __init__(
        self,
        runner: ModelRunner,
        detokenizer: Detokenizer,
        *,
        slots: int,
        max_length: int,
        prefill_chunk_tokens: int,
        max_queue: int,
        eos_token_ids: Iterable[int],
        metrics: EngineMetrics,
        name: str,
    ) -> None:
        self._runner = runner
        self._detokenizer = detokenizer
        self._max_length = max_length
        self._capacity = slots * max_length
        self._eos_token_ids = frozenset(eos_token_ids)
        self._metrics = metrics
        self._name = name
        self._scheduler = Scheduler(
            slots=slots, prefill_chunk_tokens=prefill_chunk_tokens, max_queue=max_queue
        )
        # Guards the scheduler and the flags below; never held during a pass.
        self._changed = threading.Condition()
        self._draining = False
        self._failure: str | None = None
        self._warmed_up = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"maskdial-{name}", daemon=True)

    @property
    def healthy(self) -> bool:
        """False once the engine's thread has died."""
        return self._failure is None

    @property
    def ready(self) -> bool:
        """Whether the model ran a pass and requests are taken."""
        return self._warmed_up.is_set() and self.healthy and not self._draining

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        with self._changed:
            return len(self._scheduler.running)

    def start(self) -> None:
        """Starts the engine's thread, which warms the model up and turns ``ready`` on."""
        self._thread.start()

    def check_room(self, num_sequences: int) -> None:
        """Refuses now what `stream` would refuse: for callers with work to do before it.

        Raises:
            OverloadedError: the queue has no room for so many.
            UnavailableError: the engine is stopping or has died.
        """
        with self._changed:
            if self._failure is not None:
                raise UnavailableError(self._failure)
            if self._draining:
                raise UnavailableError(f"model {self._name!r} is shutting down")
            self._scheduler.check_room(num_sequences)

    def stream(self, sequence: Sequence) -> TokenStream:
        """Queues a sequence and returns its events; to be called in a running event loop.

        Close the stream if you leave it early: that gives the slot back within one step.

        Raises:
            ValidationError: the prompt is empty or longer than the context.
            OverloadedError: the queue is full.
            UnavailableError: the engine is stopping or has died.
        """
        if not 1 <= sequence.num_prompt <= self._max_length:
            raise ValidationError(
                f"the prompt has {sequence.num_prompt} tokens; model {self._name!r} takes 1 to "
                f"{self._max_length}"
            )
        channel = ReplyChannel()
        with self._changed:  # reentrant, so nothing comes between the check and the queue
            self.check_room(1)
            sequence.reply = channel
            self._scheduler.add(sequence)
            self._metrics.queue_size(self._scheduler.num_waiting)
            self._changed.notify()
        return TokenStream(channel, lambda: self._cancel(sequence))

    async def warm_up(self) -> None:
        """Waits until a started engine has run its first passes. No metric counts them.

        Raises:
            GenerationError: they failed; the engine is down.
        """
        await asyncio.to_thread(self._warmed_up.wait)
        if self._failure is not None:
            raise GenerationError(self._failure)

    def stop(self, grace: float) -> None:
        """Refuses new sequences, lets those waiting and running finish for ``grace`` seconds at
        most, fails the rest with UnavailableError, and ends the thread.

        It blocks, and events are delivered by the event loops that wait for them: call it from
        another thread (``asyncio.to_thread``).
        """
        with self._changed:
            self._draining = True
            self._changed.notify()
        started = self._thread.ident is not None
        if started:
            self._thread.join(grace)
        num_dropped = self._fail_all(
            UnavailableError, f"model {self._name!r} shut down before the text was finished"
        )
        for _ in range(num_dropped):
            self._metrics.cancelled("shutdown")
        if started:
            self._thread.join(_LAST_STEP_SECONDS)
        self._metrics.engine_up(False)

    def step(self) -> None:
        """One iteration: at most one decode step of all sequences and one chunk of a prompt."""
        plan = self._schedule()
        outputs = self._run(plan)
        events = self._sample(outputs)
        self._publish(plan, events)

    def _schedule(self) -> Plan:
        with self._changed:
            plan = self._scheduler.schedule()
        if plan.prefill is not None and plan.prefill.start == 0:
            sequence = plan.prefill.sequence
            sequence.started_at = time.perf_counter()
            self._metrics.queued(sequence.started_at - sequence.arrived_at)
        return plan

    def _run(self, plan: Plan) -> list[_Output]:
        for move in plan.moves:
            self._runner.copy(move.source, move.target, move.num_tokens)
        outputs = []
        if plan.decoding:
            outputs.append(self._decode(plan))
        if plan.prefill is not None:
            outputs.append(self._prefill(plan.prefill))
        return outputs

    def _decode(self, plan: Plan) -> _Output:
        decoding = plan.decoding
        self._metrics.batch(len(decoding), len(decoding), len(plan.rows))
        token_ids = np.array([sequence.last_token_id for sequence in plan.rows], np.int64)
        lengths = np.array([sequence.num_computed for sequence in plan.rows], np.int64)
        rows = np.array(plan.decoding_rows, np.int64)
        return self._pass(decoding, lambda: self._runner.decode(token_ids, lengths, rows))

    def _prefill(self, prefill: Prefill) -> _Output:
        sequence, slot = prefill.sequence, prefill.slot
        start, num_tokens = prefill.start, prefill.num_tokens
        self._metrics.batch(1, num_tokens, num_tokens)
        self._metrics.prompt_tokens(num_tokens)
        token_ids = sequence.prompt_ids[start : start + num_tokens]
        output = self._pass((sequence,), lambda: self._runner.prefill(slot, token_ids, start)[None])
        if output.error is None and not prefill.is_last:
            return _Output((), None)
        return output

    def _pass(
        self, sequences: tuple[Sequence, ...], run: Callable[[], NDArray[np.float32]]
    ) -> _Output:
        started_at = time.perf_counter()
        try:
            logits = run()
        except Exception as error:  # whatever the model raises ends this pass only
            _log.exception("a pass of model %r failed", self._name)
            message = f"a pass of model {self._name!r} failed: {error}"
            return _Output(sequences, None, message)
        self._metrics.inference(time.perf_counter() - started_at)
        return _Output(sequences, logits)

    def _sample(self, outputs: Iterable[_Output]) -> list[tuple[Sequence, Reply]]:
        replies: list[tuple[Sequence, Reply]] = []
        for output in outputs:
            if output.error is not None:
                replies += [(s, GenerationError(output.error)) for s in output.sequences]
            elif output.logits is not None:
                samples = sample(output.logits, output.sequences)
                replies += [
                    (sequence, self._accept(sequence, chosen))
                    for sequence, chosen in zip(output.sequences, samples, strict=True)
                ]
        return replies

    def _accept(self, sequence: Sequence, chosen: Sample) -> Reply:
        if not math.isfinite(chosen.logprob):
            return GenerationError(f"model {self._name!r} returned logits that are not numbers")
        previous_at = sequence.last_token_at
        event = sequence.accept(
            chosen.token_id,
            chosen.logprob,
            detokenizer=self._detokenizer,
            eos_token_ids=self._eos_token_ids,
            max_length=self._max_length,
        )
        if event.index == 1:
            self._metrics.time_to_first_token(sequence.last_token_at - sequence.arrived_at)
        else:
            self._metrics.inter_token(sequence.last_token_at - previous_at)
        return event

    def _publish(self, plan: Plan, replies: list[tuple[Sequence, Reply]]) -> None:
        with self._changed:
            self._scheduler.advance(plan)
            for sequence, reply in replies:
                if isinstance(reply, MaskdialError) or reply.finish is not None:
                    self._scheduler.release(sequence)
            self._report()
        self._metrics.generated_tokens(sum(isinstance(r, TokenEvent) for _, r in replies))
        publish((s.reply, reply) for s, reply in replies if s.reply is not None)

    def _report(self) -> None:
        """Sets the gauges; the caller holds the lock."""
        used_tokens = self._scheduler.num_cached_tokens
        self._metrics.queue_size(self._scheduler.num_waiting)
        self._metrics.running(len(self._scheduler.running))
        self._metrics.kv_cache(
            used_tokens * self._runner.bytes_per_token, used_tokens / self._capacity
        )

    def _main(self) -> None:
        """The engine's thread: warm up, then step while there is work."""
        try:
            self._warm_up()
            while self._wait_for_work():
                self.step()
        except BaseException as error:
            _log.exception("the engine of model %r died", self._name)
            self._die(error)

    def _warm_up(self) -> None:
        self._runner.prefill(0, np.zeros(1, np.int64), 0)
        self._runner.decode(*np.array([[0], [1], [0]], np.int64))
        self._metrics.engine_up(True)
        self._warmed_up.set()

    def _wait_for_work(self) -> bool:
        """Blocks until there is something to do; False when the thread is to end."""
        with self._changed:
            while not (self._scheduler.has_work or self._draining):
                self._changed.wait()
            return self._scheduler.has_work

    def _die(self, error: BaseException) -> None:
        message = f"the engine of model {self._name!r} died: {error!r}"
        with self._changed:
            self._failure = message
        self._metrics.engine_up(False)
        self._warmed_up.set()  # for whoever waits for it; `healthy` says how it went
        self._fail_all(GenerationError, message)

    def _fail_all(self, error_class: type[MaskdialError], message: str) -> int:
        """Ends every sequence with an error and returns how many that hit."""
        with self._changed:
            dropped = [s for s in self._scheduler.clear() if not s.cancelled]
            self._report()
        publish((s.reply, error_class(message)) for s in dropped if s.reply is not None)
        return len(dropped)

    def _cancel(self, sequence: Sequence) -> None:
        with self._changed:
            if sequence.state is State.ENDED or sequence.cancelled:
                return
            self._scheduler.cancel(sequence)
            self._metrics.cancelled("disconnect")
            self._metrics.queue_size(self._scheduler.num_waiting)
