"""Scheduler: which sequence runs when, and in which slot. Pure bookkeeping; not thread-safe."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from maskdial.causal.sequence import Sequence, State
from maskdial.errors import OverloadedError


@dataclass(frozen=True, slots=True)
class Move:
    """The first ``num_tokens`` of slot ``source`` are to be copied to slot ``target``."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """The next piece of a prompt: ``num_tokens`` tokens from position ``start`` on."""

    sequence: Sequence
    slot: int
    start: int
    num_tokens: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete after it."""
        return self.start + self.num_tokens == self.sequence.num_prompt


@dataclass(frozen=True, slots=True)
class Plan:
    """One iteration: copy the moves, then decode, then prefill.

    ``rows`` are the sequences of slots 0..n-1. All of them decode, save that one may still be
    reading its prompt in a hole: its row runs along with a token of no meaning, written to the
    position that the prefill after it overwrites, and its logits are not asked for.
    """

    moves: tuple[Move, ...]
    rows: tuple[Sequence, ...]
    decoding_rows: tuple[int, ...]
    """The rows that decode, as indices."""
    prefill: Prefill | None

    @property
    def decoding(self) -> tuple[Sequence, ...]:
        """The sequences that get a token from the decode pass."""
        return tuple(self.rows[row] for row in self.decoding_rows)


class Scheduler:
    """First come, first served, over a fixed number of slots.

    A decode pass binds slots 0..n-1 of the cache as they lie, so those must be in use without
    gaps. A waiting sequence takes the lowest free slot, which is the hole that an ended one left,
    if there is one; holes that nobody takes are filled by the decoding sequence in the highest
    slot. One prompt is read at a time, a chunk per iteration, so long prompts delay the decoding
    sequences by one chunk at most.

    Args:
        slots: sequences that run at once.
        prefill_chunk_tokens: prompt tokens per iteration; the last chunk may have one more.
        max_queue: sequences that may wait.
    """

    def __init__(self, *, slots: int, prefill_chunk_tokens: int, max_queue: int) -> None:
        self._slots: list[Sequence | None] = [None] * slots
        self._waiting: deque[Sequence] = deque()
        self._prefilling: Sequence | None = None
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._max_queue = max_queue

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
        self._waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Drops a sequence: from the queue at once, from its slot when the next plan is made."""
        sequence.cancelled = True
        if sequence.state is State.WAITING and sequence in self._waiting:
            self._waiting.remove(sequence)
            sequence.state = State.ENDED

    def schedule(self) -> Plan:
        """The next iteration. The moves in it are taken as done."""
        for sequence in self.running:
            if sequence.cancelled:
                self.release(sequence)
        if self._prefilling is None and self._waiting and None in self._slots:
            self._start(self._waiting.popleft())
        moves = tuple(self._fill_holes())
        highest = self._highest_decoding()
        rows = () if highest is None else self.running[: highest.slot + 1]
        decoding_rows = tuple(i for i, s in enumerate(rows) if s is not self._prefilling)
        return Plan(moves, rows, decoding_rows, self._next_chunk())

    def advance(self, plan: Plan) -> None:
        """Takes note that a plan's passes ran; sequences released meanwhile are left alone."""
        for sequence in plan.decoding:
            if sequence.state is State.DECODING:
                sequence.num_computed += 1
        prefill = plan.prefill
        if prefill is not None and prefill.sequence is self._prefilling:
            prefill.sequence.num_computed += prefill.num_tokens
            if prefill.is_last:
                prefill.sequence.state = State.DECODING
                self._prefilling = None

    def release(self, sequence: Sequence) -> None:
        """Frees the slot of a sequence that finished, failed or was cancelled, if it has one."""
        if sequence.slot < 0:
            return
        self._slots[sequence.slot] = None
        sequence.slot = -1
        sequence.state = State.ENDED
        if self._prefilling is sequence:
            self._prefilling = None

    def clear(self) -> tuple[Sequence, ...]:
        """Drops every sequence and returns those that had not ended."""
        dropped = (*self.running, *self._waiting)
        for sequence in self.running:
            self.release(sequence)
        for sequence in self._waiting:
            sequence.state = State.ENDED
        self._waiting.clear()
        return dropped

    def _start(self, sequence: Sequence) -> None:
        sequence.slot = self._slots.index(None)
        sequence.state = State.PREFILLING
        self._slots[sequence.slot] = sequence
        self._prefilling = sequence

    def _highest_decoding(self) -> Sequence | None:
        decoding = (s for s in reversed(self.running) if s is not self._prefilling)
        return next(decoding, None)

    def _fill_holes(self) -> Iterable[Move]:
        while None in self._slots:
            hole = self._slots.index(None)
            highest = self._highest_decoding()
            if highest is None or highest.slot < hole:
                return
            source = highest.slot
            self._slots[hole], self._slots[source] = highest, None
            highest.slot = hole
            yield Move(source, hole, highest.num_computed)

    def _next_chunk(self) -> Prefill | None:
        sequence = self._prefilling
        if sequence is None:
            return None
        num_tokens = sequence.num_to_prefill
        # A last chunk of one token would take another kernel (see `KVLayout.query_block`).
        if num_tokens > self._prefill_chunk_tokens + 1:
            num_tokens = self._prefill_chunk_tokens
        return Prefill(sequence, sequence.slot, sequence.num_computed, num_tokens)
