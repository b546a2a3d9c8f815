"""Report: what the samples of an open-loop run add up to."""

import math
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from loadtests.open_loop import Failure, Run, Sample
from loadtests.texts import Kind


@dataclass(frozen=True, slots=True)
class Summary:
    """Measured times in milliseconds. Percentiles are exact, taken over all ``count`` values."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Latencies:
    """The successful requests of one kind; times in milliseconds.

    ``end_to_end`` and ``time_to_first_token`` count from the scheduled start. ``inter_token`` holds
    the gaps between the tokens of a stream as the client received them; tokens that arrive in one
    packet have no gap between them. Tasks that do not stream leave the last two None, and each is
    None if nothing was measured.
    """

    requests: int
    succeeded: int
    end_to_end: Summary | None
    time_to_first_token: Summary | None
    inter_token: Summary | None


@dataclass(frozen=True, slots=True)
class ErrorCount:
    """Failures of the same type and status, with one message as an example."""

    error_type: str
    status: int | None
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Report:
    """One run; rates are per second.

    ``offered_rate`` is what the schedule asked for over the configured duration. ``achieved_rate``
    and ``tokens_per_second`` count successful requests until the end of the last reply, ``elapsed``
    seconds after the start. ``start_delay`` is how late requests were sent: the part of every
    latency that comes from the load generator itself or from its limit on requests in flight.
    """

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
        """The report as JSON values; fields that end in ``_ms`` are milliseconds."""
        document = asdict(self)
        document["start_delay_ms"] = document.pop("start_delay")
        for latencies in document["kinds"].values():
            for name in ("end_to_end", "time_to_first_token", "inter_token"):
                latencies[f"{name}_ms"] = latencies.pop(name)
        return document


def percentile(values: Iterable[float], percent: float) -> float:
    """The percentile of values, interpolated linearly; NaN without values."""
    ordered = np.fromiter(values, np.float64)
    return float(np.percentile(ordered, percent)) if ordered.size else math.nan


def summarize(seconds: Iterable[float]) -> Summary | None:
    """Summarizes times given in seconds, in milliseconds; None if there are none."""
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


def make_report(duration: float, run: Run) -> Report:
    """Summarizes the samples of a run of so many seconds."""
    samples = run.samples
    succeeded = [sample for sample in samples if sample.failure is None]
    tokens = sum(len(sample.tokens) for sample in succeeded)
    elapsed = max((sample.ended for sample in samples), default=0.0)
    return Report(
        machine=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        requests=len(samples),
        succeeded=len(succeeded),
        failed=len(samples) - len(succeeded),
        elapsed=elapsed,
        offered_rate=len(samples) / duration,
        achieved_rate=len(succeeded) / elapsed if elapsed else 0.0,
        tokens=tokens,
        tokens_per_second=tokens / elapsed if elapsed else 0.0,
        peak_in_flight=run.peak_in_flight,
        start_delay=summarize(s.sent - s.intended for s in samples if s.sent is not None),
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
        time_to_first_token=summarize(s.tokens[0] - s.intended for s in succeeded if s.tokens),
        inter_token=summarize(gaps),
    )


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
