"""The scheduler alone, with a list per slot in the place of a cache."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskdial.causal.params import SamplingParams
from maskdial.causal.scheduler import Move, Plan, Scheduler
from maskdial.causal.sequence import Sequence, State
from maskdial.errors import OverloadedError

PARAMS = SamplingParams(max_new_tokens=4)


def make(num_prompt: int) -> Sequence:
    return Sequence(range(num_prompt), PARAMS)


class Simulation:
    """Runs plans against slots that remember which sequence wrote each position.

    A row that decodes out of turn writes ``None``, as the real pass writes a meaningless key.
    """

    def __init__(self, slots: int, chunk: int = 4, max_queue: int = 1000) -> None:
        self.scheduler = Scheduler(slots=slots, prefill_chunk_tokens=chunk, max_queue=max_queue)
        self.chunk = chunk
        self.cache: list[dict[int, Sequence | None]] = [{} for _ in range(slots)]
        self.num_sampled: dict[Sequence, int] = {}

    def step(self) -> Plan:
        """One iteration; returns its plan. Nothing finishes by itself."""
        plan = self.scheduler.schedule()
        for move in plan.moves:
            for position in range(move.num_tokens):
                self.cache[move.target][position] = self.cache[move.source][position]
        self.check(plan)
        for slot, sequence in enumerate(plan.rows):
            owner = sequence if slot in plan.decoding_rows else None
            self.cache[slot][sequence.num_computed] = owner
        if plan.prefill is not None:
            start, slot = plan.prefill.start, plan.prefill.slot
            for position in range(start, start + plan.prefill.num_tokens):
                self.cache[slot][position] = plan.prefill.sequence
        self.scheduler.advance(plan)
        sampled = list(plan.decoding)
        if plan.prefill is not None and plan.prefill.is_last:
            sampled.append(plan.prefill.sequence)
        for sequence in sampled:
            self.num_sampled[sequence] = self.num_sampled.get(sequence, 0) + 1
        return plan

    def check(self, plan: Plan) -> None:
        """What holds for every plan."""
        running = self.scheduler.running
        assert len({sequence.slot for sequence in running}) == len(running)
        assert [sequence.slot for sequence in plan.rows] == list(range(len(plan.rows)))
        assert len(plan.rows) - len(plan.decoding) <= 1
        decoding = [sequence for sequence in running if sequence.state is State.DECODING]
        assert list(plan.decoding) == decoding
        if plan.prefill is not None:
            prefill = plan.prefill
            assert prefill.sequence.state is State.PREFILLING
            assert prefill.slot == prefill.sequence.slot
            assert prefill.start == prefill.sequence.num_computed
            assert 1 <= prefill.num_tokens <= self.chunk + 1
            assert prefill.num_tokens > 1 or prefill.sequence.num_prompt == 1
            assert prefill.start % self.chunk == 0
            assert prefill.start + prefill.num_tokens <= prefill.sequence.num_prompt
        for sequence in running:
            written = [self.cache[sequence.slot].get(i) for i in range(sequence.num_computed)]
            assert written == [sequence] * sequence.num_computed


def test_prompts_are_read_in_chunks_one_at_a_time_in_order() -> None:
    simulation = Simulation(slots=3)
    first, second = make(10), make(3)
    simulation.scheduler.add(first)
    simulation.scheduler.add(second)
    chunks = [simulation.step().prefill for _ in range(4)]
    assert [(c.sequence, c.start, c.num_tokens) for c in chunks if c is not None] == [
        (first, 0, 4),
        (first, 4, 4),
        (first, 8, 2),
        (second, 0, 3),
    ]


def test_a_last_chunk_is_never_a_single_token() -> None:
    simulation = Simulation(slots=1)
    simulation.scheduler.add(make(9))
    chunks = [simulation.step().prefill for _ in range(2)]
    assert [c.num_tokens for c in chunks if c is not None] == [4, 5]


def test_a_long_prompt_leaves_every_step_to_the_others() -> None:
    simulation = Simulation(slots=4)
    streams = [make(2) for _ in range(3)]
    for sequence in streams:
        simulation.scheduler.add(sequence)
    while len(simulation.step().decoding) < 3:
        pass
    simulation.scheduler.add(make(40))
    before = [simulation.num_sampled[sequence] for sequence in streams]
    for _ in range(10):
        plan = simulation.step()
        assert plan.prefill is not None
    assert [simulation.num_sampled[s] - b for s, b in zip(streams, before, strict=True)] == [10] * 3


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
    assert plan == Plan((), (), (), None)
    assert simulation.scheduler.running == ()
    assert not simulation.scheduler.has_work


def test_a_full_queue_refuses() -> None:
    scheduler = Scheduler(slots=1, prefill_chunk_tokens=4, max_queue=2)
    scheduler.add(make(1))
    scheduler.add(make(1))
    with pytest.raises(OverloadedError):
        scheduler.add(make(1))
    scheduler.schedule()
    scheduler.add(make(1))


def test_clear_ends_everything() -> None:
    simulation, sequences = running_simulation(2, slots=2)
    queued = make(3)
    simulation.scheduler.add(queued)
    assert simulation.scheduler.clear() == (*sequences, queued)
    assert {sequence.state for sequence in (*sequences, queued)} == {State.ENDED}
    assert not simulation.scheduler.has_work


OPERATIONS = st.one_of(
    st.tuples(st.just("arrive"), st.integers(1, 14)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("finish"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 3)),
)


@settings(max_examples=150, deadline=None)
@given(slots=st.integers(1, 5), operations=st.lists(OPERATIONS, max_size=60))
def test_any_course_of_events(slots: int, operations: list[tuple[str, int]]) -> None:
    """`Simulation.check` holds at every step, whoever comes and goes, and all get their turn."""
    simulation = Simulation(slots)
    scheduler = simulation.scheduler
    arrived: list[Sequence] = []
    started: list[Sequence] = []
    ended: list[Sequence] = []

    def finish(sequence: Sequence) -> None:
        scheduler.release(sequence)
        ended.append(sequence)

    def step() -> None:
        plan = simulation.step()
        if plan.prefill is not None and plan.prefill.start == 0:
            started.append(plan.prefill.sequence)

    for operation, number in operations:
        if operation == "arrive":
            arrived.append(make(number))
            scheduler.add(arrived[-1])
        elif operation == "step":
            for _ in range(number):
                step()
        elif operation == "cancel":
            alive = [s for s in arrived if s.state is not State.ENDED and not s.cancelled]
            if alive:
                victim = alive[number % len(alive)]
                scheduler.cancel(victim)
                ended.append(victim)
        else:
            decoding = [
                s for s in scheduler.running if s.state is State.DECODING and not s.cancelled
            ]
            if decoding:
                finish(decoding[number % len(decoding)])

    num_chunks = sum(sequence.num_prompt for sequence in arrived) + len(arrived)
    for _ in range(num_chunks):
        step()
        for sequence in scheduler.running:
            if sequence.state is State.DECODING:
                finish(sequence)
    assert not scheduler.has_work
    assert len(ended) == len(arrived)
    assert set(ended) == set(arrived)
    assert {sequence.state for sequence in arrived} <= {State.ENDED}
    assert started == [sequence for sequence in arrived if sequence in started], "first come first"
