"""The Poisson schedule and the jobs: reproducible, of the right law, of varied length."""

import statistics
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtests.open_loop import poisson_schedule
from loadtests.texts import SCENARIOS, Kind, draw_jobs


@settings(max_examples=50)
@given(st.floats(0.1, 100), st.floats(0.1, 20), st.integers())
def test_a_schedule_ascends_within_the_duration(rate: float, duration: float, seed: int) -> None:
    schedule = poisson_schedule(rate, duration, seed)
    assert list(schedule) == sorted(schedule)
    assert all(0 <= time < duration for time in schedule)
    assert schedule == poisson_schedule(rate, duration, seed)


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    short, long = poisson_schedule(5, 10, 3), poisson_schedule(5, 100, 3)
    assert long[: len(short)] == short
    assert poisson_schedule(5, 10, 4) != short


def test_gaps_are_exponential_and_counts_are_poisson() -> None:
    rate, duration = 50.0, 400.0
    schedule = poisson_schedule(rate, duration, 0)
    gaps = [after - before for before, after in pairwise(schedule)]
    # Within four standard errors of what the law gives; the seed is fixed.
    assert abs(len(schedule) - rate * duration) < 4 * (rate * duration) ** 0.5
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05)
    assert sum(gap > 1 / rate for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.014)
    counts = Counter(int(time) for time in schedule)
    per_second = [counts[second] for second in range(int(duration))]
    assert statistics.variance(per_second) == pytest.approx(rate, rel=0.3)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_jobs_are_reproducible_and_vary_in_length(scenario: str) -> None:
    jobs = draw_jobs(scenario, 200, 1)
    assert jobs == draw_jobs(scenario, 200, 1)
    assert jobs != draw_jobs(scenario, 200, 2)
    lengths = [len(job.text.split()) for job in jobs]
    assert max(lengths) > 4 * min(lengths)
    expected = set(Kind) if scenario == "mixed" else {Kind(scenario)}
    assert {job.kind for job in jobs} == expected
    for job in jobs:
        assert job.text.count("[MASK]") == (job.kind is Kind.FILL_MASK)
