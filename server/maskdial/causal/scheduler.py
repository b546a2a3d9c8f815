"""Scheduler: which sequence runs when, and in which slot. Bookkeeping only; not thread-safe."""

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import attrgetter

from maskdial.causal.block_text import MOST_TOKENS
from maskdial.causal.plan import Fork, Load, Move, Plan, Prefill, Restore, Save
from maskdial.causal.prefix_cache import Block, PrefixCache
from maskdial.causal.prefix_disk.tier import DiskTier
from maskdial.causal.sequence import Sequence, State
from maskdial.engine.fairness import Shares

# One start in so many goes to the sequence that has waited longest, so no priority starves.
_STARTS_PER_OLDEST = 4

# A generated token costs twice as much as one of a prompt (the weights of Sheng et al. 2024).
_PROMPT_COST = 1.0
_GENERATED_COST = 2.0

# After so many steps of the background alone, its prompts are read in whole chunks.
_STEPS_ALONE = 256

# So many of the first in the queue have their prefixes read from disk before there is a slot.
_PREFETCHED = 2

_queue_order = attrgetter("priority", "arrival")


class Scheduler:
    """Runs sequences in a fixed number of slots.

    Waiting clients get equal shares of the tokens (see `maskdial.engine.fairness`). A client's own
    sequences start by priority, then first come, first served.

    A decode pass binds slots 0..n-1 of the KV cache as one array, so no free slot may lie between
    used ones. A waiting sequence takes the lowest free slot; a hole that no one takes is filled by
    the decoding sequence in the highest slot. One prompt is prefilled at a time, a chunk per step,
    so that a long prompt delays the decoding sequences by one chunk only; short prompts that wait
    together are prefilled together.

    A `SharedPrompt` is prefilled once, by the first of its sequences. The others get a copy of its
    keys and values when a slot is free; the last one that runs leaves its slot, with the prompt in
    it, to the next.

    A sequence in the background runs only while no other one runs or waits. Otherwise it pauses: it
    keeps its slot, above all others, until one of them needs it. It is set aside then, in main
    memory, and goes on when it has a slot again. Where there is no room for that, it is
    `preempted`, as it is at once where it has not begun to decode, or is a beam.

    The source texts of an encoder-decoder model are read whole, several short ones in one pass. At
    most one such pass lies between two decode steps. A beam search takes a slot for each beam at
    once.

    Args:
        slots: sequences that run at once.
        prefill_chunk_tokens: prompt tokens per step; the last chunk may have one more. Source texts
            have as many with their padding, or one is longer. A prompt whose tokens see each other
            in both directions has no more.
        max_length: tokens that a slot holds.
        block_tokens: a divisor of the chunk. Prompts whose log-probabilities are requested are
            prefilled in chunks of this length.
        joint_tokens: prompts of 2 to this many tokens may be prefilled together.
        prefix_cache: where to look for prefixes of prompts.
        prefix_disk: where to look for what that lacks. A sequence waits for what is read, and
            others start meanwhile.
        max_saved_tokens: of all sequences that are set aside.
    """

    def __init__(
        self,
        *,
        slots: int,
        prefill_chunk_tokens: int,
        max_length: int,
        block_tokens: int,
        joint_tokens: int,
        prefix_cache: PrefixCache | None = None,
        prefix_disk: DiskTier | None = None,
        max_saved_tokens: int = 0,
    ) -> None:
        self._max_saved_tokens = max_saved_tokens
        self._slots: list[Sequence | None] = [None] * slots
        self._waiting: list[Sequence] = []  # in the order of `_queue_order`
        self._background: list[Sequence] = []  # those that wait, in the order of arrival
        self._preempted: list[Sequence] = []
        self._steps_alone = 0  # of the background, since another sequence ran
        self._prefilling: list[Sequence] = []
        self._encoding: list[Sequence] = []
        self._loads: list[Load] = []
        self._forked: list[Sequence] = []
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._max_length = max_length
        self._block_tokens = block_tokens
        self._joint_tokens = joint_tokens
        self._prefix_cache = prefix_cache
        self._prefix_disk = prefix_disk
        self._num_arrived = 0
        self._unhashed: list[Sequence] = []  # whose prefixes the cache may have
        self._num_started = 0
        self._turn = 0  # steps with passes over blocks
        self._shares = Shares()
        self._num_waiting_of: Counter[str] = Counter()  # by client

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot, without those in the background."""
        return len(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The sequences that hold a slot, in slot order."""
        return tuple(sequence for sequence in self._slots if sequence is not None)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of running sequences in the cache, and of their source texts."""
        return sum(sequence.num_computed + sequence.num_source for sequence in self.running)

    @property
    def has_work(self) -> bool:
        waits = bool(self._waiting or self._background)
        return waits or any(sequence is not None for sequence in self._slots)

    @property
    def _is_busy(self) -> bool:
        """Whether there is work that is not in the background."""
        return bool(self._waiting) or not all(map(_is_background, self.running))

    @property
    def _active(self) -> tuple[Sequence, ...]:
        """The running sequences that do not pause, in slot order."""
        if not self._is_busy:
            return self.running
        return tuple(each for each in self.running if not _is_background(each))

    def take_preempted(self) -> list[Sequence]:
        """The readers of sequences that had to give up their slots since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence, which runs when a slot is free and it is its client's turn."""
        sequence.enqueue(self._num_arrived)
        self._num_arrived += 1
        if self._prefix_cache is not None and not sequence.full_prompt:
            self._unhashed.append(sequence)
        if _is_background(sequence):
            self._background.append(sequence)
            return
        client = sequence.usage.client
        if not self._num_waiting_of[client]:
            self._shares.join(client, +self._num_waiting_of)
        self._num_waiting_of[client] += 1
        bisect.insort(self._waiting, sequence, key=_queue_order)

    def take_unhashed(self) -> list[Sequence]:
        """The sequences that came since the last call, for `hash_prompt`."""
        unhashed, self._unhashed = self._unhashed, []
        return unhashed

    def hash_prompt(self, sequence: Sequence) -> None:
        """Finds the prefix cache's keys of a prompt, which takes milliseconds for a long one.

        It changes the sequence only, so that callers can do it without their lock.
        """
        if self._prefix_cache is None or sequence.block_keys:
            return
        shared = sequence.shared_prompt
        adapter = "" if sequence.adapter is None else sequence.adapter.digest
        known = () if shared is None else shared.block_keys
        keys = known or self._prefix_cache.keys(
            sequence.prompt_ids, sequence.cache_salt, sequence.usage.key, adapter
        )
        snapshots = self._prefix_cache.snapshots(self._num_reusable(sequence), sequence.borders)
        sequence.find_blocks(keys, snapshots)

    def cancel(self, sequence: Sequence) -> None:
        """Drops a sequence: from the queue at once, from its slot with the next plan."""
        sequence.cancel()
        if sequence.state is State.WAITING:
            if sequence in (*self._waiting, *self._background):  # beams but the first never are
                self._leave_queue(sequence)
            sequence.end()

    def schedule(self) -> Plan:
        """The next step. Its moves and loads count as done from here on."""
        for sequence in self.running:
            if sequence.cancelled:
                self.release(sequence)
        if self._prefix_disk is not None:
            for sequence in self._waiting[:_PREFETCHED]:
                self._awaits_disk(sequence)
        self._make_way()
        forks = tuple(self._fork_beams())
        moves = [*self._admit(), *self._fill_holes()]
        loads, self._loads = tuple(self._loads), []
        restores, self._forked = tuple(_restores(self._forked)), []
        highest = self._highest_decoding()
        rows = () if highest is None else self.running[: highest.slot + 1]
        return Plan(
            forks=forks,
            moves=tuple(moves),
            loads=loads,
            restores=restores,
            awaiting_mask=tuple(s for s in self._active if s.state is State.HOLDING),
            rows=rows,
            decoding_rows=tuple(self._decoding_rows(rows)),
            prefills=tuple(map(self._next_chunk, self._prefilling)),
            encoding=tuple(self._encoding),
        )

    def repeats(self, plan: Plan) -> bool:
        """Whether the next plan is this one again, but for sequences that end in between.

        That is so if every running sequence decodes and none can join them.
        """
        return (
            bool(plan.rows)
            and plan.rows == self._active
            and len(plan.decoding_rows) == len(plan.rows)
            and not (plan.awaiting_mask or plan.prefills or plan.encoding)
            and not (self._waiting and self._next_slot() is not None)
            and not (self._background and not self._is_busy and None in self._slots)
            and not any(each.cancelled or each.search is not None for each in plan.rows)
        )

    def advance(self, plan: Plan) -> None:
        """Notes that a plan has run and its sequences have new tokens, or ``held_logits``.

        Sequences that were released meanwhile are left alone.
        """
        for sequence in (*plan.decoding, *plan.awaiting_mask):
            if sequence.block_text is not None:
                self._charge(sequence, sequence.block_text.num_read, _PROMPT_COST)
            else:
                self._charge(sequence, max(sequence.num_new, 1), _GENERATED_COST)
            _proceed(sequence)
        for prefill in plan.prefills:
            self._charge(prefill.sequence, prefill.num_tokens, _PROMPT_COST)
            if prefill.sequence in self._prefilling:
                prefill.sequence.prefill(prefill.num_tokens)
                if prefill.is_last:
                    self._prefilling.remove(prefill.sequence)
                    _proceed(prefill.sequence)
        for sequence in plan.encoding:
            self._charge(sequence, sequence.num_source, _PROMPT_COST)
            if sequence in self._encoding:
                self._encoding.remove(sequence)
                sequence.proceed()

    def release(self, sequence: Sequence) -> None:
        """Frees the slot of a sequence that finished, failed or was cancelled, if it has one."""
        slot = sequence.slot
        if slot < 0:
            return
        successor = self._next_sharing_prompt(sequence)
        self._slots[slot] = None
        sequence.end()
        for reading in (self._prefilling, self._encoding):
            if sequence in reading:
                reading.remove(sequence)
        if successor is not None:
            self._fork(successor, slot)

    def clear(self) -> None:
        """Drops every sequence, queued and running, and frees their slots."""
        waiting = [*self._waiting, *self._background]
        self._waiting, self._background, self._unhashed = [], [], []
        self._num_waiting_of.clear()
        for sequence in self.running:
            self.release(sequence)
        for sequence in waiting:
            sequence.end()

    def _decoding_rows(self, rows: tuple[Sequence, ...]) -> list[int]:
        """The rows that decode in the next step, as indices.

        Of those that are written block by block, as many as read no more tokens together than a
        pass takes, or one; those that have waited longest come first.
        """
        decoding = [i for i, s in enumerate(rows) if s.state is State.DECODING]
        blocks = [i for i in decoding if rows[i].block_text is not None]
        if not blocks:
            return decoding
        self._turn += 1
        room, waiting = min(self._prefill_chunk_tokens, MOST_TOKENS), set[int]()
        for i in sorted(blocks, key=lambda i: rows[i].last_turn):
            text = rows[i].block_text
            assert text is not None, "it is one of them"
            if text.num_next > room:
                waiting.add(i)
                continue
            room -= text.num_next
            rows[i].take_turn(self._turn)
        return [i for i in decoding if i not in waiting]

    def _admit(self) -> Iterator[Move | Save | Load]:
        """Starts the sequences that can start now; yields the copies that this needs."""
        while (slot := self._next_slot()) is not None:
            sequence = self._next_waiting()
            if sequence is None:
                return
            if sequence.is_set_aside:
                assert sequence.saved is not None, "the plan that set it aside has run"
                self._occupy(sequence, slot)
                yield Load(slot, 0, sequence.saved)
                sequence.resume(slot)
                continue
            source = self._prompt_source(sequence)
            if source is not None:
                yield from self._vacate(slot)
                self._fork(sequence, slot)
                yield Move(source.slot, slot, sequence.num_prompt)
                continue
            if not self._has_room(sequence):
                return
            if sequence.num_source:
                if not self._encodes_beside(sequence):
                    return
                yield from self._vacate(slot)
                self._occupy(sequence, slot)
                sequence.start(slot, 0)
                self._encoding.append(sequence)
                yield from self._reserve(sequence)
                continue
            prefix = self._find_prefix(sequence)
            if self._prefilling and (prefix or not self._joins(sequence, slot)):
                return
            yield from self._vacate(slot)
            self._occupy(sequence, slot)
            self._keep_parting(sequence, len(prefix))
            num_restored = sum(map(Block.take_restored, prefix))
            sequence.start(slot, len(prefix) * self._block_tokens, num_restored)
            self._prefilling.append(sequence)
            for index, block in enumerate(prefix):
                states = block.states if index == len(prefix) - 1 else None
                load = Load(slot, index * self._block_tokens, block.data, states)
                self._loads.append(load)
            yield from self._reserve(sequence)

    def _next_waiting(self) -> Sequence | None:
        """The waiting sequence that starts next; it stays in the queue."""
        if not self._is_busy:
            return next(filter(self._is_ready, self._background), None)
        ready: Iterator[Sequence] = filter(self._is_ready, self._waiting)
        if len(self._num_waiting_of) > 1:
            candidates = tuple(ready)
            clients = dict.fromkeys(sequence.usage.client for sequence in candidates)
            due = self._shares.first(clients) if clients else None
            ready = (sequence for sequence in candidates if sequence.usage.client == due)
        if self._num_started % _STARTS_PER_OLDEST == _STARTS_PER_OLDEST - 1:
            return min(ready, key=attrgetter("arrival"), default=None)
        return next(ready, None)

    def _is_ready(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence waits for nothing but a slot."""
        if sequence.is_set_aside:
            return True
        return not self._awaits_prompt(sequence) and not self._awaits_disk(sequence)

    def _awaits_disk(self, sequence: Sequence) -> bool:
        """Whether a prompt's beginning is being read from disk, or is from now on."""
        disk = self._prefix_disk
        if disk is None or sequence.full_prompt or sequence.params.prompt_logprobs:
            return False
        if sequence.fetch is not None:
            if not sequence.fetch.is_over:
                return True
            if not sequence.fetch.is_read:  # the disk does not answer
                sequence.await_fetch(None)
        if sequence.fetches_left:
            self.hash_prompt(sequence)
            keys = sequence.block_keys[: self._num_reusable(sequence)]
            sequence.await_fetch(disk.fetch(keys))
        else:
            sequence.await_fetch(None)
        return sequence.fetch is not None

    def _charge(self, sequence: Sequence, num_tokens: int, cost: float) -> None:
        sequence.usage.tokens += num_tokens
        self._shares.charge(sequence.usage.client, num_tokens * cost)

    def _leave_queue(self, sequence: Sequence) -> None:
        if _is_background(sequence):
            self._background.remove(sequence)
            return
        self._waiting.remove(sequence)
        client = sequence.usage.client
        self._num_waiting_of[client] -= 1
        if not self._num_waiting_of[client]:
            del self._num_waiting_of[client]
            self._shares.prune(self._num_waiting_of)

    def _occupy(self, sequence: Sequence, slot: int) -> None:
        self._leave_queue(sequence)
        self._num_started += 1
        self._slots[slot] = sequence

    def _fork(self, sequence: Sequence, slot: int) -> None:
        """Starts a sequence in a slot that has its whole prompt, or is about to."""
        assert sequence.shared_prompt is not None, "only a shared prompt has several sequences"
        self._occupy(sequence, slot)
        sequence.fork(slot, sequence.shared_prompt)
        self._forked.append(sequence)

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

    def _next_sharing_prompt(self, sequence: Sequence) -> Sequence | None:
        """The waiting sequence that takes over a released one's slot, with the prompt in it."""
        shared = sequence.shared_prompt
        if shared is None or sequence.state is State.PREFILLING or any(self._sharing(sequence)):
            return None
        if _is_background(sequence):
            fresh = (each for each in self._background if not each.is_set_aside)
            siblings = (each for each in fresh if each.shared_prompt is shared)
            return None if self._is_busy else next(siblings, None)
        if len(self._num_waiting_of) > 1:
            due = self._next_waiting()
            if due is not None and due.usage.client != sequence.usage.client:
                return None
        return next((s for s in self._waiting if s.shared_prompt is shared), None)

    def _joins(self, sequence: Sequence, slot: int) -> bool:
        """Whether a waiting prompt can be prefilled in one pass with those about to be.

        The pass reads whole prompts, writes to adjoining slots, and is as long as its longest one.
        Within one block of the attention kernel, padding does not change a prompt's logits in any
        bit.
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
                and self._next_chunk(s).is_last
                for s in together
            )
        )

    def _encodes_beside(self, sequence: Sequence) -> bool:
        """Whether a source text can be read in one pass with those about to be."""
        together = [*self._encoding, sequence]
        padded = len(together) * max(each.num_source for each in together)
        return len(together) == 1 or padded <= self._prefill_chunk_tokens

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether there is a slot for each beam."""
        return len(self._slots) - len(self._active) >= len(sequence.beams)

    def _reserve(self, first: Sequence) -> Iterator[Move | Save]:
        """Takes slots for the other beams of a search."""
        for beam in first.beams[1:]:
            slot = self._next_slot()
            assert slot is not None, "there is room for all beams"
            yield from self._vacate(slot)
            self._slots[slot] = beam
            beam.reserve(slot)

    def _next_slot(self) -> int | None:
        """The lowest slot that a sequence can have which starts now."""
        busy = self._is_busy
        free = (
            slot
            for slot, holder in enumerate(self._slots)
            if holder is None or (busy and _is_background(holder))
        )
        return next(free, None)

    def _vacate(self, slot: int) -> Iterator[Move | Save]:
        """Has a paused sequence leave a slot: for a free one, or for main memory."""
        holder = self._slots[slot]
        if holder is None:
            return
        free = [number for number, other in enumerate(self._slots) if other is None]
        if not free:
            if not self._can_save(holder):
                self._preempt(holder)
                return
            self._slots[slot] = None
            holder.set_aside()
            self._background.insert(0, holder)
            yield Save(holder, slot, holder.num_computed)
            return
        self._slots[slot], self._slots[free[-1]] = None, holder
        holder.move(free[-1])
        yield Move(slot, free[-1], holder.num_computed)

    def _can_save(self, sequence: Sequence) -> bool:
        """Whether there is room in main memory for a paused sequence."""
        saved = sum(each.num_computed for each in self._background if each.is_set_aside)
        return (
            sequence.block_text is None and saved + sequence.num_computed <= self._max_saved_tokens
        )

    def _make_way(self) -> None:
        """Stops what cannot pause while there is work that is not in the background."""
        if not self._is_busy:
            self._steps_alone += 1
            return
        self._steps_alone = 0
        for sequence in self.running:
            pauses = sequence.search is None and sequence.state in (State.DECODING, State.HOLDING)
            if _is_background(sequence) and not pauses and sequence.slot >= 0:
                self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Has a sequence, or all beams of its search, give up its slot for good."""
        search = sequence.search
        self._preempted += (sequence,) if search is None else search.readers
        for each in sequence.beams:
            self.release(each)

    def _fork_beams(self) -> Iterator[Fork]:
        """The copies that beam searches need for the texts that they go on with."""
        for search in dict.fromkeys(sequence.search for sequence in self.running):
            for fork in () if search is None else search.take_forks():
                num_tokens = fork.source.num_computed - fork.start
                yield Fork(fork.source.slot, fork.target.slot, fork.start, num_tokens)

    def _find_prefix(self, sequence: Sequence) -> tuple[Block, ...]:
        """The longest prefix of a prompt that the prefix cache has, in blocks.

        It leaves two tokens or more to prefill, since a single one runs on another kernel (see
        `KVLayout.query_block`). A prompt whose log-probabilities are requested is prefilled in
        full, and so is one whose tokens see each other in both directions.
        """
        if self._prefix_cache is None or sequence.full_prompt:
            return ()
        self.hash_prompt(sequence)
        if sequence.params.prompt_logprobs:
            return ()
        keys = sequence.block_keys[: self._num_reusable(sequence)]
        return self._prefix_cache.match(keys, sequence.snapshot_keys)

    def _keep_parting(self, sequence: Sequence, num_usable: int) -> None:
        """Has the states kept where a prompt parts from an earlier one, which left none there: a
        third prompt may begin like both.
        """
        if self._prefix_cache is None or not sequence.snapshots:
            return
        keys = sequence.block_keys[: self._num_reusable(sequence)]
        num_held = self._prefix_cache.num_held(keys)
        if self._prefix_disk is not None:
            num_held = self._prefix_disk.num_held(keys, num_held)
        if num_held > num_usable:
            sequence.keep_states(num_held)

    def _num_reusable(self, sequence: Sequence) -> int:
        """The blocks of a prompt that need not be read if the prefix cache has them."""
        return max(sequence.num_prompt - 2, 0) // self._block_tokens

    def _highest_decoding(self) -> Sequence | None:
        decoding = (s for s in reversed(self._active) if s.state is State.DECODING)
        return next(decoding, None)

    def _fill_holes(self) -> Iterator[Move]:
        while None in self._slots:
            hole = self._slots.index(None)
            highest = self._highest_decoding()
            if highest is None or highest.slot < hole:
                return
            source = highest.slot
            self._slots[hole], self._slots[source] = highest, None
            highest.move(hole)
            yield Move(source, hole, highest.num_computed)

    def _next_chunk(self, sequence: Sequence) -> Prefill:
        if sequence.full_prompt:
            return Prefill(sequence, sequence.slot, 0, sequence.num_prompt)
        chunk = self._prefill_chunk_tokens
        if sequence.params.prompt_logprobs:
            chunk = self._block_tokens
        elif _is_background(sequence) and self._steps_alone < _STEPS_ALONE:
            chunk = self._block_tokens  # another one that arrives would wait for all of it
        start, num_tokens = sequence.num_computed, sequence.num_to_prefill
        # A last chunk of one token would run on another kernel (see `KVLayout.query_block`).
        if num_tokens > chunk + 1:
            num_tokens = chunk
        # States cannot be cut, so that a chunk ends where they are kept.
        ends = (number * self._block_tokens for number in sequence.snapshots)
        num_tokens = min([num_tokens, *(end - start for end in ends if end > start)])
        return Prefill(sequence, sequence.slot, start, num_tokens)


def _is_background(sequence: Sequence) -> bool:
    return sequence.usage.background


def _restores(forked: Iterable[Sequence]) -> Iterator[Restore]:
    """The states of the sequences that took over a shared prompt, and have not ended since."""
    for sequence in forked:
        shared = sequence.shared_prompt
        if sequence.state is State.HOLDING and shared is not None and shared.states is not None:
            yield Restore(sequence.slot, shared.states)


def _proceed(sequence: Sequence) -> None:
    """Notes that a sequence has a new token, or its beam search has given some to its beams."""
    for each in (sequence,) if sequence.search is None else sequence.search.running:
        if each.slot >= 0:
            each.proceed()
