"""What a simulated run adds up to."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadtests.report import percentile
from loadtests.simulate.cluster import History
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
    """What a simulation and what it simulates are compared by; times in milliseconds."""

    achieved: float
    p50: float
    p99: float
    first_p99: float

    @classmethod
    def of(cls, requests: Sequence[tuple[float, float, float]]) -> "Figures":
        """Each request is (arrival, first token, end), in seconds since the start."""
        first = sorted(1e3 * (first - arrived) for arrived, first, _ in requests)
        whole = sorted(1e3 * (ended - arrived) for arrived, _, ended in requests)
        return cls(
            len(requests) / max(ended for _, _, ended in requests),
            percentile(whole, 50),
            percentile(whole, 99),
            percentile(first, 99),
        )

    @classmethod
    def of_history(cls, history: History) -> "Figures":
        """Those of a simulation."""
        return cls.of([(r.arrived, r.first_token, r.ended) for r in history.requests])


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
    p50_ms: float
    x_p50: float
    p99_ms: float
    x_p99: float
    first_token_p99_ms: float
    x_first_token_p99: float
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
            p50_ms=measured.p50,
            x_p50=simulated.p50 / measured.p50,
            p99_ms=measured.p99,
            x_p99=simulated.p99 / measured.p99,
            first_token_p99_ms=measured.first_p99,
            x_first_token_p99=simulated.first_p99 / measured.first_p99,
            machine_load=machine_load,
        )
