"""The arithmetic of decisions: options that exclude each other."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskdial.causal.decide import exclusive
from maskdial.causal.forced_tokens import ForcedTokens


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
        st.lists(st.integers(0, 3), max_size=4).map(tuple),
        st.floats(1e-6, 1),
        min_size=1,
        max_size=8,
    )
)
def test_shares_are_found_again_from_the_beginnings(shares: dict[tuple[int, ...], float]) -> None:
    begins = {
        option: math.fsum(
            share for other, share in shares.items() if other[: len(option)] == option
        )
        for option in shares
    }
    found = exclusive({option: math.log(value) for option, value in begins.items()})
    scale = max(begins.values())
    assert {option: scale * share for option, share in found.items()} == pytest.approx(
        shares, rel=1e-6, abs=1e-9
    )


def test_forced_tokens_leave_one_token_at_each_step() -> None:
    forced = ForcedTokens([3, 1], 5)
    for token in (3, 1):
        forced.prepare()
        assert forced.ready
        assert not forced.finished
        assert np.flatnonzero(forced.allowed()).tolist() == [token]
        forced.accept(token)
