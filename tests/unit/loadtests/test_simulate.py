"""`loadtests.simulate` against queueing theory, and against the server's scheduler and cache."""

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from loadtests.engine.steps import Row
from loadtests.simulate.cluster import Cluster, Gateway, Shape
from loadtests.simulate.prefix_cache import PrefixCache
from loadtests.simulate.replica import Limits
from loadtests.simulate.request import Outcome, Request
from loadtests.simulate.router import POLICIES
from loadtests.simulate.step_times import StepTimes
from loadtests.simulate.workload import Conversation, Length, Turn, Workload
from maskdial.causal.plan import Plan
from maskdial.causal.prefix_cache import PrefixCache as ServerCache
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.scheduler import Scheduler
from maskdial.causal.sequence import Sequence

TIMES = StepTimes(((1, 0.010), (8, 0.017)), 1e-6, ((16, 0.02), (256, 0.1)), 1e-7)
SHARED = replace(TIMES, beside=((1, 0.001), (4, 0.003)), block_tokens=16, packs=True)
LIMITS = Limits(slots=4, chunk_tokens=32)


def requests(
    starts: Iterable[float], num_prompt: int, generated: Iterable[int]
) -> list[Conversation]:
    """Conversations of one turn."""
    return [
        Conversation(number, start, number, 0, (Turn(0.0, num_prompt, num_generated),))
        for number, (start, num_generated) in enumerate(zip(starts, generated, strict=True))
    ]


def poisson(rate: float, number: int, seed: int = 0) -> list[float]:
    rng, now = random.Random(seed), 0.0
    return [now := now + rng.expovariate(rate) for _ in range(number)]


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def run_fleet(seed: int = 0, **shape: object) -> tuple[Request, ...]:
    workload = Workload(
        turns=3,
        prompt=Length(40, 1.0),
        generated=Length(30, 1.0),
        pause=2.0,
        num_instructions=64,
        num_kinds=5,
    )
    given: dict[str, object] = {
        "replicas": 4,
        "limits": Limits(slots=4, chunk_tokens=32, prefix_cache_tokens=10_000),
        "seed": seed,
    }
    cluster = Cluster(Shape(**(given | shape)), TIMES)  # type: ignore[arg-type]
    return cluster.run(workload.conversations(12.0, 60.0, seed))


# Queueing theory


def test_waiting_is_that_of_an_m_d_1_queue() -> None:
    service, load = 0.1, 0.8
    times = StepTimes(((1, 0.0),), 0.0, ((1, service),), 0.0)
    arrivals = requests(poisson(load / service, 40_000), 8, [1] * 40_000)
    history = Cluster(Shape(limits=Limits(slots=1)), times).run(arrivals)
    waiting = mean(request.end_to_end - service for request in history)
    # Pollaczek and Khinchine, of a constant service time.
    assert waiting == pytest.approx(load * service / (2 * (1 - load)), rel=0.05)


def test_time_in_system_is_that_of_an_m_m_1_queue() -> None:
    step, mean_service, load = 1e-4, 0.1, 0.7
    times = StepTimes(((1, step),), 0.0, ((1, 0.0),), 0.0)
    rng = random.Random(1)
    generated = [1 + round(rng.expovariate(1 / mean_service) / step) for _ in range(40_000)]
    arrivals = requests(poisson(load / mean_service, 40_000), 8, generated)
    history = Cluster(Shape(limits=Limits(slots=1)), times).run(arrivals)
    in_system = mean(request.end_to_end for request in history)
    assert in_system == pytest.approx(mean_service / (1 - load), rel=0.05)


def test_a_gateway_is_an_m_d_1_queue() -> None:
    seconds, load = 0.01, 0.8
    gateway = Gateway(seconds)
    delays = [gateway.delay(now) for now in poisson(load / seconds, 100_000)]
    assert mean(delays) == pytest.approx(seconds + load * seconds / (2 * (1 - load)), rel=0.05)


def test_little_s_law_holds_for_slots() -> None:
    """Requests in slots = arrival rate x time in them (Little 1961)."""
    history = run_fleet(replicas=1, limits=Limits(slots=64, chunk_tokens=32))
    end = max(request.ended for request in history)
    changes = sorted(
        [(request.arrived, 1) for request in history] + [(request.ended, -1) for request in history]
    )
    area = sum(
        (after - now) * sum(change for _, change in changes[: index + 1])
        for index, ((now, _), (after, _)) in enumerate(pairwise(changes))
    )
    rate = len(history) / end
    assert area / end == pytest.approx(rate * mean(r.end_to_end for r in history))


# The server's own scheduler


class Mute:
    """A detokenizer without a word."""

    special_ids: frozenset[int] = frozenset()

    def decoder(self, prompt_ids: object) -> "Mute":
        return self

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def seconds_of(plan: Plan, times: StepTimes) -> float:
    """A step of the scheduler, by the same step times."""
    rows, context = len(plan.decoding), sum(each.num_tokens - 1 for each in plan.decoding)
    if not plan.prefills:
        return times.decode_seconds(rows, context)
    tokens = times.read_tokens([each.num_tokens for each in plan.prefills])
    return times.mixed_seconds(rows, context, tokens, plan.prefills[0].start)


def run_scheduler(arrivals: list[Conversation], times: StepTimes) -> dict[int, tuple[float, float]]:
    """When each request had its first token and its end, if the server's scheduler decides."""
    scheduler = Scheduler(
        slots=LIMITS.slots,
        prefill_chunk_tokens=LIMITS.chunk_tokens,
        max_length=10_000,
        block_tokens=times.block_tokens,
        joint_tokens=times.block_tokens,
    )
    coming = {
        Sequence(
            [0] * request.turns[0].num_new,
            SamplingParams(max_new_tokens=request.turns[0].num_generated),
        ): request
        for request in arrivals
    }
    waiting = list(coming)
    first: dict[int, float] = {}
    ended: dict[int, float] = {}
    now = 0.0
    while waiting or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, coming[waiting[0]].start)
        while waiting and coming[waiting[0]].start <= now:
            scheduler.add(waiting.pop(0))
        plan = scheduler.schedule()
        now += seconds_of(plan, times)
        given = [*plan.decoding, *(p.sequence for p in plan.prefills if p.is_last)]
        for sequence in given:
            sequence.accept(
                1, 0.0, detokenizer=Mute(), eos_token_ids=frozenset(), max_length=10_000
            )
            first.setdefault(coming[sequence].number, now)
        scheduler.advance(plan)
        for sequence in given:
            if sequence.finish_reason is not None:
                ended[coming[sequence].number] = now
                scheduler.release(sequence)
    return {number: (first[number], ended[number]) for number in first}


@pytest.mark.parametrize("rate", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("times", [TIMES, SHARED], ids=["a pass each", "shared passes"])
def test_a_replica_runs_requests_as_the_server_s_scheduler_does(
    rate: float, times: StepTimes
) -> None:
    rng = random.Random(round(rate))
    arrivals = [
        Conversation(number, start, number, 0, (Turn(0.0, rng.randint(2, 40), rng.randint(1, 60)),))
        for number, start in enumerate(poisson(rate, 150, seed=2))
    ]
    history = Cluster(Shape(limits=LIMITS), times).run(arrivals)
    expected = run_scheduler(arrivals, times)
    assert len(expected) == len(history) == 150
    for request in history:
        found = (request.first_token, request.ended)
        assert found == pytest.approx(expected[request.conversation], rel=1e-9)


def test_short_prompts_that_wait_together_are_read_together() -> None:
    times = StepTimes(((1, 0.01),), 0.0, ((1, 0.1),), 0.0, block_tokens=16)

    def first_tokens(num_prompt: int) -> list[float]:
        """Of three prompts that come while another is read."""
        arrivals = requests([0.0, 0.05, 0.05, 0.05], num_prompt, [1, 2, 2, 2])
        found = Cluster(Shape(limits=LIMITS), times).run(arrivals)
        return [request.first_token for request in found[1:]]

    assert first_tokens(8) == pytest.approx([0.2, 0.2, 0.2])
    assert first_tokens(17) == pytest.approx([0.2, 0.31, 0.42])


def test_the_cache_finds_what_the_server_s_finds() -> None:
    rng = random.Random(0)
    cache = PrefixCache(block_tokens=4, max_tokens=10**9)
    server = ServerCache(model="m", block_tokens=4, max_bytes=10**9)
    lengths: dict[int, int] = {}
    for _ in range(300):
        kind, conversation = rng.randrange(3), rng.randrange(30)
        shared = 10 + kind
        conversation = 3 * conversation + kind
        number = lengths[conversation] = lengths.get(conversation, shared) + rng.randint(1, 9)
        tokens = [-kind] * shared + [1 + conversation] * (number - shared)
        request = Request(conversation, kind, shared, number, 1, 0.0)
        keys = server.keys(np.array(tokens, np.int64), "")
        assert cache.match(request) == 4 * len(server.match(keys[: (number - 2) // 4]))
        cache.put(request)
        for key in keys:
            server.put(key, np.zeros(4, np.int8))
    assert cache.num_tokens == server.num_bytes


def test_the_cache_forgets_what_was_not_used_for_longest() -> None:
    cache = PrefixCache(block_tokens=1, max_tokens=20)
    first, second, third = (Request(number, 0, 4, 12, 1, 0.0) for number in range(3))
    cache.put(first)
    cache.put(second)
    assert (cache.num_tokens, cache.match(first)) == (20, 10)
    cache.put(third)
    assert [cache.match(each) for each in (first, second, third)] == [10, 4, 10]


# Step times


def row(kind: str, rows: int, tokens: int, context: int, mean_ms: float) -> Row:
    return Row(kind, rows, tokens, context, mean_ms, mean_ms, 1)


def test_step_times_are_read_off_the_measured_rows() -> None:
    rows = [
        row("decode", 1, 1, 50, 10.05),
        row("decode", 4, 1, 50, 13.2),
        row("decode", 4, 1, 100, 13.4),
        row("prefill", 1, 64, 0, 30.0),
        row("prefill", 1, 128, 0, 50.0),
        row("prefill", 1, 128, 100, 51.28),
        row("mixed", 2, 64, 50, 33.2),
        row("mixed", 2, 128, 50, 53.2),
    ]
    times = StepTimes.from_rows(rows, block_tokens=16, packs=True)
    for each in rows[:3]:
        seconds = times.decode_seconds(each.rows, each.rows * each.context)
        assert seconds == pytest.approx(each.mean_ms / 1e3)
    for each in rows[3:6]:
        seconds = times.prefill_seconds(each.tokens, each.context)
        assert seconds == pytest.approx(each.mean_ms / 1e3)
    assert times.prefill_seconds(96) == pytest.approx(0.040)
    for each in rows[6:]:
        seconds = times.mixed_seconds(each.rows, each.rows * each.context, each.tokens)
        assert seconds == pytest.approx(each.mean_ms / 1e3)
    # Of one row, half of what two add, and its context.
    assert times.mixed_seconds(1, 50, 64) == pytest.approx(0.0316)
    assert times.mixed_seconds(0, 0, 64) == pytest.approx(0.030)


def test_without_shared_passes_a_step_that_reads_takes_a_decode_step_more() -> None:
    both = TIMES.decode_seconds(3, 100) + TIMES.prefill_seconds(40, 64)
    assert TIMES.mixed_seconds(3, 100, 40, 64) == pytest.approx(both)
    assert (TIMES.read_tokens([3, 9]), SHARED.read_tokens([3, 9])) == (18, 12)


# What requests cost besides their steps


@pytest.mark.parametrize("per_token", [0.0, 1e-6])
def test_a_run_of_steps_is_as_long_as_its_steps(per_token: float) -> None:
    times = StepTimes(((1, 0.01), (3, 0.02)), per_token, ((1, 0.0),), 0.0)
    singly = [times.decode_seconds(3, 100 + 3 * step) for step in range(50)]
    assert times.decode_seconds(3, 100, 50) == pytest.approx(sum(singly))
    for steps in (0, 1, 17, 50):
        seconds = times.decode_seconds(3, 100, steps)
        assert times.decode_steps(3, 100, seconds - 1e-9) == steps
        assert times.decode_steps(3, 100, seconds + 1e-9) == steps + 1


# Fleets


@pytest.mark.parametrize("routing", POLICIES)
def test_every_request_has_one_outcome_and_seeds_repeat_runs(routing: str) -> None:
    limits = Limits(slots=2, max_queue=3, chunk_tokens=32, prefix_cache_tokens=1000)
    first, second = (run_fleet(routing=routing, limits=limits, replicas=2) for _ in range(2))
    outcomes = [request.outcome for request in first]
    assert set(outcomes) == {Outcome.ANSWERED, Outcome.REFUSED}
    assert [(r.arrived, r.ended, r.outcome) for r in first] == [
        (r.arrived, r.ended, r.outcome) for r in second
    ]
    for request in first:
        assert request.ended >= request.arrived
        if request.outcome is Outcome.ANSWERED:
            assert request.arrived < request.first_token <= request.ended


def test_other_seeds_are_other_runs() -> None:
    assert run_fleet(0)[0].arrived != run_fleet(1)[0].arrived


def test_the_least_waiting_replica_is_no_worse_than_any() -> None:
    waits = {
        routing: mean(r.time_to_first_token for r in run_fleet(routing=routing))
        for routing in ("random", "two-choices", "least-waiting")
    }
    assert waits["least-waiting"] <= waits["two-choices"] <= waits["random"]


def test_affinity_finds_more_in_the_caches() -> None:
    def hit_rate(routing: str) -> float:
        found = run_fleet(routing=routing, replicas=8)
        return sum(r.num_cached for r in found) / sum(r.num_prompt for r in found)

    assert hit_rate("random") < hit_rate("prefix") < hit_rate("session")
