"""CausalEngine: continuous batching of text generation on one thread."""

import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from maskdial.causal.drafts.policy import pass_clock
from maskdial.causal.drafts.speculation import Speculation
from maskdial.causal.events import Reply, TokenEvent
from maskdial.causal.executor import Executor, ModelRunner, Output, SourceEncoder
from maskdial.causal.output_processor import OutputProcessor
from maskdial.causal.plan import Plan
from maskdial.causal.prefix_cache import PrefixCache
from maskdial.causal.prefix_disk.tier import DiskTier
from maskdial.causal.sampling.sampler import Sample, Sampler, TokenSampler
from maskdial.causal.scheduler import Scheduler
from maskdial.causal.sequence import Detokenizer, Sequence, State
from maskdial.causal.stream import BlockStream, ReplyChannel, TokenStream
from maskdial.engine import trace
from maskdial.engine.fairness import current_usage
from maskdial.engine.life import Engine, publish
from maskdial.errors import GenerationError, MaskdialError, OverloadedError, ValidationError
from maskdial.metrics import CancelReason, ModelMetrics

_UNUSED_SLOT_SECONDS = 5.0
_FETCH_SECONDS = 0.1  # how long a step waits for the disk, if there is nothing else to do
_PREEMPTED = "other requests needed the slot; try again"


class CausalEngine(Engine):
    """Generates text for many sequences at once, a token each per `step`, or more by speculation.

    Args:
        runner: the model, or its decoder.
        detokenizer: turns tokens into text.
        slots: sequences that run at once.
        max_length: tokens of prompt and text together.
        vocab_size: the width of the logits.
        prefill_chunk_tokens: maximum number of prompt tokens between two decode steps, a
            multiple of ``block_tokens``.
        block_tokens: how many tokens the attention kernel reads at a time.
        joint_tokens: longest prompt that is prefilled together with others. Default: one kernel
            block, within which batching is bitwise invariant.
        max_queue: sequences that may wait for a slot.
        eos_token_ids: tokens that end a text.
        prefix_cache: where to keep the prefixes of prompts, in blocks of ``block_tokens``.
        prefix_disk: where to keep them beyond memory.
        speculation: proposes draft tokens. Default: none.
        never: tokens that are not drawn, and no beam goes on with.
        sampler: chooses the tokens. Default: one on the host.
        overlaps: whether tokens are delivered while the next decode step runs, where nothing else
            can come in between. For models that leave the processor free.
        metrics: the model's instruments.
        name: the model's, for messages.
        encoder: of an encoder-decoder model, which reads the source texts of its sequences.
        max_source_length: tokens of a source text.
    """

    _metrics: ModelMetrics

    failure = GenerationError

    def __init__(
        self,
        runner: ModelRunner,
        detokenizer: Detokenizer,
        *,
        slots: int,
        max_length: int,
        vocab_size: int,
        prefill_chunk_tokens: int,
        block_tokens: int,
        max_queue: int,
        eos_token_ids: Iterable[int],
        joint_tokens: int | None = None,
        prefix_cache: PrefixCache | None = None,
        prefix_disk: DiskTier | None = None,
        speculation: Speculation | None = None,
        never: frozenset[int] = frozenset(),
        sampler: TokenSampler | None = None,
        overlaps: bool = False,
        metrics: ModelMetrics,
        name: str,
        encoder: SourceEncoder | None = None,
        max_source_length: int = 0,
    ) -> None:
        super().__init__(name, metrics)
        self._runner = runner
        self._max_queue = max_queue
        self._max_length = max_length
        self._capacity = slots * (max_length + max_source_length)
        self._scheduler = Scheduler(
            slots=slots,
            prefill_chunk_tokens=prefill_chunk_tokens,
            max_length=max_length,
            block_tokens=block_tokens,
            joint_tokens=joint_tokens or block_tokens,
            prefix_cache=prefix_cache,
            prefix_disk=prefix_disk,
            max_saved_tokens=_max_saved_tokens(runner, prefix_cache),
        )
        self._prefix_cache = prefix_cache
        self._prefix_disk = prefix_disk
        if prefix_disk is not None:
            prefix_disk.wake = self._wake
        self._speculation = speculation
        keep_hidden = None if speculation is None else speculation.keep_hidden
        self._executor = Executor(
            runner, prefix_cache, metrics, name, encoder, keep_hidden, prefix_disk
        )
        ends = frozenset(eos_token_ids)
        self._processor = OutputProcessor(
            sampler or Sampler(vocab_size, ends, never),
            detokenizer,
            eos_token_ids=ends,
            never=never,
            max_length=max_length,
            metrics=metrics,
            name=name,
        )
        self._next_step: tuple[Plan, list[Output]] | None = None
        """A plan that ran before the tokens of the last one were delivered."""
        self._delivery = ThreadPoolExecutor(1, f"maskdial-{name}-delivery") if overlaps else None
        self._channels: dict[Sequence, ReplyChannel] = {}  # of sequences that have not ended
        self._slot_used_at: dict[int, float] = {}  # of slots whose memory is committed

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """The prefix cache in memory, if there is one."""
        return self._prefix_cache

    @property
    def prefix_disk(self) -> DiskTier | None:
        """The prefix cache on disk, if there is one."""
        return self._prefix_disk

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        return len(self._scheduler.running)

    def check_room(self, num_sequences: int) -> None:
        """Refuses now what `stream` would refuse: for callers with work to do before it.

        Raises:
            OverloadedError: the queue has no room for so many.
            UnavailableError: the engine is draining or dead.
        """
        with self._changed:
            self._check_accepting()
            if not current_usage().takes_room:
                return
            waiting = self._scheduler.num_waiting
            if waiting + num_sequences > self._max_queue:
                raise OverloadedError(
                    f"{waiting} of at most {self._max_queue} requests are already waiting; "
                    "try again in a moment",
                    retry_after=self._finished.seconds_for(waiting),
                )

    def stream(self, sequence: Sequence, timeout: float | None = None) -> TokenStream:
        """Queues a sequence and returns its events; call it in the event loop, in the task of the
        request that it is for.

        Close the stream to leave it early: the slot is free within one step. After ``timeout``
        seconds the sequence is dropped likewise, and its reader gets a `DeadlineError`.

        Raises:
            ValidationError: the prompt is empty, or leaves no room in the context.
            OverloadedError: the queue is full.
            UnavailableError: the engine is draining or dead.
        """
        channel = self._queue(sequence)
        return TokenStream(channel, lambda reason: self._cancel(sequence, reason), timeout)

    def stream_blocks(self, sequence: Sequence, timeout: float | None = None) -> BlockStream:
        """As `stream`, of a sequence with a ``block_text``."""
        channel = self._queue(sequence)
        return BlockStream(channel, lambda reason: self._cancel(sequence, reason), timeout)

    def _queue(self, sequence: Sequence) -> ReplyChannel:
        if not 1 <= sequence.num_prompt < self._max_length:
            raise ValidationError(
                f"the prompt has {sequence.num_prompt} tokens; model {self._name!r} has a context "
                f"of {self._max_length}, so a prompt has 1 to {self._max_length - 1}"
            )
        channel = ReplyChannel()
        usage = current_usage()
        for each in (sequence, *sequence.beams):
            each.usage = usage
        trace.note(sequence)
        with self._changed:  # reentrant: nothing comes between the check and the queue
            self.check_room(1)
            self._channels[sequence] = channel
            if sequence.search is None:
                self._scheduler.add(sequence)
            elif sequence is sequence.search.readers[-1]:  # now all of them are here
                self._scheduler.add(sequence.search.beams[0])
            self._metrics.queue_size.set(self._scheduler.num_waiting)
            self._changed.notify()
        return channel

    @contextlib.asynccontextmanager
    async def streams(
        self,
        sequences: SequenceOf[Sequence],
        timeout: float | None = None,  # noqa: ASYNC109 - the sequences', not the caller's
    ) -> AsyncIterator[list[TokenStream]]:
        """Queues sequences at once, as `stream` does each; no step runs when only some are there.

        So those of a shared prompt find it in a slot, and the queue takes either all or none. The
        end of the block leaves the streams.

        Raises:
            MaskdialError: as `stream` does, with nothing queued.
        """
        async with contextlib.AsyncExitStack() as stack:
            with self._changed:
                self.check_room(len(sequences))
                streams = []
                for sequence in sequences:
                    streams.append(self.stream(sequence, timeout))
                    stack.push_async_exit(streams[-1])
            yield streams

    def step(self) -> None:
        """One iteration: at most one decode step of all sequences and one chunk of a prompt."""
        started = time.perf_counter()
        ahead, self._next_step = self._next_step, None
        plan = self._schedule() if ahead is None else ahead[0]
        scheduled = time.perf_counter()
        began = pass_clock()
        outputs = self._executor.run(plan) if ahead is None else ahead[1]
        ran = time.perf_counter()
        if self._prefix_disk is not None and plan.prefills:
            num_tokens = sum(prefill.num_tokens for prefill in plan.prefills)
            self._prefix_disk.note_prefill(num_tokens, ran - scheduled)
        if self._delivery is not None and self._may_overlap(plan, outputs):
            sampled, ran_ahead = self._overlap_next(plan, outputs[0], self._delivery)
        else:
            # A grammar mask that is not ready is waited for only if nothing else could run.
            may_wait = not (plan.decoding or plan.prefills or plan.encoding)
            replies = self._processor.process(outputs, may_wait=may_wait)
            sampled = ran_ahead = time.perf_counter()
            if self._speculation is not None and ahead is None:
                self._speculation.note(plan, pass_clock() - began)
            self._deliver(plan, replies)
        self._metrics.observe_step(
            schedule=scheduled - started,
            run=ran - scheduled + ran_ahead - sampled,
            sample=sampled - ran,
            publish=time.perf_counter() - ran_ahead,
        )

    def _schedule(self) -> Plan:
        if self._prefix_disk is not None:
            self._prefix_disk.restore()
        unhashed = list[Sequence]()
        while True:
            for sequence in unhashed:  # without the lock, for which the event loop would wait
                self._scheduler.hash_prompt(sequence)
            with self._changed:
                if unhashed := self._scheduler.take_unhashed():
                    continue
                plan = self._scheduler.schedule()
                if plan.is_empty and self._is_fetching:
                    self._changed.wait(_FETCH_SECONDS)
                preempted = self._scheduler.take_preempted()
                channels = [self._channels.pop(s) for s in preempted if s in self._channels]
                break
        publish((channel, OverloadedError(_PREEMPTED)) for channel in channels)
        now = time.perf_counter()
        fresh = [p.sequence for p in plan.prefills if p.start == p.sequence.num_reused]
        for sequence in fresh:
            looks_up = not (sequence.params.prompt_logprobs or sequence.full_prompt)
            if self._prefix_cache is not None and looks_up:
                self._metrics.prefix_cache_queries.inc(sequence.num_prompt)
                self._metrics.prefix_cache_hits.inc(sequence.num_reused)
                self._metrics.prefix_cache_disk_hits.inc(sequence.num_restored)
        for sequence in (*fresh, *plan.awaiting_mask, *plan.encoding, *plan.decoding):
            if sequence.begin(now) and not sequence.usage.background:
                self._metrics.queue_duration.observe(now - sequence.arrived_at)
        if self._speculation is None:
            return plan
        drafts = self._speculation.draft(plan)
        return replace(plan, drafts=drafts) if drafts else plan

    @property
    def _is_fetching(self) -> bool:
        return self._prefix_disk is not None and self._prefix_disk.is_fetching

    def _wake(self) -> None:
        """Has a step that waits for the disk go on; called in any thread."""
        with self._changed:
            self._changed.notify_all()

    def _may_overlap(self, plan: Plan, outputs: list[Output]) -> bool:
        """Whether the next step depends on nothing of this one but the sampled tokens."""
        with self._changed:
            if not self._scheduler.repeats(plan):
                return False
        if self._speculation is not None and (plan.drafts or len(plan.rows) == 1):
            return False  # so do its drafts
        if any(sequence.grammar is not None for sequence in plan.rows):
            return False  # the next mask depends on the accepted token
        return outputs[0].error is None and any(map(_goes_on, plan.rows))

    def _overlap_next(
        self, plan: Plan, output: Output, delivery: ThreadPoolExecutor
    ) -> tuple[float, float]:
        """Samples the tokens of a decode step and delivers them while the next step runs.

        A sequence that has ended still occupies its row; the output is discarded.

        Returns:
            When the tokens were sampled, and when the next step had run.
        """
        samples = self._processor.sample(output)
        sampled = time.perf_counter()
        token_ids = [each.token_id if isinstance(each, Sample) else 0 for each in samples]
        next_step = self._executor.next_step(plan, token_ids, self._max_length)
        delivered = delivery.submit(self._accept_and_deliver, plan, output.sequences, samples)
        try:
            following = next_step()
            ran = time.perf_counter()
        finally:
            delivered.result()
        rows = [
            row
            for row, sequence in enumerate(plan.rows)
            if sequence.slot == row and sequence.state is State.DECODING
        ]
        if rows:
            self._next_step = replace(plan, decoding_rows=tuple(rows)), [following.only(rows)]
        return sampled, ran

    def _accept_and_deliver(
        self, plan: Plan, sequences: tuple[Sequence, ...], samples: list[Sample | MaskdialError]
    ) -> None:
        self._deliver(plan, self._processor.accept(sequences, samples))

    def _deliver(self, plan: Plan, replies: list[tuple[Sequence, Reply]]) -> None:
        """Ends a step: the scheduler takes note of it, and the readers get their events."""
        failed = [s for s, reply in replies if isinstance(reply, MaskdialError)]
        finished = [s for s, r in replies if not isinstance(r, MaskdialError) and r.finish]
        with self._changed:
            # Before the plan counts as done: no sibling inherits a prompt that was not prefilled.
            self._release(failed)
            self._scheduler.advance(plan)
            self._release(finished)
            deliveries = [(self._channels[s], r) for s, r in replies if s in self._channels]
            for sequence in (*failed, *finished):
                self._channels.pop(sequence, None)
            self._finished.add(len(failed) + len(finished))
            self._report()
        if self._speculation is not None:
            self._speculation.learn(finished)
        self._metrics.generation_tokens.inc(sum(_num_new(reply) for _, reply in replies))
        publish(deliveries)

    def _release(self, sequences: Iterable[Sequence]) -> None:
        """Frees the slots of sequences, or of their beam searches; the caller holds the lock."""
        for sequence in sequences:
            for each in sequence.beams:
                self._scheduler.release(each)

    def _report(self) -> None:
        """Sets the gauges; the caller holds the lock."""
        used_tokens = self._scheduler.num_cached_tokens
        cache, running = self._runner.cache, len(self._scheduler.running)
        self._metrics.queue_size.set(self._scheduler.num_waiting)
        self._metrics.requests_running.set(running)
        self._metrics.kv_cache_bytes.set(
            used_tokens * cache.bytes_per_token + running * cache.state_bytes
        )
        self._metrics.kv_cache_usage.set(used_tokens / self._capacity)
        if self._prefix_cache is not None:
            self._metrics.prefix_cache_bytes.set(self._prefix_cache.num_bytes)
            self._metrics.prefix_cache_blocks.set(self._prefix_cache.num_blocks)

    def _main(self) -> None:
        try:
            super()._main()
        finally:
            if self._delivery is not None:
                self._delivery.shutdown(wait=False)

    def _count_down(self) -> None:
        super()._count_down()
        with self._changed:
            self._metrics.prefix_cache_bytes.set(0)
            self._metrics.prefix_cache_blocks.set(0)

    def _warm_up(self) -> None:
        self._runner.warm_up()

    @property
    def _has_work(self) -> bool:
        return self._scheduler.has_work

    def _maintain(self) -> float | None:
        """Returns the memory of slots that have been unused for a while to the system."""
        now = time.perf_counter()
        with self._changed:
            slots = [sequence.slot for sequence in self._scheduler.running]
        self._slot_used_at |= dict.fromkeys(slots, now)
        for slot, used_at in list(self._slot_used_at.items()):
            if now - used_at >= _UNUSED_SLOT_SECONDS:
                del self._slot_used_at[slot]
                self._runner.cache.release_pages(slot)
        return _UNUSED_SLOT_SECONDS if self._slot_used_at else None

    def _abandon(self) -> list[ReplyChannel]:
        self._scheduler.clear()
        channels = list(self._channels.values())
        self._channels.clear()
        self._report()
        return channels

    def _cancel(self, sequence: Sequence, reason: CancelReason) -> bool:
        """Drops a sequence; False when it has ended."""
        with self._changed:
            if self._channels.pop(sequence, None) is None:
                return False
            for each in sequence.beams:
                self._scheduler.cancel(each)
            self._metrics.cancelled[reason].inc()
            self._metrics.queue_size.set(self._scheduler.num_waiting)
            return True


def _max_saved_tokens(runner: ModelRunner, prefix_cache: PrefixCache | None) -> int:
    """Tokens of sequences that are set aside: as much memory as the prefix cache may have.

    None of models with states, which cannot be cut, or with source texts, which have no such cache.
    """
    if prefix_cache is None or runner.cache.state_bytes:
        return 0
    return prefix_cache.max_bytes // runner.cache.bytes_per_token


def _num_new(reply: Reply) -> int:
    """The tokens that a reply has."""
    if isinstance(reply, MaskdialError):
        return 0
    return 1 if isinstance(reply, TokenEvent) else reply.num_new


def _goes_on(sequence: Sequence) -> bool:
    """Whether a sequence has room for a token after its next one."""
    return sequence.num_generated + 1 < sequence.params.max_new_tokens
