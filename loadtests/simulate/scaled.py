"""Autoscaling under a load that multiplies: which targets keep the first token in time?"""

from dataclasses import dataclass, replace
from statistics import fmean

from loadtests.measurement import Section, median
from loadtests.simulate.autoscaler import Scaling
from loadtests.simulate.cluster import Cluster
from loadtests.simulate.fleets import Scenario
from loadtests.simulate.results import Result, summarize

_CALM, _PEAK = 2, 8
"""How many replicas the load is enough for at first, and then."""

_CALM_SECONDS, _PEAK_SECONDS, _RISE_SECONDS = 300.0, 1200.0, 600.0
_TARGETS: tuple[tuple[float, float | None], ...] = (
    *((waiting, None) for waiting in (2.0, 4.0, 16.0)),
    *((16.0, running) for running in (4.0, 5.0, 6.0, 7.0)),
    *((waiting, 4.0) for waiting in (2.0, 4.0, 8.0)),
)
_DELAYS = (10.0, 120.0)
_NUM_SEEDS = 4
_NOTES = (
    "simulated; the load is that of 2 replicas at the given share of their capacity, and then of "
    "8, at once (step) or within ten minutes (ramp)",
    "rise: from there until ten minutes after it is high, peak: the ten minutes after that, fall: "
    "twenty minutes after it is low again; most: replicas at once, of at most 24",
    "p99: of the time to first token, the median and the worst of four runs; replicas are means",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One pair of targets and one load; ``start_s`` is how long a replica takes to start.

    ``peak_replicas`` is the mean number while the load is high, ``fall_replicas`` after it.
    """

    load: str
    waiting: float
    running: float | None
    start_s: float
    refused_percent: float
    rise_p99_ms: float
    rise_worst_ms: float
    peak_p99_ms: float
    peak_worst_ms: float
    fall_worst_ms: float
    peak_replicas: float
    fall_replicas: float
    most: int


@dataclass(frozen=True, slots=True)
class Phases:
    """One run: while and after the load rises, while it is high, and after it."""

    rise: Result
    peak: Result
    fall: Result

    @property
    def refused(self) -> float:
        """Share of the requests until the load falls."""
        both = (self.rise, self.peak)
        return sum(r.refused * r.requests for r in both) / sum(r.requests for r in both)


def autoscaling(scenario: Scenario) -> Section:
    """Compares targets of waiting and running requests per replica, and start-up delays."""
    default = Scaling(most=3 * _PEAK)
    cases = [replace(default, waiting=waiting, running=running) for waiting, running in _TARGETS]
    cases += [replace(default, start_delay=delay) for delay in _DELAYS]
    rows = tuple(_row(scenario, case, rise) for rise in (0.0, _RISE_SECONDS) for case in cases)
    question = "time to first token while the load grows fourfold, by the autoscaler's targets"
    return Section("autoscaling", question, _NUM_SEEDS, rows, (), _NOTES)


def _row(scenario: Scenario, scaling: Scaling, rise: float) -> Row:
    seeds = range(scenario.seed, scenario.seed + _NUM_SEEDS)
    runs = [_run(replace(scenario, seed=seed), scaling, rise) for seed in seeds]
    return Row(
        load="ramp" if rise else "step",
        waiting=scaling.waiting,
        running=scaling.running,
        start_s=scaling.start_delay,
        refused_percent=100 * fmean(run.refused for run in runs),
        rise_p99_ms=median(run.rise.first_p99 for run in runs),
        rise_worst_ms=max(run.rise.first_p99 for run in runs),
        peak_p99_ms=median(run.peak.first_p99 for run in runs),
        peak_worst_ms=max(run.peak.first_p99 for run in runs),
        fall_worst_ms=max(run.fall.first_p99 for run in runs),
        peak_replicas=fmean(run.peak.mean_replicas for run in runs),
        fall_replicas=fmean(run.fall.mean_replicas for run in runs),
        most=max(run.rise.most_replicas for run in runs),
    )


def _run(scenario: Scenario, scaling: Scaling, rise: float) -> Phases:
    low, high = _CALM * scenario.rate, _PEAK * scenario.rate
    start = _CALM_SECONDS
    end = start + rise + _PEAK_SECONDS

    def rate(now: float) -> float:
        if not start <= now < end:
            return low
        return high if now >= start + rise else low + (high - low) * (now - start) / rise

    shape = replace(scenario.shape, replicas=_CALM, scaling=scaling, seed=scenario.seed)
    sent = scenario.workload.conversations(rate, high, end + _PEAK_SECONDS, scenario.seed)
    history = Cluster(shape, scenario.times).run(sent)
    middle = start + rise + _PEAK_SECONDS / 2
    return Phases(
        rise=summarize(history, start, middle),
        peak=summarize(history, middle, end),
        fall=summarize(history, end, end + _PEAK_SECONDS),
    )
