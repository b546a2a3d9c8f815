"""The slope of a server's memory under one kind of request."""

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from loadtests.kinds import Kind, ask_kind
from loadtests.server import ServerProcess

_ROUNDS = 20
_WARM_ROUNDS = 5
_REQUESTS = 50
"""In each round of the warm-up; later ones have as many as their time allows."""
_SETTLE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Slope:
    """One kind of request. Memory is the resident set after a collection, without free memory.

    ``bytes_per_request`` and ``mb_per_hour`` are medians of the slopes between two samples each.
    """

    kind: str
    requests: int
    first_mb: float
    last_mb: float
    bytes_per_request: float
    mb_per_hour: float


def measure(server: ServerProcess, kind: Kind, seconds: float) -> Slope:
    """Asks one kind for so long, after 250 requests as a warm-up.

    Raises:
        LoadTestError: a reply had another status than the kind's, or did not come.
    """
    numbers = itertools.count()

    def ask(number: int) -> None:
        asyncio.run(ask_kind(server.port, kind, itertools.islice(numbers, number)))

    started = time.perf_counter()
    for _ in range(_WARM_ROUNDS):
        ask(_REQUESTS)
    rate = _WARM_ROUNDS * _REQUESTS / (time.perf_counter() - started)
    per_round = max(1, round(rate * seconds / _ROUNDS))
    samples: list[tuple[float, int, float]] = []  # seconds, requests, bytes
    for number in range(1 + _ROUNDS):
        time.sleep(_SETTLE_SECONDS)  # the last reply was read before its request ended
        _, held = server.collect()
        samples.append((time.perf_counter(), number * per_round, held))
        if number < _ROUNDS:
            ask(per_round)
    by_time = median_slope([(at, held) for at, _, held in samples])
    return Slope(
        kind.name,
        per_round * _ROUNDS,
        samples[0][2] / 1e6,
        samples[-1][2] / 1e6,
        median_slope([(sent, held) for _, sent, held in samples]),
        3600 * by_time / 1e6,
    )


def median_slope(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points (Theil and Sen)."""
    pairs = itertools.combinations(points, 2)
    return statistics.median((y - b) / (x - a) for (a, b), (x, y) in pairs if x > a)
