"""The schedule of a run: when each request is meant to start, drawn before the first is sent."""

import random


def poisson_schedule(rate: float, duration: float, seed: int) -> tuple[float, ...]:
    """Start times in seconds from the run's start, ascending, all below ``duration``.

    A Poisson process of ``rate`` requests per second: the gaps are independent and exponential, as
    from many clients who know nothing of each other. The same seed gives the same schedule.
    """
    rng = random.Random(seed)
    times: list[float] = []
    time = rng.expovariate(rate)
    while time < duration:
        times.append(time)
        time += rng.expovariate(rate)
    return tuple(times)
