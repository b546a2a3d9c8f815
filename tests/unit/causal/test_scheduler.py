"""The scheduler alone, with a row of numbers per slot in the place of a cache."""

from collections.abc import Sequence as SequenceOf
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from maskdial.causal.plan import Load, Move, Plan, Prefill, Save
from maskdial.causal.prefix_cache import PrefixCache
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.scheduler import Scheduler
from maskdial.causal.sequence import Sequence, SharedPrompt, State
from maskdial.engine.fairness import ClientUsage

PARAMS = SamplingParams(max_new_tokens=10**6)
MAX_LENGTH = 128
CHUNK = 4
BLOCK = 2

_fresh_tokens = count(1)


class Mute:
    """A detokenizer without a word."""

    special_ids: frozenset[int] = frozenset()

    def decoder(self, prompt_ids: SequenceOf[int]) -> "Mute":
        return self

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def make(
    num_prompt: int, *, priority: int = 0, shared: SharedPrompt | None = None, salt: str = ""
) -> Sequence:
    """A sequence whose first token no other has."""
    prompt = [next(_fresh_tokens)] * num_prompt
    return Sequence(prompt, PARAMS, priority=priority, shared_prompt=shared, cache_salt=salt)


def make_copies(num_prompt: int, num_copies: int) -> list[Sequence]:
    shared, prompt = SharedPrompt(), [next(_fresh_tokens)] * num_prompt
    return [Sequence(prompt, PARAMS, shared_prompt=shared) for _ in range(num_copies)]


def keys_of(token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """What a model would write for each token: it depends on all that came before."""
    return np.array([hash(tuple(token_ids[: i + 1].tolist())) for i in range(len(token_ids))])


def in_background(sequence: Sequence) -> Sequence:
    sequence.usage = ClientUsage("batch", background=True)
    return sequence


class Simulation:
    """Runs plans against slots that hold, for each position, what a model would have written.

    A row that decodes out of turn writes nonsense, as the real pass does.
    """

    def __init__(
        self,
        slots: int,
        prefix_cache: PrefixCache | None = None,
        joint_tokens: int = BLOCK,
        chunk: int = CHUNK,
        max_saved_tokens: int = 0,
    ) -> None:
        self.joint_tokens = joint_tokens
        self.chunk = chunk
        self.scheduler = Scheduler(
            slots=slots,
            prefill_chunk_tokens=chunk,
            max_length=MAX_LENGTH,
            block_tokens=BLOCK,
            joint_tokens=joint_tokens,
            prefix_cache=prefix_cache,
            max_saved_tokens=max_saved_tokens,
        )
        self.prefix_cache = prefix_cache
        self.cache = np.zeros((slots, MAX_LENGTH), np.int64)

    def step(self) -> Plan:
        """One iteration; returns its plan. Nothing finishes by itself."""
        plan = self.scheduler.schedule()
        for move in plan.moves:
            if isinstance(move, Save):
                assert move.sequence.is_set_aside
                move.sequence.saved = self.cache[move.slot, : move.num_tokens].copy()
                continue
            if isinstance(move, Load):
                self.cache[move.slot, : len(move.block)] = move.block
                continue
            self.cache[move.target, : move.num_tokens] = self.cache[move.source, : move.num_tokens]
        for load in plan.loads:
            self.cache[load.slot, load.start : load.start + len(load.block)] = load.block
        self.check(plan)
        for slot, sequence in enumerate(plan.rows):
            decodes = slot in plan.decoding_rows
            written = keys_of(sequence.token_ids)[-1] if decodes else -1
            self.cache[slot, sequence.num_computed] = written
        for prefill in plan.prefills:
            self.read(prefill)
        read = [prefill.sequence for prefill in plan.prefills if prefill.is_last]
        for sequence in (*plan.decoding, *plan.awaiting_mask, *read):
            sequence.accept(
                next(_fresh_tokens),
                0.0,
                detokenizer=Mute(),
                eos_token_ids=frozenset(),
                max_length=MAX_LENGTH,
            )
        self.scheduler.advance(plan)
        return plan

    def read(self, prefill: Prefill) -> None:
        sequence = prefill.sequence
        end = prefill.start + prefill.num_tokens
        self.cache[prefill.slot, prefill.start : end] = keys_of(sequence.prompt_ids)[
            prefill.start : end
        ]
        if self.prefix_cache is not None:
            for index in range(prefill.start // BLOCK, end // BLOCK):
                block = self.cache[prefill.slot, index * BLOCK : (index + 1) * BLOCK]
                self.prefix_cache.put(sequence.block_keys[index], block.copy())

    def check(self, plan: Plan) -> None:
        """What holds for every plan."""
        running = self.scheduler.running
        assert len({sequence.slot for sequence in running}) == len(running)
        assert [sequence.slot for sequence in plan.rows] == list(range(len(plan.rows)))
        others = [sequence for sequence in running if not sequence.usage.background]
        # Those in the background pause, in higher slots, while others run or wait.
        active = others if others or self.scheduler.num_waiting else list(running)
        assert list(running[: len(active)]) == active
        assert list(plan.decoding) == [s for s in active if s.state is State.DECODING]
        assert list(plan.awaiting_mask) == [s for s in active if s.state is State.HOLDING]
        assert all(prefill.sequence in active for prefill in plan.prefills)
        self.check_prefills(plan.prefills)
        for sequence in running:
            written = self.cache[sequence.slot, : sequence.num_computed]
            assert np.array_equal(written, keys_of(sequence.token_ids)[: sequence.num_computed])

    def check_prefills(self, prefills: tuple[Prefill, ...]) -> None:
        for prefill in prefills:
            assert prefill.sequence.state is State.PREFILLING
            assert prefill.slot == prefill.sequence.slot
            assert prefill.start == prefill.sequence.num_computed
            assert prefill.start % BLOCK == 0
            assert 1 <= prefill.num_tokens <= self.chunk + 1
            assert prefill.num_tokens > 1 or prefill.sequence.num_prompt == 1
            assert prefill.start + prefill.num_tokens <= prefill.sequence.num_prompt
        if len(prefills) > 1:
            slots = [prefill.slot for prefill in prefills]
            assert slots == list(range(slots[0], slots[0] + len(slots)))
            assert all(prefill.start == 0 and prefill.is_last for prefill in prefills)
            longest = max(prefill.num_tokens for prefill in prefills)
            assert longest * len(prefills) <= self.chunk
            assert longest <= self.joint_tokens


def test_prompts_are_read_in_chunks_one_at_a_time_in_order() -> None:
    simulation = Simulation(slots=3)
    first, second = make(10), make(3)
    simulation.scheduler.add(first)
    simulation.scheduler.add(second)
    chunks = [chunk for _ in range(4) for chunk in simulation.step().prefills]
    assert chunks == [
        Prefill(first, 0, 0, 4),
        Prefill(first, 0, 4, 4),
        Prefill(first, 0, 8, 2),
        Prefill(second, 1, 0, 3),
    ]


def test_prompts_that_are_cut_are_read_apart() -> None:
    """Those whose states are kept within, and those in the background: a joint pass begins at 0."""
    cache = PrefixCache(model="m", block_tokens=BLOCK, max_bytes=10**6, snapshot_blocks=100)
    simulation = Simulation(slots=4, prefix_cache=cache, joint_tokens=8, chunk=32)
    for num_prompt in (3, 3, 6, 7):
        simulation.scheduler.add(make(num_prompt))
    plans = [simulation.step() for _ in range(5)]
    assert [[each.num_tokens for each in plan.prefills] for plan in plans] == [
        *([3, 3], [4], [2], [4], [3]),
    ]
    simulation = Simulation(slots=4, joint_tokens=8, chunk=32)
    for _ in range(2):
        simulation.scheduler.add(in_background(make(5)))
    plans = [simulation.step() for _ in range(4)]
    assert [[each.num_tokens for each in plan.prefills] for plan in plans] == [
        *([2], [3], [2], [3]),
    ]


def test_states_are_kept_where_an_earlier_prompt_parts() -> None:
    cache = PrefixCache(model="m", block_tokens=BLOCK, max_bytes=10**6, snapshot_blocks=100)
    simulation = Simulation(slots=1, prefix_cache=cache, chunk=32)
    chunks = []
    for end in (1, 2):
        prompt = Sequence([*range(1, 12), *[100 * end] * 5], PARAMS)
        simulation.scheduler.add(prompt)
        plans = [simulation.step() for _ in range(4)]
        chunks.append([each.num_tokens for plan in plans for each in plan.prefills])
        simulation.scheduler.release(prompt)
    assert chunks == [[14, 2], [10, 4, 2]]


def test_a_last_chunk_is_never_a_single_token() -> None:
    simulation = Simulation(slots=1)
    simulation.scheduler.add(make(9))
    chunks = [chunk for _ in range(2) for chunk in simulation.step().prefills]
    assert [chunk.num_tokens for chunk in chunks] == [4, 5]


def test_short_prompts_that_wait_together_are_read_together() -> None:
    simulation = Simulation(slots=4)
    sequences = [make(2), make(2), make(2)]
    for sequence in sequences:
        simulation.scheduler.add(sequence)
    plan = simulation.step()  # as many as one chunk takes
    assert [prefill.sequence for prefill in plan.prefills] == sequences[:2]
    assert [p.sequence for p in simulation.step().prefills] == sequences[2:]


@pytest.mark.parametrize(
    ("first", "second"),
    [(2, 3), (3, 2), (1, 2), (2, 1)],
)
def test_prompts_of_a_single_token_or_more_than_a_block_are_read_alone(
    first: int, second: int
) -> None:
    simulation = Simulation(slots=4)
    sequences = [make(first), make(second)]
    for sequence in sequences:
        simulation.scheduler.add(sequence)
    assert [len(simulation.step().prefills) for _ in range(2)] == [1, 1]


def test_prompts_in_slots_apart_are_read_one_by_one() -> None:
    simulation, sequences = running_simulation(3, slots=4)
    simulation.scheduler.release(sequences[0])
    newcomers = [make(2), make(2)]
    for sequence in newcomers:
        simulation.scheduler.add(sequence)
    assert [p.slot for p in simulation.step().prefills] == [0]
    assert [p.slot for p in simulation.step().prefills] == [3]


def test_prompts_with_log_probabilities_are_read_block_by_block() -> None:
    simulation = Simulation(slots=2)
    params = SamplingParams(prompt_logprobs=True)
    simulation.scheduler.add(Sequence(range(5), params))
    simulation.scheduler.add(Sequence(range(2), params))
    chunks = [simulation.step().prefills for _ in range(3)]
    assert [[chunk.num_tokens for chunk in together] for together in chunks] == [[2], [3], [2]]


def test_a_long_prompt_leaves_every_step_to_the_others() -> None:
    simulation, streams = running_simulation(3, slots=4)
    simulation.scheduler.add(make(40))
    before = [sequence.num_generated for sequence in streams]
    for _ in range(10):
        assert len(simulation.step().prefills) == 1
    assert [s.num_generated - b for s, b in zip(streams, before, strict=True)] == [10] * 3


def running_simulation(num_sequences: int, slots: int) -> tuple[Simulation, list[Sequence]]:
    """A simulation in which all of the sequences decode."""
    simulation = Simulation(slots=slots)
    sequences = [make(2) for _ in range(num_sequences)]
    for sequence in sequences:
        simulation.scheduler.add(sequence)
    while len(simulation.step().decoding) < num_sequences:
        pass
    return simulation, sequences


def test_a_waiting_sequence_takes_the_hole() -> None:
    simulation, sequences = running_simulation(3, slots=3)
    newcomer = make(9)
    simulation.scheduler.add(newcomer)
    simulation.scheduler.release(sequences[0])
    plan = simulation.step()
    assert plan.moves == ()
    assert newcomer.slot == 0
    assert plan.rows == (newcomer, sequences[1], sequences[2])
    assert plan.decoding == (sequences[1], sequences[2])


def test_without_one_the_highest_moves_down() -> None:
    simulation, sequences = running_simulation(3, slots=4)
    simulation.scheduler.release(sequences[0])
    num_tokens = sequences[2].num_computed
    plan = simulation.step()
    assert plan.moves == (Move(2, 0, num_tokens),)
    assert plan.rows == (sequences[2], sequences[1])


def test_a_queued_sequence_is_cancelled_at_once_and_touches_nobody() -> None:
    simulation, sequences = running_simulation(2, slots=2)
    queued = make(2)
    simulation.scheduler.add(queued)
    simulation.scheduler.cancel(queued)
    assert simulation.scheduler.num_waiting == 0
    assert queued.state is State.ENDED
    assert simulation.step().decoding == tuple(sequences)


@pytest.mark.parametrize("num_steps", [1, 2, 5], ids=["prefilling", "last chunk", "decoding"])
def test_a_running_sequence_is_gone_from_the_next_plan(num_steps: int) -> None:
    simulation = Simulation(slots=2)
    sequence = make(7)
    simulation.scheduler.add(sequence)
    for _ in range(num_steps):
        simulation.step()
    simulation.scheduler.cancel(sequence)
    plan = simulation.step()
    assert plan == Plan()
    assert simulation.scheduler.running == ()
    assert not simulation.scheduler.has_work


def test_copies_of_a_prompt_are_read_once() -> None:
    simulation = Simulation(slots=4)
    copies = make_copies(7, 3)
    other = make(3)
    for sequence in (*copies, other):
        simulation.scheduler.add(sequence)
    assert simulation.step().prefills == (Prefill(copies[0], 0, 0, 4),)
    assert simulation.step().prefills == (Prefill(copies[0], 0, 4, 3),)
    plan = simulation.step()
    assert plan.moves == (Move(0, 1, 7), Move(0, 2, 7))
    assert plan.awaiting_mask == tuple(copies[1:])
    assert plan.decoding == (copies[0],)
    assert plan.prefills == (Prefill(other, 3, 0, 3),)
    assert simulation.step().decoding == (*copies, other)


def test_a_slot_with_the_prompt_is_inherited() -> None:
    simulation = Simulation(slots=1)
    copies = make_copies(5, 3)
    for sequence in copies:
        simulation.scheduler.add(sequence)
    num_read = 0
    for copy in copies:
        while copy.num_generated < 3:
            num_read += sum(prefill.num_tokens for prefill in simulation.step().prefills)
        simulation.scheduler.release(copy)
    assert num_read == 5
    assert not simulation.scheduler.has_work


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_copies_go_on_without_the_one_that_reads(num_steps: int) -> None:
    simulation = Simulation(slots=2)
    copies = make_copies(7, 3)
    for sequence in copies:
        simulation.scheduler.add(sequence)
    for _ in range(num_steps):
        simulation.step()
    simulation.scheduler.cancel(copies[0])
    for _ in range(5):
        simulation.step()
    assert set(simulation.scheduler.running) == set(copies[1:])
    assert all(copy.num_generated > 0 for copy in copies[1:])


def of(client: str, sequence: Sequence) -> Sequence:
    sequence.usage = ClientUsage(client)
    return sequence


def test_clients_that_wait_get_equal_shares_of_the_tokens() -> None:
    simulation = Simulation(slots=4)
    usages = {client: ClientUsage(client) for client in ("greedy", "polite", "terse")}
    for client, num_prompt, num in [("greedy", 20, 300), ("polite", 10, 300), ("terse", 2, 300)]:
        for _ in range(num):
            sequence = make(num_prompt)
            sequence.usage = usages[client]
            simulation.scheduler.add(sequence)
    for _ in range(600):
        simulation.step()
        for sequence in simulation.scheduler.running:
            if sequence.num_generated >= 5:
                simulation.scheduler.release(sequence)
    tokens = [usage.tokens for usage in usages.values()]
    # Shares are by cost, of which generated tokens have twice as much.
    assert all(count > 100 for count in tokens)
    costs = {
        client: usage.tokens * (1 + share)
        for (client, usage), share in zip(usages.items(), (5 / 25, 5 / 15, 5 / 7), strict=True)
    }
    assert max(costs.values()) < 1.15 * min(costs.values())


def test_a_new_client_gets_the_next_slot() -> None:
    simulation = Simulation(slots=2)
    greedy = [of("greedy", make(3)) for _ in range(20)]
    for sequence in greedy:
        simulation.scheduler.add(sequence)
    for _ in range(8):
        simulation.step()
    polite = of("polite", make(3, priority=9))  # a priority orders a client's own sequences only
    simulation.scheduler.add(polite)
    simulation.step()
    simulation.scheduler.release(greedy[0])
    simulation.step()
    assert polite in simulation.scheduler.running


def test_copies_of_a_prompt_do_not_hold_a_slot_that_another_client_waits_for() -> None:
    simulation = Simulation(slots=1)
    usage = ClientUsage("greedy")
    copies = make_copies(5, 6)
    for sequence in copies:
        sequence.usage = usage
        simulation.scheduler.add(sequence)
    for _ in range(8):
        simulation.step()
    polite = of("polite", make(3))
    simulation.scheduler.add(polite)
    simulation.step()
    simulation.scheduler.release(copies[0])
    simulation.step()
    assert simulation.scheduler.running == (polite,)
    while polite.num_generated < 3:
        simulation.step()
    simulation.scheduler.release(polite)
    served = set()
    while simulation.scheduler.has_work:  # the others read their prompt again, and finish
        simulation.step()
        for sequence in simulation.scheduler.running:
            if sequence.num_generated >= 2:
                served.add(sequence)
                simulation.scheduler.release(sequence)
    assert served == set(copies[1:])


def test_clients_that_have_left_are_forgotten() -> None:
    simulation = Simulation(slots=1)
    for number in range(50):
        sequence = of(f"client {number}", make(2))
        simulation.scheduler.add(sequence)
        simulation.step()
        simulation.scheduler.release(sequence)
    assert not simulation.scheduler._shares._served


def test_lower_priorities_come_first_and_equal_ones_in_order() -> None:
    simulation = Simulation(slots=1)
    sequences = [make(3, priority=priority) for priority in (5, 0, 5)]
    for sequence in sequences:
        simulation.scheduler.add(sequence)
    order = []
    while simulation.scheduler.has_work:
        simulation.step()
        (running,) = simulation.scheduler.running
        order.append(running)
        simulation.scheduler.release(running)
    assert order == [sequences[1], sequences[0], sequences[2]]


def test_a_low_priority_is_not_starved() -> None:
    simulation = Simulation(slots=1)
    low = [make(3, priority=9) for _ in range(2)]
    for sequence in low:
        simulation.scheduler.add(sequence)
    num_others = 0
    while any(sequence.state is not State.ENDED for sequence in low):
        simulation.scheduler.add(make(3, priority=-9))  # there is always someone more important
        simulation.step()
        (running,) = simulation.scheduler.running
        num_others += running not in low
        assert num_others < 10
        simulation.scheduler.release(running)


def prefix_simulation(
    slots: int = 2,
    max_bytes: int = 10**6,
    joint_tokens: int = BLOCK,
    max_saved_tokens: int = 0,
) -> Simulation:
    cache = PrefixCache(model="simulated", block_tokens=BLOCK, max_bytes=max_bytes)
    return Simulation(slots, cache, joint_tokens, max_saved_tokens=max_saved_tokens)


@pytest.mark.parametrize(("num_prompt", "num_reused"), [(9, 6), (8, 6), (7, 4), (4, 2), (3, 0)])
def test_a_known_beginning_is_loaded(num_prompt: int, num_reused: int) -> None:
    """All but two tokens at least, by whole blocks."""
    simulation = prefix_simulation()
    prompt = list(range(-9, 0))
    first, second = Sequence(prompt, PARAMS), Sequence(prompt[:num_prompt], PARAMS)
    simulation.scheduler.add(first)
    while first.state is not State.DECODING:
        simulation.step()
    simulation.scheduler.add(second)
    plan = simulation.step()
    assert [load.start for load in plan.loads] == list(range(0, num_reused, BLOCK))
    assert plan.prefills[0].start == second.num_reused == num_reused


def test_a_prompt_with_a_known_beginning_is_not_read_together_with_others() -> None:
    """They would be read from their first token on."""
    simulation = prefix_simulation(slots=4, joint_tokens=CHUNK)
    known = list(range(-4, 0))
    simulation.scheduler.add(Sequence(known, PARAMS))
    simulation.step()
    waiting = [make(2), Sequence(known, PARAMS), make(2)]
    for sequence in waiting:
        simulation.scheduler.add(sequence)
    assert [prefill.sequence for prefill in simulation.step().prefills] == waiting[:1]
    plan = simulation.step()
    assert [prefill.sequence for prefill in plan.prefills] == waiting[1:2]
    assert len(plan.loads) == 1
    assert [prefill.sequence for prefill in simulation.step().prefills] == waiting[2:]


def test_a_plan_repeats_while_nobody_comes_or_is_cancelled() -> None:
    simulation, sequences = running_simulation(2, slots=2)
    assert simulation.scheduler.repeats(simulation.step())
    simulation.scheduler.add(make(3))  # for which there is no slot
    plan = simulation.step()
    assert simulation.scheduler.repeats(plan)
    simulation.scheduler.cancel(sequences[0])
    assert not simulation.scheduler.repeats(plan)
    plan = simulation.step()  # the hole is taken, by a prompt to read
    assert not simulation.scheduler.repeats(plan)
    simulation.scheduler.release(sequences[1])
    plan = simulation.step()
    assert simulation.scheduler.repeats(plan)
    simulation.scheduler.add(make(3))  # for which there is one
    assert not simulation.scheduler.repeats(plan)
    empty = Simulation(slots=2).scheduler
    assert not empty.repeats(empty.schedule())


def test_a_plan_with_a_prompt_does_not_repeat() -> None:
    """Neither while it is read, nor with the last of it."""
    simulation, _ = running_simulation(1, slots=2)
    simulation.scheduler.add(make(2 * CHUNK))
    for _ in range(2):
        plan = simulation.step()
        assert plan.decoding
        assert plan.prefills
        assert not simulation.scheduler.repeats(plan)
    simulation.step()
    assert simulation.scheduler.repeats(simulation.step())


def test_another_salt_finds_nothing() -> None:
    simulation = prefix_simulation()
    prompt = list(range(-9, 0))
    for salt in ("a", "b"):
        sequence = Sequence(prompt, PARAMS, cache_salt=salt)
        simulation.scheduler.add(sequence)
        while sequence.state is not State.DECODING:
            simulation.step()
        assert sequence.num_reused == 0


def test_a_prompt_whose_log_probabilities_are_wanted_is_read_in_full() -> None:
    simulation = prefix_simulation()
    prompt = list(range(-9, 0))
    for params in (PARAMS, SamplingParams(prompt_logprobs=True)):
        sequence = Sequence(prompt, params)
        simulation.scheduler.add(sequence)
        while sequence.state is not State.DECODING:
            simulation.step()
        assert sequence.num_reused == 0


def test_clear_ends_everything() -> None:
    simulation, sequences = running_simulation(2, slots=2)
    queued = make(3)
    simulation.scheduler.add(queued)
    simulation.scheduler.clear()
    assert {sequence.state for sequence in (*sequences, queued)} == {State.ENDED}
    assert not simulation.scheduler.has_work


def test_the_background_pauses_and_goes_on() -> None:
    simulation = Simulation(slots=3)
    batch = [in_background(make(2)), in_background(make(2))]
    for sequence in batch:
        simulation.scheduler.add(sequence)
    while len(simulation.step().decoding) < 2:
        pass
    assert simulation.scheduler.num_waiting == 0
    before = [sequence.num_tokens for sequence in batch]
    online = make(2)
    simulation.scheduler.add(online)
    plan = simulation.step()
    assert plan.prefills == (Prefill(online, 0, 0, 2),)
    assert [move.target for move in plan.moves if isinstance(move, Move)] == [2]
    assert [sequence.slot for sequence in (online, *batch)] == [0, 2, 1]
    assert plan.rows == ()
    assert simulation.step().rows == (online,)
    assert [sequence.num_tokens for sequence in batch] == before
    simulation.scheduler.release(online)
    assert set(simulation.step().decoding) == set(batch)
    assert simulation.scheduler.take_preempted() == []


def test_the_background_gives_up_slots_that_are_needed() -> None:
    simulation = Simulation(slots=2)
    batch = [in_background(make(2)), in_background(make(2)), in_background(make(9))]
    for sequence in batch:
        simulation.scheduler.add(sequence)
    while len(simulation.step().decoding) < 2:
        pass
    online = [make(2), make(2)]
    simulation.scheduler.add(online[0])
    simulation.step()
    assert simulation.scheduler.take_preempted() == [batch[0]]
    assert (online[0].slot, batch[1].slot) == (0, 1)
    simulation.scheduler.add(online[1])
    simulation.step()
    assert simulation.scheduler.take_preempted() == [batch[1]]
    for sequence in online:
        simulation.scheduler.release(sequence)
    assert [prefill.sequence for prefill in simulation.step().prefills] == [batch[2]]
    simulation.scheduler.add(make(2))  # which a prompt that is being read does not outlast
    simulation.step()
    assert simulation.scheduler.take_preempted() == [batch[2]]


def test_the_background_goes_on_from_main_memory() -> None:
    simulation = Simulation(slots=2, max_saved_tokens=40)
    batch = [in_background(make(2)), in_background(make(3)), in_background(make(2))]
    for sequence in batch:
        simulation.scheduler.add(sequence)
    while len(simulation.step().decoding) < 2:
        pass
    before = [sequence.num_tokens for sequence in batch]
    online = [make(2), make(2)]
    for sequence in online:
        simulation.scheduler.add(sequence)
    while len(simulation.step().decoding) < 2:
        pass
    assert [sequence.is_set_aside for sequence in batch] == [True, True, False]
    assert [sequence.num_tokens for sequence in batch] == before
    assert simulation.scheduler.take_preempted() == []
    assert simulation.scheduler.num_waiting == 0
    simulation.scheduler.release(online[0])
    simulation.scheduler.release(online[1])
    plan = simulation.step()  # its rows are what a model would have written: `check` compares
    assert [type(move) for move in plan.moves] == [Load, Load]
    assert set(plan.decoding) == {batch[0], batch[1]}
    assert not plan.prefills
    simulation.scheduler.release(batch[1])
    assert [prefill.sequence for prefill in simulation.step().prefills] == [batch[2]]


def test_a_sibling_starts_from_a_text_that_came_back_in_the_same_step() -> None:
    simulation = Simulation(slots=2, max_saved_tokens=40)
    (other, *copies) = [in_background(each) for each in (make(2), *make_copies(6, 2))]
    for sequence in (other, *copies):
        simulation.scheduler.add(sequence)
    while len(simulation.step().decoding) < 2:
        pass
    online = [make(3), make(3)]
    for sequence in online:
        simulation.scheduler.add(sequence)
    simulation.scheduler.cancel(other)
    while len(simulation.step().decoding) < 2:
        pass
    assert copies[0].is_set_aside
    for sequence in online:
        simulation.scheduler.release(sequence)
    simulation.step()  # `check` compares both slots with what a model would have written
    assert [sequence.slot for sequence in copies] == [0, 1]


def test_a_text_that_waits_to_go_on_does_not_begin_anew_in_a_siblings_slot() -> None:
    simulation = Simulation(slots=2, max_saved_tokens=40)
    copies = [in_background(each) for each in make_copies(3, 2)]
    for sequence in copies:
        simulation.scheduler.add(sequence)
    while len(simulation.step().decoding) < 2:
        pass
    online = make(2)
    simulation.scheduler.add(online)
    simulation.step()
    (aside,) = [each for each in copies if each.is_set_aside]
    (paused,) = [each for each in copies if each is not aside]
    simulation.scheduler.release(online)
    simulation.scheduler.cancel(paused)
    assert simulation.step().decoding == (aside,)
    simulation.step()  # `check` compares what it reads from now on, too


def test_what_main_memory_has_no_room_for_gives_up() -> None:
    simulation = Simulation(slots=2, max_saved_tokens=5)
    batch = [in_background(make(3)), in_background(make(3))]
    for sequence in batch:
        simulation.scheduler.add(sequence)
    while len(simulation.step().decoding) < 2:
        pass
    for _ in range(2):
        simulation.scheduler.add(make(2))
    simulation.step()
    simulation.step()
    kept = [sequence for sequence in batch if sequence.is_set_aside]
    (lost,) = simulation.scheduler.take_preempted()
    assert [lost, *kept] in ([batch[0], batch[1]], [batch[1], batch[0]])
    assert lost.state is State.ENDED
    simulation.scheduler.cancel(kept[0])  # while it is set aside
    assert kept[0].state is State.ENDED
    assert kept[0].saved is None


OPERATIONS = st.one_of(
    st.tuples(st.just("arrive"), st.integers(1, 14)),
    st.tuples(st.just("arrive again"), st.integers(0, 30)),
    st.tuples(st.just("copies"), st.integers(1, 5)),
    st.tuples(st.just("arrive in the background"), st.integers(1, 14)),
    st.tuples(st.just("copies in the background"), st.integers(1, 3)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("finish"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 3)),
)


@settings(max_examples=150)
@given(
    slots=st.integers(1, 5),
    cache_bytes=st.sampled_from([None, 0, 64, 10**6]),
    joint_tokens=st.sampled_from([BLOCK, CHUNK]),
    max_saved_tokens=st.sampled_from([0, 12, 10**6]),
    operations=st.lists(OPERATIONS, max_size=60),
)
def test_any_course_of_events(
    slots: int,
    cache_bytes: int | None,
    joint_tokens: int,
    max_saved_tokens: int,
    operations: list[tuple[str, int]],
) -> None:
    """`Simulation.check` holds at every step, whoever comes and goes, and all get their turn."""
    if cache_bytes is None:
        simulation = Simulation(slots, joint_tokens=joint_tokens, max_saved_tokens=max_saved_tokens)
    else:
        simulation = prefix_simulation(slots, cache_bytes, joint_tokens, max_saved_tokens)
    scheduler = simulation.scheduler
    arrived: list[Sequence] = []
    ended: list[Sequence] = []

    def arrive(*sequences: Sequence) -> None:
        for sequence in sequences:
            arrived.append(sequence)
            scheduler.add(sequence)

    def finish(sequence: Sequence) -> None:
        scheduler.release(sequence)
        ended.append(sequence)

    for operation, number in operations:
        alive = [s for s in arrived if s.state is not State.ENDED and not s.cancelled]
        if operation == "arrive":
            arrive(make(number, priority=number % 3))
        elif operation == "arrive again" and arrived:
            arrive(Sequence(arrived[number % len(arrived)].prompt_ids.tolist(), PARAMS))
        elif operation == "copies":
            arrive(*make_copies(number, number))
        elif operation == "arrive in the background":
            arrive(in_background(make(number)))
        elif operation == "copies in the background":
            arrive(*map(in_background, make_copies(number, number)))
        elif operation == "step":
            for _ in range(number):
                simulation.step()
        elif operation == "cancel" and alive:
            victim = alive[number % len(alive)]
            scheduler.cancel(victim)
            ended.append(victim)
        elif operation == "finish":
            decoding = [s for s in alive if s.state is State.DECODING]
            if decoding:
                finish(decoding[number % len(decoding)])

    num_steps = 2 * (sum(sequence.num_prompt for sequence in arrived) + len(arrived))
    for _ in range(num_steps):
        simulation.step()
        for sequence in scheduler.running:
            if sequence.state is State.DECODING:
                finish(sequence)
    assert not scheduler.has_work
    preempted = scheduler.take_preempted()
    assert all(sequence.usage.background for sequence in preempted)
    ended += (sequence for sequence in preempted if sequence not in ended)
    assert len(ended) == len(arrived)
    assert set(ended) == set(arrived)
    assert {sequence.state for sequence in arrived} <= {State.ENDED}
