"""`loadtests.decisions`: what a request has, and what the rounds say."""

import random

import pytest

from loadtests.decisions import _request, summarize


def test_ratios_are_taken_within_a_round() -> None:
    row = summarize("pipeline", 4, [1.0, 6.0, 4.0], [0.5, 2.0, 1.0])
    assert row.times_ours == 3
    assert row.p50_ms == 4000
    assert row.p99_ms == pytest.approx(5960)
    assert row.requests_per_second == pytest.approx(3 / 11)
    assert row.rounds == 3


def test_each_request_has_a_new_text_and_options_of_their_own() -> None:
    rng = random.Random(0)
    first, second = (_request(rng, [" ab", " bc", " cd"], 12, 3) for _ in range(2))
    assert first[0] != second[0]
    assert len(first[0].split()) == 12
    assert [each.name for each in first[1]] == ["0", "1", "2"]
    for question in first[1]:
        assert len({option.text for option in question.options}) == 4
