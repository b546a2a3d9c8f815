"""Report: what a run's samples add up to."""

import math
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from loadtests.runner import Run
from loadtests.samples import Failure, Kind, Sample


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for, as it stands in the report; times in seconds, ``rate`` per second."""

    url: str
    scenario: str
    model: str | None
    rate: float
    duration: float
    seed: int
    max_new_tokens: int
    timeout: float
    drain_timeout: float
    max_in_flight: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Some measured times, in milliseconds; percentiles are exact, from all ``count`` of them."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Latencies:
    """A kind of request; only those that succeeded are measured. Times in milliseconds.

    ``end_to_end`` and ``time_to_first_token`` count from the scheduled start. ``inter_token`` is
    the gaps between the tokens of a stream as the client got them (two in one packet: no gap).
    The last two are None for tasks that do not stream; each is None where nothing was measured.
    """

    requests: int
    succeeded: int
    end_to_end: Summary | None
    time_to_first_token: Summary | None
    inter_token: Summary | None


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """Failures alike in type and status, with one of their messages."""

    error_type: str
    status: int | None
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. Rates are per second.

    ``offered_rate`` is what was scheduled over the set duration; ``achieved_rate`` is what
    succeeded over ``elapsed`` seconds, to the last reply's end, as is ``tokens_per_second``.
    ``start_delay`` is how late requests were sent: what the load generator itself, or its
    bound on requests in flight, added to every latency.
    """

    settings: Settings
    machine: str
    requests: int
    succeeded: int
    failed: int
    elapsed: float
    offered_rate: float
    achieved_rate: float
    tokens: int
    tokens_per_second: float
    peak_in_flight: int
    start_delay: Summary | None
    kinds: dict[Kind, Latencies]
    errors: tuple[ErrorCount, ...]

    def as_json(self) -> dict[str, Any]:
        """The report as plain JSON values; times in ``*_ms`` fields are milliseconds."""
        document = asdict(self)
        document["start_delay_ms"] = document.pop("start_delay")
        for latencies in document["kinds"].values():
            for name in ("end_to_end", "time_to_first_token", "inter_token"):
                latencies[f"{name}_ms"] = latencies.pop(name)
        return document


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile of ascending values, linear between neighbours (numpy's default, type 7).

    Source: Hyndman and Fan, "Sample Quantiles in Statistical Packages", 1996.
    """
    if not ordered:
        raise ValueError("no values have no percentile")
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarize(seconds: Iterable[float]) -> Summary | None:
    """Seconds to a summary in milliseconds; None for none."""
    ordered = sorted(1000 * value for value in seconds)
    if not ordered:
        return None
    return Summary(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p99=percentile(ordered, 99),
        max=ordered[-1],
    )


def make_report(settings: Settings, run: Run) -> Report:
    """Adds a run's samples up."""
    samples = run.samples
    succeeded = [sample for sample in samples if sample.failure is None]
    tokens = sum(len(sample.tokens) for sample in succeeded)
    elapsed = max((sample.ended for sample in samples), default=0.0)
    return Report(
        settings=settings,
        machine=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        requests=len(samples),
        succeeded=len(succeeded),
        failed=len(samples) - len(succeeded),
        elapsed=elapsed,
        offered_rate=len(samples) / settings.duration,
        achieved_rate=len(succeeded) / elapsed if elapsed else 0.0,
        tokens=tokens,
        tokens_per_second=tokens / elapsed if elapsed else 0.0,
        peak_in_flight=run.peak_in_flight,
        start_delay=summarize(_each(samples, _start_delay)),
        kinds={
            kind: _latencies([sample for sample in samples if sample.kind is kind])
            for kind in Kind
            if any(sample.kind is kind for sample in samples)
        },
        errors=_count_errors(samples),
    )


def _latencies(samples: Sequence[Sample]) -> Latencies:
    succeeded = [sample for sample in samples if sample.failure is None]
    gaps = [after - before for s in succeeded for before, after in pairwise(s.tokens)]
    return Latencies(
        requests=len(samples),
        succeeded=len(succeeded),
        end_to_end=summarize(sample.ended - sample.intended for sample in succeeded),
        time_to_first_token=summarize(_each(succeeded, _time_to_first_token)),
        inter_token=summarize(gaps),
    )


def _each(samples: Iterable[Sample], measure: Callable[[Sample], float | None]) -> list[float]:
    measured = map(measure, samples)
    return [seconds for seconds in measured if seconds is not None]


def _start_delay(sample: Sample) -> float | None:
    return None if sample.sent is None else sample.sent - sample.intended


def _time_to_first_token(sample: Sample) -> float | None:
    return sample.tokens[0] - sample.intended if sample.tokens else None


def _count_errors(samples: Iterable[Sample]) -> tuple[ErrorCount, ...]:
    failures = [sample.failure for sample in samples if sample.failure is not None]
    examples: dict[tuple[str, int | None], Failure] = {}
    for failure in failures:
        examples.setdefault((failure.error_type, failure.status), failure)
    counts = Counter((failure.error_type, failure.status) for failure in failures)
    return tuple(
        ErrorCount(error_type, status, count, examples[error_type, status].message)
        for (error_type, status), count in counts.most_common()
    )
