"""What a simulated run adds up to."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from loadtests.report import percentile
from loadtests.simulate.cluster import History
from loadtests.simulate.gaps import Gaps
from loadtests.simulate.request import Outcome


@dataclass(frozen=True, slots=True)
class Result:
    """The requests that arrived in a part of a run, when it is no longer starting.

    Rates are per second, times in milliseconds.

    Attributes:
        requests: how many there were.
        refused: the share of them that got 429.
        achieved: requests answered.
        tokens: tokens generated.
        first_p50, first_p99: from the arrival to the first token.
        whole_p50, whole_p99: from the arrival to the last token.
        hit_rate: share of the prompt tokens that a prefix cache had.
        cost: replica-hours per million generated tokens.
        mean_replicas, most_replicas: that there were, those that start or drain included.
    """

    requests: int
    refused: float
    achieved: float
    tokens: float
    first_p50: float
    first_p99: float
    whole_p50: float
    whole_p99: float
    hit_rate: float
    cost: float
    mean_replicas: float
    most_replicas: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What a simulation and what it simulates are compared by.

    ``achieved`` is per second; times are in milliseconds, those of the first token from the arrival
    of a request, those of gaps from one token of a text to the next.
    """

    achieved: float
    first_p50: float
    first_p99: float
    gap_p50: float
    gap_p99: float


@dataclass(slots=True)
class Observed:
    """Runs of the same kind, measured or simulated; times in seconds.

    Attributes:
        first: from the arrival of each request to its first token.
        gaps: from one token of a text to the next.
        seconds: from the start of each run to its last token, added up.
    """

    first: list[float] = field(default_factory=list)
    gaps: Gaps = field(default_factory=Gaps)
    seconds: float = 0.0

    def add(self, start: float, tokens: Sequence[float]) -> None:
        """A measured text: when it was to be sent, and when its tokens came."""
        self.first.append(tokens[0] - start)
        for before, after in pairwise(tokens):
            self.gaps.add(after - before, 1)

    def add_history(self, history: History) -> None:
        """A whole simulation."""
        self.first += [request.time_to_first_token for request in history.requests]
        self.gaps = Gaps.sum((self.gaps, history.gaps))
        self.seconds += max(request.ended for request in history.requests)

    def figures(self) -> Figures:
        """What they add up to; there has to be a request."""
        first = sorted(self.first)
        return Figures(
            len(first) / self.seconds,
            1e3 * percentile(first, 50),
            1e3 * percentile(first, 99),
            1e3 * self.gaps.percentile(50),
            1e3 * self.gaps.percentile(99),
        )


def summarize(history: History, start: float, end: float) -> Result:
    """The requests that arrived between two times, in seconds. One has to be answered."""
    requests = [request for request in history.requests if start <= request.arrived < end]
    answered = [request for request in requests if request.outcome is Outcome.ANSWERED]
    first = sorted(1e3 * request.time_to_first_token for request in answered)
    whole = sorted(1e3 * request.end_to_end for request in answered)
    # Throughput counts what ended in the window, whenever it arrived.
    done = [
        request.num_generated
        for request in history.requests
        if request.outcome is Outcome.ANSWERED and start <= request.ended < end
    ]
    seconds = history.replica_seconds(start, end)
    return Result(
        requests=len(requests),
        refused=1 - len(answered) / len(requests),
        achieved=len(done) / (end - start),
        tokens=sum(done) / (end - start),
        first_p50=percentile(first, 50),
        first_p99=percentile(first, 99),
        whole_p50=percentile(whole, 50),
        whole_p99=percentile(whole, 99),
        hit_rate=sum(r.num_cached for r in answered) / sum(r.num_prompt for r in answered),
        cost=seconds / 3600 / (sum(done) / 1e6),
        mean_replicas=seconds / (end - start),
        most_replicas=max(size for _, size in history.sizes),
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """One rate, measured and simulated with the same arrivals and prompts.

    Rates are per second, times in milliseconds; ``x_`` is the simulated value divided by the
    measured one; ``machine_load`` is the load average after the rate.
    """

    share: float
    offered: float
    requests: int
    achieved: float
    x_achieved: float
    first_p50_ms: float
    x_first_p50: float
    first_p99_ms: float
    x_first_p99: float
    gap_p50_ms: float
    x_gap_p50: float
    gap_p99_ms: float
    x_gap_p99: float
    machine_load: float

    @classmethod
    def of(
        cls,
        share: float,
        offered: float,
        requests: int,
        *,
        measured: Figures,
        simulated: Figures,
        machine_load: float,
    ) -> "Comparison":
        return cls(
            share=share,
            offered=offered,
            requests=requests,
            achieved=measured.achieved,
            x_achieved=simulated.achieved / measured.achieved,
            first_p50_ms=measured.first_p50,
            x_first_p50=simulated.first_p50 / measured.first_p50,
            first_p99_ms=measured.first_p99,
            x_first_p99=simulated.first_p99 / measured.first_p99,
            gap_p50_ms=measured.gap_p50,
            x_gap_p50=simulated.gap_p50 / measured.gap_p50,
            gap_p99_ms=measured.gap_p99,
            x_gap_p99=simulated.gap_p99 / measured.gap_p99,
            machine_load=machine_load,
        )

    @property
    def ratios(self) -> dict[str, float]:
        """The simulated values, as shares of the measured ones."""
        return {
            "throughput": self.x_achieved,
            "p50 of the first token": self.x_first_p50,
            "p99 of the first token": self.x_first_p99,
            "p50 of gaps": self.x_gap_p50,
            "p99 of gaps": self.x_gap_p99,
        }
