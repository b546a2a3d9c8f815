"""The arithmetic of decisions: options that exclude each other."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskdial.causal.grammar.forced import ForcedTokens
from maskdial.requests.decisions_causal import exclusive


def test_options_that_part_at_once_keep_their_probabilities() -> None:
    found = exclusive({(1,): math.log(0.2), (2, 3): math.log(0.1)})
    assert found == pytest.approx({(1,): 1.0, (2, 3): 0.5})


def test_a_beginning_stands_for_answers_that_do_not_go_on() -> None:
    # "new" 0.8, of which "new york" 0.6, of which "new york city" 0.5; "old" 0.2.
    found = exclusive(
        {
            (1,): math.log(0.8),
            (1, 2): math.log(0.6),
            (1, 2, 3): math.log(0.5),
            (4,): math.log(0.2),
        }
    )
    assert {option: 0.8 * share for option, share in found.items()} == pytest.approx(
        {(1,): 0.2, (1, 2): 0.1, (1, 2, 3): 0.5, (4,): 0.2}
    )


def test_an_option_without_tokens_of_its_own_is_the_rest() -> None:
    found = exclusive({(): 0.0, (5,): math.log(0.3)})
    assert found == pytest.approx({(): 0.7, (5,): 0.3})


@given(
    st.dictionaries(
        st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
        st.floats(-800, 0),
        min_size=1,
        max_size=8,
    )
)
def test_shares_are_never_negative_and_never_all_zero(steps: dict[tuple[int, ...], float]) -> None:
    # A longer beginning is less likely than each that it begins with.
    logprobs = {
        option: sum(value for other, value in steps.items() if option[: len(other)] == other)
        for option in steps
    }
    shares = exclusive(logprobs)
    assert all(share >= 0 for share in shares.values())
    roots = [
        math.exp(value - max(logprobs.values()))
        for option, value in logprobs.items()
        if not any(option[:n] in logprobs for n in range(len(option)))
    ]
    assert sum(shares.values()) == pytest.approx(sum(roots), rel=1e-9)
    assert sum(shares.values()) > 0


def test_forced_tokens_leave_one_token_at_each_step() -> None:
    forced = ForcedTokens([3, 1], 5)
    for token in (3, 1):
        forced.prepare()
        assert forced.ready
        assert not forced.finished
        assert np.flatnonzero(forced.allowed()).tolist() == [token]
        forced.accept(token)
