"""Turns: things to compare are measured one after the other, again and again.

What else the machine does then hits all of them alike, and medians over the rounds mean something.
"""

import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

K = TypeVar("K")
S = TypeVar("S")


async def take_turns(
    variants: Mapping[K, Callable[[], Awaitable[S]]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[K, list[S]]:
    """Measures every variant once a round, for as many rounds as fit into the seconds.

    The first round warms up: it is dropped where two more were made. Each round begins with
    another variant, so none always comes after the same one.

    Args:
        variants: what to call for one measurement, by name; at least one.
        seconds: no round begins that would end later, going by the longest so far.
        clock: seconds from any start.

    Returns:
        The measurements of each variant, one a round.
    """
    deadline = clock() + seconds
    names = list(variants)
    rounds: list[dict[K, S]] = []
    longest = 0.0
    while not rounds or clock() + longest <= deadline:
        started = clock()
        first = len(rounds) % len(names)
        samples = {name: await variants[name]() for name in names[first:] + names[:first]}
        rounds.append(samples)
        longest = max(longest, clock() - started)
    counted = rounds[1:] if len(rounds) > 2 else rounds
    return {name: [samples[name] for samples in counted] for name in names}


def median(values: Iterable[float]) -> float:
    """The median; 0 where nothing was measured."""
    ordered = list(values)
    return statistics.median(ordered) if ordered else 0.0


def median_ratio(above: Iterable[float], below: Iterable[float]) -> float:
    """The median of the rounds' own ratios: what slows a whole round down cancels out."""
    pairs = zip(above, below, strict=True)
    return median(a / b for a, b in pairs if b > 0)
