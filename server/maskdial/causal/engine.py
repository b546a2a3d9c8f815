"""CausalEngine: continuous batching of text generation on one thread."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from maskdial.causal.executor import Executor, ModelRunner, Output
from maskdial.causal.plan import Plan
from maskdial.causal.prefix_cache import PrefixCache
from maskdial.causal.sampling.sampler import Sample, Sampler, TokenSampler
from maskdial.causal.scheduler import Scheduler
from maskdial.causal.sequence import Detokenizer, Sequence, State, TokenEvent
from maskdial.causal.stream import Reply, ReplyChannel, TokenStream, publish
from maskdial.errors import GenerationError, MaskdialError, UnavailableError, ValidationError
from maskdial.metrics import CancelReason, EngineMetrics

_log = logging.getLogger(__name__)

_LAST_STEP_SECONDS = 10.0
_UNUSED_SLOT_SECONDS = 5.0


class CausalEngine:
    """Generates text for many sequences at once, one token each per `step`.

    A failed pass ends the sequences in it with `GenerationError`, and the engine goes on. Any other
    fault ends the thread: every sequence fails at once and ``healthy`` turns False.

    Args:
        runner: the model.
        detokenizer: turns tokens into text.
        slots: sequences that run at once.
        max_length: tokens of prompt and text together.
        vocab_size: the width of the logits.
        prefill_chunk_tokens: most prompt tokens between two decode steps, a multiple of
            ``block_tokens``.
        block_tokens: how many tokens the attention kernel reads at a time.
        joint_tokens: longest prompt that is read together with others; None for a block, within
            which the CPU's kernel gives each the bits that it has alone.
        max_queue: sequences that may wait for a slot.
        eos_token_ids: tokens that end a text.
        prefix_cache: where to keep the beginnings of prompts, with blocks of ``block_tokens``.
        max_drafts: most tokens to guess for a sequence that runs alone; 0 is off.
        sampler: draws the tokens; None for one on the host.
        overlaps: whether the tokens of a step are delivered while the next one runs, where nothing
            else can come in between. It is for models that leave the processor free.
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
        vocab_size: int,
        prefill_chunk_tokens: int,
        block_tokens: int,
        max_queue: int,
        eos_token_ids: Iterable[int],
        joint_tokens: int | None = None,
        prefix_cache: PrefixCache | None = None,
        max_drafts: int = 0,
        sampler: TokenSampler | None = None,
        overlaps: bool = False,
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
            slots=slots,
            prefill_chunk_tokens=prefill_chunk_tokens,
            max_queue=max_queue,
            max_length=max_length,
            block_tokens=block_tokens,
            joint_tokens=joint_tokens or block_tokens,
            prefix_cache=prefix_cache,
            max_drafts=max_drafts,
        )
        self._has_prefix_cache = prefix_cache is not None
        self._executor = Executor(runner, prefix_cache, metrics, name)
        self._sampler = sampler or Sampler(vocab_size, self._eos_token_ids)
        self._ahead: tuple[Plan, list[Output]] | None = None
        """A plan whose passes ran before the tokens of the last one were delivered."""
        self._delivery = ThreadPoolExecutor(1, f"maskdial-{name}-delivery") if overlaps else None
        self._slot_used_at: dict[int, float] = {}  # of slots whose memory is committed
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

    def stream(self, sequence: Sequence, timeout: float | None = None) -> TokenStream:
        """Queues a sequence and returns its events; to be called in a running event loop.

        Close the stream if you leave it early: that gives the slot back within one step. After
        ``timeout`` seconds the sequence is dropped in the same way, and its reader gets a
        `DeadlineError`.

        Raises:
            ValidationError: the prompt is empty, or leaves no room in the context.
            OverloadedError: the queue is full.
            UnavailableError: the engine is stopping or has died.
        """
        if not 1 <= sequence.num_prompt < self._max_length:
            raise ValidationError(
                f"the prompt has {sequence.num_prompt} tokens; model {self._name!r} has a context "
                f"of {self._max_length}, so a prompt has 1 to {self._max_length - 1}"
            )
        channel = ReplyChannel()
        with self._changed:  # reentrant, so nothing comes between the check and the queue
            self.check_room(1)
            sequence.reply = channel
            self._scheduler.add(sequence)
            self._metrics.queue_size(self._scheduler.num_waiting)
            self._changed.notify()
        return TokenStream(channel, lambda reason: self._cancel(sequence, reason), timeout)

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
        started = time.perf_counter()
        ahead, self._ahead = self._ahead, None
        plan = self._schedule() if ahead is None else ahead[0]
        scheduled = time.perf_counter()
        outputs = self._executor.run(plan) if ahead is None else ahead[1]
        ran = time.perf_counter()
        if self._delivery is not None and self._may_overlap(plan, outputs):
            drawn, ran_ahead = self._finish_beside_next(plan, outputs[0], self._delivery)
        else:
            replies = self._sample(plan, outputs)
            drawn = ran_ahead = time.perf_counter()
            self._publish(plan, replies)
        self._metrics.step(
            scheduled - started,
            ran - scheduled + ran_ahead - drawn,
            drawn - ran,
            time.perf_counter() - ran_ahead,
        )

    def _schedule(self) -> Plan:
        with self._changed:
            plan = self._scheduler.schedule()
        now = time.perf_counter()
        fresh = [p.sequence for p in plan.prefills if p.start == p.sequence.num_reused]
        for sequence in fresh:
            if self._has_prefix_cache and not sequence.params.prompt_logprobs:
                self._metrics.prefix_cache(sequence.num_prompt, sequence.num_reused)
        for sequence in (*fresh, *plan.drawing):
            if not sequence.started_at:
                sequence.started_at = now
                self._metrics.queued(now - sequence.arrived_at)
        return plan

    def _may_overlap(self, plan: Plan, outputs: list[Output]) -> bool:
        """Whether the next step can begin with nothing known of this one but its tokens."""
        with self._changed:
            if not self._scheduler.repeats(plan):
                return False
        if any(sequence.grammar is not None for sequence in plan.rows):
            return False  # the mask for the next token needs this one to be taken
        return outputs[0].error is None and any(map(self._goes_on, plan.rows))

    def _goes_on(self, sequence: Sequence) -> bool:
        """Whether a sequence has room for a token after its next one."""
        return sequence.num_generated + 1 < sequence.params.max_new_tokens

    def _finish_beside_next(
        self, plan: Plan, output: Output, delivery: ThreadPoolExecutor
    ) -> tuple[float, float]:
        """Draws the tokens of a decode step, and delivers them while the next step runs.

        A sequence that turns out to have ended runs along with a row of no meaning.

        Returns:
            When the tokens were drawn, and when the next step had run.
        """
        samples = self._sampler.sample(output.logits, output.sequences)
        drawn = time.perf_counter()
        token_ids = [chosen.token_id if isinstance(chosen, Sample) else 0 for chosen in samples]
        next_step = self._executor.next_step(plan, token_ids, self._max_length)
        delivered = delivery.submit(self._deliver, plan, output.sequences, samples)
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
            self._ahead = replace(plan, decoding_rows=tuple(rows)), [following.only(rows)]
        return drawn, ran

    def _deliver(
        self, plan: Plan, sequences: tuple[Sequence, ...], samples: list[Sample | MaskdialError]
    ) -> None:
        drawn = zip(sequences, samples, strict=True)
        self._publish(plan, [(sequence, self._accept(sequence, each)) for sequence, each in drawn])

    def _sample(self, plan: Plan, outputs: Iterable[Output]) -> list[tuple[Sequence, Reply]]:
        # A grammar that is not ready is waited for only when nobody else would wait, too.
        may_wait = not plan.decoding and not plan.prefills
        replies: list[tuple[Sequence, Reply]] = []
        for output in outputs:
            if output.error is not None:
                replies += [(sequence, output.error) for sequence in output.sequences]
            elif output.drafts:
                replies += self._accept_drafts(output)
            else:
                output = output if may_wait else _hold_back(output)
                samples = self._sampler.sample(output.logits, output.sequences)
                replies += [
                    (sequence, self._accept(sequence, chosen))
                    for sequence, chosen in zip(output.sequences, samples, strict=True)
                ]
        return replies

    def _accept_drafts(self, output: Output) -> list[tuple[Sequence, Reply]]:
        """Tokens as one step at a time would have drawn them, as long as the guesses hold."""
        (sequence,) = output.sequences
        replies: list[tuple[Sequence, Reply]] = []
        logits = np.asarray(output.logits)
        for i, draft in enumerate((*output.drafts, None)):
            (chosen,) = self._sampler.sample(logits[i : i + 1], (sequence,))
            reply = self._accept(sequence, chosen)
            replies.append((sequence, reply))
            if isinstance(reply, MaskdialError) or reply.finish or reply.token_id != draft:
                break
        sequence.note_guess(len(output.drafts), len(replies) - 1)
        self._metrics.speculation(len(output.drafts), len(replies) - 1)
        return replies

    def _accept(self, sequence: Sequence, chosen: Sample | MaskdialError) -> Reply:
        if isinstance(chosen, MaskdialError):
            return chosen
        if not math.isfinite(chosen.logprob):
            return GenerationError(f"model {self._name!r} returned logits that are not numbers")
        sequence.held_logits = None
        previous_at = sequence.last_token_at
        try:
            event = sequence.accept(
                chosen.token_id,
                chosen.logprob,
                chosen.top,
                detokenizer=self._detokenizer,
                eos_token_ids=self._eos_token_ids,
                max_length=self._max_length,
            )
        except MaskdialError as error:
            return error
        except Exception as error:  # a fault in one text ends that text only
            _log.exception("a token of model %r could not be taken", self._name)
            return GenerationError(f"a token of model {self._name!r} was lost: {error!r}")
        if event.index == 1:
            self._metrics.time_to_first_token(sequence.last_token_at - sequence.arrived_at)
        else:
            self._metrics.inter_token(sequence.last_token_at - previous_at)
        return event

    def _publish(self, plan: Plan, replies: list[tuple[Sequence, Reply]]) -> None:
        failed = [s for s, reply in replies if isinstance(reply, MaskdialError)]
        finished = [s for s, reply in replies if isinstance(reply, TokenEvent) and reply.finish]
        with self._changed:
            # Before the plan counts as done: a prompt that was not read is left to nobody.
            for sequence in failed:
                self._scheduler.release(sequence)
            self._scheduler.advance(plan)
            for sequence in finished:
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
            used_tokens * self._runner.cache.bytes_per_token, used_tokens / self._capacity
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
        finally:
            if self._delivery is not None:
                self._delivery.shutdown(wait=False)

    def _warm_up(self) -> None:
        self._runner.warm_up()
        self._metrics.engine_up(True)
        self._warmed_up.set()

    def _wait_for_work(self) -> bool:
        """Blocks until there is something to do; False when the thread is to end."""
        with self._changed:
            self._return_memory()
            while not (self._scheduler.has_work or self._draining):
                self._changed.wait(_UNUSED_SLOT_SECONDS if self._slot_used_at else None)
                self._return_memory()
            return self._scheduler.has_work

    def _return_memory(self) -> None:
        """Gives the memory of slots that nobody has used for a while back to the system."""
        now = time.perf_counter()
        self._slot_used_at |= dict.fromkeys((s.slot for s in self._scheduler.running), now)
        for slot, used_at in list(self._slot_used_at.items()):
            if now - used_at >= _UNUSED_SLOT_SECONDS:
                del self._slot_used_at[slot]
                self._runner.cache.release_pages(slot)

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

    def _cancel(self, sequence: Sequence, reason: CancelReason) -> bool:
        """Drops a sequence; False when it had ended or was dropped before."""
        with self._changed:
            if sequence.state is State.ENDED or sequence.cancelled:
                return False
            self._scheduler.cancel(sequence)
            self._metrics.cancelled(reason)
            self._metrics.queue_size(self._scheduler.num_waiting)
            return True


def _hold_back(output: Output) -> Output:
    """Leaves out the sequences whose grammar is not ready, with their logits held for later."""
    late = [i for i, sequence in enumerate(output.sequences) if not sequence.may_draw]
    if not late:
        return output
    for i in late:
        output.sequences[i].held_logits = np.array(output.logits[i : i + 1])[0]
    return output.only([i for i in range(len(output.sequences)) if i not in late])
