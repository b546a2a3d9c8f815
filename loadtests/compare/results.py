"""Results: the rounds' times as medians and ratios, and what was wanted of them."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from loadtests.compare.entrants import ENGINE, HTTP, MEMORY
from loadtests.compare.rounds import Times
from loadtests.compare.work import SHORT_CONTEXT, Family, Work


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the rounds."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        """None where there are no values."""
        ordered = sorted(values)
        return cls(ordered[0], statistics.median(ordered), ordered[-1]) if ordered else None

    def as_json(self) -> dict[str, float]:
        return {"min": self.low, "median": self.median, "max": self.high}


@dataclass(frozen=True, slots=True)
class Result:
    """One entrant at one piece of work.

    Attributes:
        value: in the work's unit.
        faster: how many times as long it took as our engine, round by round; None for the engine
            itself, and where they had no round in common.
        rounds: how often it was measured.
    """

    work: Work
    entrant: str
    value: Spread
    faster: Spread | None
    rounds: int

    def as_json(self) -> dict[str, Any]:
        return {
            "work": self.work.as_json() | {"name": self.work.name},
            "entrant": self.entrant,
            "unit": self.work.unit,
            "value": self.value.as_json(),
            "times_our_engine": None if self.faster is None else self.faster.as_json(),
            "rounds": self.rounds,
        }


def results_of(times: Times) -> list[Result]:
    """In the order of the work, and of the entrants."""
    results = []
    for work, by_name in times.items():
        engine = by_name.get(ENGINE, {})
        for name, by_round in by_name.items():
            value = Spread.of(work.value(seconds) for seconds in by_round.values())
            assert value is not None, "an entrant without a time is not in the times"
            faster = None if name == ENGINE else _ratios(by_round, engine)
            results.append(Result(work, name, value, faster, len(by_round)))
    return results


def _ratios(theirs: Mapping[int, float], ours: Mapping[int, float]) -> Spread | None:
    return Spread.of(theirs[number] / ours[number] for number in theirs.keys() & ours.keys())


def memory_share(times: Times, num_bytes: int) -> Spread | None:
    """How much of the memory's speed our engine uses in a decode step alone; 1 is all of it.

    The limit is one reading of ``num_bytes`` of weights, as fast as the fastest of all rounds.
    """
    speeds = [
        work.value(seconds) * 1e9
        for work, by_name in times.items()
        for seconds in by_name.get(MEMORY, {}).values()
    ]
    steps = [
        seconds
        for work, by_name in times.items()
        if (work.kind, work.batch, work.length) == ("decode", 1, SHORT_CONTEXT)
        for seconds in by_name.get(ENGINE, {}).values()
    ]
    if not speeds:
        return None
    return Spread.of(num_bytes / max(speeds) / seconds for seconds in steps)


@dataclass(frozen=True, slots=True)
class Target:
    """What is wanted: the least ratio of an entrant's time to our engine's.

    ``entrant`` is the beginning of its name. ``batch`` 0 means every one.
    """

    family: Family
    entrant: str
    kind: str
    batch: int
    least: float

    def fits(self, family: Family, result: Result) -> bool:
        return (
            self.family == family
            and result.entrant.startswith(self.entrant)
            and result.work.kind == self.kind
            and self.batch in (0, result.work.batch)
        )


TARGETS = (
    Target("causal", "openvino", "prefill", 0, 1.15),
    Target("causal", "openvino", "decode", 1, 1.25),
    Target("causal", "openvino", "decode", 4, 1.15),
    Target("causal", "openvino", "decode", 8, 1.1),
    Target("causal", "llama.cpp", "decode", 0, 1.5),
    Target("masked", "openvino", "pass", 0, 1.2),
    Target("masked", "transformers", "pass", 0, 3.0),
)
LEAST_MEMORY_SHARE = 0.6
LEAST_HTTP_SHARE = 0.93
_HTTP_STREAMS = 8


def findings(
    family: Family, results: Iterable[Result], share: Spread | None
) -> list[tuple[str, str, str, bool]]:
    """What was measured, the figure, what was wanted, and whether it is met (by the median)."""
    rows = []
    for result in results:
        if result.faster is None:
            continue
        ratio, figure = result.faster.median, ratio_text(result.faster)
        for target in TARGETS:
            if target.fits(family, result):
                name = f"{result.work.name}, against {result.entrant}"
                rows.append((name, figure, f">= {target.least:.2f}x", ratio >= target.least))
        work = result.work
        if (result.entrant, work.kind, work.batch) == (HTTP, "decode", _HTTP_STREAMS):
            name = f"{work.name}: HTTP's share of the engine's speed"
            wanted = f">= {LEAST_HTTP_SHARE:.0%}"
            rows.append((name, f"{1 / ratio:.0%}", wanted, 1 / ratio >= LEAST_HTTP_SHARE))
    if share is not None:
        figure = f"{share.median:.0%} ({share.low:.0%} to {share.high:.0%})"
        met = share.median >= LEAST_MEMORY_SHARE
        name = "decode, batch 1: share of the memory's read bandwidth"
        rows.append((name, figure, f">= {LEAST_MEMORY_SHARE:.0%}", met))
    return rows


def ratio_text(ratio: Spread) -> str:
    return f"{ratio.median:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"
