"""Rounds: every entrant does every piece of work in turn, again and again."""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence

from loadtests.compare.entrants import Entrant
from loadtests.compare.work import Work
from loadtests.errors import LoadTestError

Times = dict[Work, dict[str, dict[int, float]]]
"""Seconds by work, name of the entrant and round."""


def take_rounds(
    entrants: Iterable[Entrant],
    run: Callable[[Entrant, Work], float],
    seconds: float,
    *,
    most: int | None = None,
    on_round: Callable[[int], None] = lambda _: None,
    on_failure: Callable[[Entrant, LoadTestError], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Goes round until the time is over.

    For each piece of work all entrants have their turn before the next piece, and each round begins
    with another entrant. An entrant that fails has no more turns. The first round warms up: of work
    measured again it is dropped.

    Args:
        entrants: who takes part.
        run: lets one do a piece of work, and returns its seconds.
        seconds: no piece of work begins later than this.
        most: rounds, the first included; None for as many as fit.
        on_round: told the number of each round that begins, from 0.
        on_failure: told of an entrant that failed.
        clock: seconds from any start.
    """
    playing = list(entrants)
    times: Times = {}
    deadline = clock() + seconds
    for number in range(most) if most is not None else itertools.count():
        if not playing or clock() >= deadline:
            break
        on_round(number)
        for work in dict.fromkeys(work for entrant in playing for work in entrant.work):
            if clock() >= deadline:
                break
            for entrant in _rotated([each for each in playing if work in each.work], number):
                try:
                    spent = run(entrant, work)
                except LoadTestError as error:
                    playing.remove(entrant)
                    on_failure(entrant, error)
                    continue
                times.setdefault(work, {}).setdefault(entrant.name, {})[number] = spent
    return {work: _without_warm_up(by_name) for work, by_name in times.items()}


def _rotated(entrants: Sequence[Entrant], number: int) -> list[Entrant]:
    first = number % len(entrants) if entrants else 0
    return [*entrants[first:], *entrants[:first]]


def _without_warm_up(by_name: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    return {
        name: {
            number: spent for number, spent in by_round.items() if number > 0 or len(by_round) == 1
        }
        for name, by_round in by_name.items()
    }
