"""The simulation's questions about fleets of a fixed size, each a section of the report."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from loadtests.measurement import Section
from loadtests.report import percentile
from loadtests.simulate.cluster import Cluster, Shape
from loadtests.simulate.replica import Limits
from loadtests.simulate.request import Outcome
from loadtests.simulate.router import POLICIES
from loadtests.simulate.step_times import StepTimes
from loadtests.simulate.workload import Workload

_SHARES = (0.5, 0.7, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4)
_SLOTS = (1, 2, 4, 8, 16)
_GATEWAY_MS = (0.0, 0.05, 0.2, 1.0, 12.0)
_NOTES = (
    "simulated, with the given step times; cost: replica-hours per million generated tokens; took: "
    "seconds of the simulation",
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What the sections vary.

    ``rate`` is in requests per second and replica; ``seconds`` are of load, the first half of which
    is not counted.
    """

    times: StepTimes
    shape: Shape
    workload: Workload
    rate: float
    seconds: float

    def changed(self, **shape: Any) -> "Scenario":
        """The scenario with another shape."""
        return replace(self, shape=replace(self.shape, **shape))


@dataclass(frozen=True, slots=True)
class Row:
    """One run, of which ``variant`` names what the section varies; rates are per second."""

    replicas: int
    variant: str
    requests: int
    refused_percent: float
    requests_per_s: float
    tokens_per_s: float
    first_token_p50_ms: float
    first_token_p99_ms: float
    p50_ms: float
    p99_ms: float
    hit_percent: float
    cost: float
    took_s: float


def capacity(times: StepTimes, limits: Limits, workload: Workload) -> float:
    """Requests per second of a replica whose slots are full and whose prefix cache is empty.

    The formula of ``docs/scaling.md``: 1 / (prefill + a step's share for each further token).
    """
    slots, generated, chunk = limits.slots, workload.generated.mean, limits.chunk_tokens
    num_prompt = round(workload.mean_prompt)
    prefill = sum(
        times.prefill_seconds(min(chunk, num_prompt - start), start)
        for start in range(0, num_prompt, chunk)
    )
    step = times.decode_seconds(slots, round(slots * (num_prompt + generated / 2)))
    return 1 / (prefill + (generated - 1) * step / slots)


def run(scenario: Scenario, variant: str) -> Row:
    """Simulates a scenario, and counts the requests that arrive in its second half."""
    started = time.perf_counter()
    shape, end = scenario.shape, scenario.seconds
    start = end / 2
    conversations = scenario.workload.conversations(scenario.rate * shape.replicas, end, shape.seed)
    sent = Cluster(shape, scenario.times).run(conversations)
    requests = [request for request in sent if start <= request.arrived]
    answered = [request for request in requests if request.outcome is Outcome.ANSWERED]
    first = sorted(1e3 * request.time_to_first_token for request in answered)
    whole = sorted(1e3 * request.end_to_end for request in answered)
    # Throughput counts what ended in the window, whenever it arrived.
    done = [
        request.num_generated
        for request in sent
        if request.outcome is Outcome.ANSWERED and start <= request.ended < end
    ]
    return Row(
        replicas=shape.replicas,
        variant=variant,
        requests=len(requests),
        refused_percent=100 * (1 - len(answered) / len(requests)),
        requests_per_s=len(done) / (end - start),
        tokens_per_s=sum(done) / (end - start),
        first_token_p50_ms=percentile(first, 50),
        first_token_p99_ms=percentile(first, 99),
        p50_ms=percentile(whole, 50),
        p99_ms=percentile(whole, 99),
        hit_percent=100 * sum(r.num_cached for r in answered) / sum(r.num_prompt for r in answered),
        cost=shape.replicas * (end - start) / 3600 / (sum(done) / 1e6),
        took_s=time.perf_counter() - started,
    )


Variants = Sequence[tuple[str, Scenario]]


def _load(scenario: Scenario) -> Variants:
    most = capacity(scenario.times, scenario.shape.limits, scenario.workload)
    return [
        (f"{share:.0%} of {most:.2f}/s", replace(scenario, rate=share * most)) for share in _SHARES
    ]


def _slots(scenario: Scenario) -> Variants:
    limits = scenario.shape.limits
    return [
        (f"{each} slots", scenario.changed(limits=replace(limits, slots=each))) for each in _SLOTS
    ]


def _routing(scenario: Scenario) -> Variants:
    return [(policy, scenario.changed(routing=policy)) for policy in POLICIES]


def _gateway(scenario: Scenario) -> Variants:
    return [
        (f"{milliseconds:g} ms", scenario.changed(gateway_seconds=milliseconds / 1e3))
        for milliseconds in _GATEWAY_MS
    ]


SECTIONS: dict[str, tuple[str, Callable[[Scenario], Variants]]] = {
    "load": (
        "latency against the load, as a share of what a replica without a prefix cache can do",
        _load,
    ),
    "slots": ("latency against slots, under the same load", _slots),
    "routing": ("latency and prefix hits by routing policy", _routing),
    "gateway": ("latency against a gateway's time per request", _gateway),
}
"""By name: the question of a section, and the variants that it compares."""


def section(name: str, scenario: Scenario, sizes: Sequence[int]) -> Section:
    """Simulates the variants of a section with so many replicas each."""
    question, variants = SECTIONS[name]
    rows = tuple(
        run(each.changed(replicas=number), variant)
        for number in sizes
        for variant, each in variants(scenario)
    )
    return Section(name, question, 1, rows, (), _NOTES)
