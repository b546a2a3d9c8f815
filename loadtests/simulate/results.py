"""What a simulated run adds up to."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadtests.report import percentile
from loadtests.simulate.request import Outcome, Request


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


def summarize(sent: Sequence[Request], replicas: int, start: float, end: float) -> Result:
    """The requests that arrived between two times, in seconds. One has to be answered."""
    requests = [request for request in sent if start <= request.arrived < end]
    answered = [request for request in requests if request.outcome is Outcome.ANSWERED]
    first = sorted(1e3 * request.time_to_first_token for request in answered)
    whole = sorted(1e3 * request.end_to_end for request in answered)
    # Throughput counts what ended in the window, whenever it arrived.
    done = [
        request.num_generated
        for request in sent
        if request.outcome is Outcome.ANSWERED and start <= request.ended < end
    ]
    seconds = replicas * (end - start)
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
    )
