"""Scheduler: which sequence runs when, and in which slot. Pure bookkeeping; not thread-safe."""

import bisect
from collections.abc import Iterable, Iterator
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.plan import Load, Move, Plan, Prefill
from maskdial.causal.prefix_cache import PrefixCache
from maskdial.causal.sequence import Sequence, State
from maskdial.errors import OverloadedError

# Every so many starts the sequence that has waited longest comes first, whatever its priority.
_STARTS_PER_OLDEST = 4

_queue_order = attrgetter("priority", "arrival")


class Scheduler:
    """By priority and then first come, first served, over a fixed number of slots.

    A decode pass binds slots 0..n-1 of the cache as they lie, so those must be in use without
    gaps. A waiting sequence takes the lowest free slot, which is the hole that an ended one left,
    if there is one; holes that nobody takes are filled by the decoding sequence in the highest
    slot. One prompt is read at a time, a chunk per iteration, so long prompts delay the decoding
    sequences by one chunk at most; short ones that wait together are read together.

    Sequences with a `SharedPrompt` read it once: the first of them does, the others get a copy of
    its keys and values when a slot is free. The last that runs leaves its slot, with the prompt in
    it, to the next of them.

    Args:
        slots: sequences that run at once.
        prefill_chunk_tokens: prompt tokens per iteration; the last chunk may have one more.
        max_queue: sequences that may wait.
        max_length: tokens that a slot holds.
        block_tokens: a divisor of the chunk. Chunks of sequences that want the log-probabilities of
            their prompts are this long.
        joint_tokens: prompts of 2 to this many tokens are read together.
        prefix_cache: where to look for the beginnings of prompts.
        max_drafts: most tokens to guess for a sequence that runs alone.
    """

    def __init__(
        self,
        *,
        slots: int,
        prefill_chunk_tokens: int,
        max_queue: int,
        max_length: int,
        block_tokens: int,
        joint_tokens: int,
        prefix_cache: PrefixCache | None = None,
        max_drafts: int = 0,
    ) -> None:
        self._slots: list[Sequence | None] = [None] * slots
        self._waiting: list[Sequence] = []  # in the order of `_queue_order`
        self._prefilling: list[Sequence] = []
        self._loads: list[Load] = []
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._max_queue = max_queue
        self._max_length = max_length
        self._block_tokens = block_tokens
        self._joint_tokens = joint_tokens
        self._prefix_cache = prefix_cache
        self._max_drafts = max_drafts
        self._num_arrived = 0
        self._num_started = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The sequences that hold a slot, in slot order."""
        return tuple(sequence for sequence in self._slots if sequence is not None)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of running sequences in the cache."""
        return sum(sequence.num_computed for sequence in self.running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or any(sequence is not None for sequence in self._slots)

    def check_room(self, num_sequences: int) -> None:
        """Checks that the queue takes so many more.

        Raises:
            OverloadedError: it does not.
        """
        if len(self._waiting) + num_sequences > self._max_queue:
            raise OverloadedError(
                f"{len(self._waiting)} of at most {self._max_queue} requests are already waiting; "
                "try again in a moment"
            )

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
            OverloadedError: the queue is full.
        """
        self.check_room(1)
        sequence.arrival = self._num_arrived
        self._num_arrived += 1
        bisect.insort(self._waiting, sequence, key=_queue_order)

    def cancel(self, sequence: Sequence) -> None:
        """Drops a sequence: from the queue at once, from its slot when the next plan is made."""
        sequence.cancelled = True
        if sequence.state is State.WAITING and sequence in self._waiting:
            self._waiting.remove(sequence)
            sequence.state = State.ENDED

    def schedule(self) -> Plan:
        """The next iteration. The moves and loads in it are taken as done."""
        for sequence in self.running:
            if sequence.cancelled:
                self.release(sequence)
        moves = [*self._admit(), *self._fill_holes()]
        loads, self._loads = tuple(self._loads), []
        highest = self._highest_decoding()
        rows = () if highest is None else self.running[: highest.slot + 1]
        return Plan(
            moves=tuple(moves),
            loads=loads,
            drawing=tuple(s for s in self.running if s.state is State.DRAWING),
            rows=rows,
            decoding_rows=tuple(i for i, s in enumerate(rows) if s.state is State.DECODING),
            drafts=self._guess(),
            prefills=tuple(map(self._next_chunk, self._prefilling)),
        )

    def repeats(self, plan: Plan) -> bool:
        """Whether the next plan is this one again, save for sequences that end in between.

        So it is where all that run decode, and nobody can join them.
        """
        return (
            bool(plan.rows)
            and plan.rows == self.running
            and len(plan.decoding_rows) == len(plan.rows)
            and not (plan.drawing or plan.prefills)
            and not (self._max_drafts and len(plan.rows) == 1)
            and not (self._waiting and None in self._slots)
            and not any(sequence.cancelled for sequence in plan.rows)
        )

    def advance(self, plan: Plan) -> None:
        """Takes note that a plan's passes ran and that the sequences have their new tokens, or
        their ``held_logits``.

        All of a decoding sequence's tokens but the newest are in the cache then. Sequences that
        were released meanwhile are left alone.
        """
        for sequence in (*plan.decoding, *plan.drawing):
            if sequence.slot >= 0:
                self._continue(sequence)
        for prefill in plan.prefills:
            if prefill.sequence in self._prefilling:
                prefill.sequence.num_computed += prefill.num_tokens
                if prefill.is_last:
                    self._prefilling.remove(prefill.sequence)
                    self._continue(prefill.sequence)

    def release(self, sequence: Sequence) -> None:
        """Frees the slot of a sequence that finished, failed or was cancelled, if it has one."""
        slot = sequence.slot
        if slot < 0:
            return
        heir = self._heir(sequence)
        self._slots[slot] = None
        sequence.slot = -1
        sequence.state = State.ENDED
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        if heir is not None:
            self._fork(heir, slot)

    def clear(self) -> tuple[Sequence, ...]:
        """Drops every sequence and returns those that had not ended."""
        waiting, self._waiting = self._waiting, []
        dropped = (*self.running, *waiting)
        for sequence in self.running:
            self.release(sequence)
        for sequence in waiting:
            sequence.state = State.ENDED
        return dropped

    def _admit(self) -> Iterator[Move]:
        """Starts what can start now; yields the copies of shared prompts."""
        while None in self._slots:
            sequence = self._next_waiting()
            if sequence is None:
                return
            slot = self._slots.index(None)
            source = self._prompt_source(sequence)
            if source is not None:
                self._fork(sequence, slot)
                yield Move(source.slot, slot, sequence.num_prompt)
                continue
            prefix = self._find_prefix(sequence)
            if self._prefilling and (prefix or not self._joins(sequence, slot)):
                return
            self._place(sequence, slot, State.PREFILLING)
            self._prefilling.append(sequence)
            self._reuse(sequence, prefix)

    def _next_waiting(self) -> Sequence | None:
        """The waiting sequence whose turn it is, left in the queue."""
        ready = (sequence for sequence in self._waiting if not self._awaits_prompt(sequence))
        if self._num_started % _STARTS_PER_OLDEST == _STARTS_PER_OLDEST - 1:
            return min(ready, key=attrgetter("arrival"), default=None)
        return next(ready, None)

    def _place(self, sequence: Sequence, slot: int, state: State) -> None:
        self._waiting.remove(sequence)
        self._num_started += 1
        self._slots[slot] = sequence
        sequence.slot = slot
        sequence.state = state

    def _fork(self, sequence: Sequence, slot: int) -> None:
        """Starts a sequence in a slot that has its whole prompt, or is about to."""
        shared = sequence.shared_prompt
        assert shared is not None, "only a shared prompt is read by another sequence"
        self._place(sequence, slot, State.DRAWING)
        sequence.num_computed = sequence.num_prompt
        sequence.held_logits = shared.logits
        sequence.prompt_logprobs = shared.logprobs

    def _continue(self, sequence: Sequence) -> None:
        """What a running sequence does next, its prompt being read."""
        if sequence.held_logits is None:
            sequence.state = State.DECODING
            sequence.num_computed = sequence.num_tokens - 1
        else:
            sequence.state = State.DRAWING
            sequence.num_computed = sequence.num_tokens

    def _sharing(self, sequence: Sequence) -> Iterable[Sequence]:
        """The other running sequences that share this one's prompt."""
        if sequence.shared_prompt is None:
            return ()
        return (
            other
            for other in self.running
            if other.shared_prompt is sequence.shared_prompt and other is not sequence
        )

    def _awaits_prompt(self, sequence: Sequence) -> bool:
        return any(other.state is State.PREFILLING for other in self._sharing(sequence))

    def _prompt_source(self, sequence: Sequence) -> Sequence | None:
        """A running sequence with this one's whole prompt in its slot."""
        return next(iter(self._sharing(sequence)), None)

    def _heir(self, sequence: Sequence) -> Sequence | None:
        """Who takes over the slot of a released sequence, with the prompt that lies in it."""
        shared = sequence.shared_prompt
        if shared is None or sequence.state is State.PREFILLING or any(self._sharing(sequence)):
            return None
        return next((s for s in self._waiting if s.shared_prompt is shared), None)

    def _joins(self, sequence: Sequence, slot: int) -> bool:
        """Whether a waiting prompt can be read in one pass with those about to be read.

        The pass writes to adjoining slots and is as long as its longest prompt. Prompts within one
        block of the attention kernel keep their last bits whatever they are padded to.
        """
        together = [*self._prefilling, sequence]
        padded = len(together) * max(s.num_prompt for s in together)
        return (
            slot == self._prefilling[-1].slot + 1
            and padded <= self._prefill_chunk_tokens
            and all(
                s.num_computed == 0
                and 2 <= s.num_prompt <= self._joint_tokens
                and not s.params.prompt_logprobs
                for s in together
            )
        )

    def _find_prefix(self, sequence: Sequence) -> tuple[NDArray[np.generic], ...]:
        """The blocks that a prompt begins with, as far as the cache has them.

        At least two tokens are left to read: one alone would take another kernel (see
        `KVLayout.query_block`). A prompt whose log-probabilities are wanted is read in full.
        """
        if self._prefix_cache is None:
            return ()
        if not sequence.block_keys:
            sequence.block_keys = self._prefix_cache.keys(sequence.prompt_ids, sequence.cache_salt)
        if sequence.params.prompt_logprobs:
            return ()
        num_reusable = max(sequence.num_prompt - 2, 0) // self._block_tokens
        return self._prefix_cache.match(sequence.block_keys[:num_reusable])

    def _reuse(self, sequence: Sequence, prefix: tuple[NDArray[np.generic], ...]) -> None:
        for block in prefix:
            self._loads.append(Load(sequence.slot, sequence.num_computed, block))
            sequence.num_computed += self._block_tokens
        sequence.num_reused = sequence.num_computed

    def _highest_decoding(self) -> Sequence | None:
        decoding = (s for s in reversed(self.running) if s.state is State.DECODING)
        return next(decoding, None)

    def _fill_holes(self) -> Iterator[Move]:
        while None in self._slots:
            hole = self._slots.index(None)
            highest = self._highest_decoding()
            if highest is None or highest.slot < hole:
                return
            source = highest.slot
            self._slots[hole], self._slots[source] = highest, None
            highest.slot = hole
            yield Move(source, hole, highest.num_computed)

    def _guess(self) -> tuple[int, ...]:
        running = self.running
        if not self._max_drafts or len(running) != 1 or running[0].state is not State.DECODING:
            return ()
        return running[0].guess(min(self._max_drafts, self._max_length - running[0].num_tokens))

    def _next_chunk(self, sequence: Sequence) -> Prefill:
        chunk = self._prefill_chunk_tokens
        if sequence.params.prompt_logprobs:
            chunk = self._block_tokens
        num_tokens = sequence.num_to_prefill
        # A last chunk of one token would take another kernel (see `KVLayout.query_block`).
        if num_tokens > chunk + 1:
            num_tokens = chunk
        return Prefill(sequence, sequence.slot, sequence.num_computed, num_tokens)
