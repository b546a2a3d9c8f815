"""The hidden states that wait for a head."""

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.drafts.head import MAX_KEPT, _Kept


def rows(start: int, end: int, size: int = 2) -> NDArray[np.float32]:
    """Of each token from one position to another, its position."""
    return np.repeat(np.arange(start, end, dtype=np.float32)[:, None], size, axis=1)


def positions(kept: _Kept, count: int) -> list[int]:
    taken = kept.take(count)
    return np.concatenate(taken)[:, 0].astype(int).tolist() if taken else []


def test_they_are_taken_in_order() -> None:
    kept = _Kept()
    kept.add(0, rows(0, 5))
    kept.add(5, rows(5, 6))
    assert positions(kept, 3) == [0, 1, 2]
    assert positions(kept, 0) == []
    assert positions(kept, 3) == [3, 4, 5]
    assert (kept.start, kept.end) == (6, 6)


def test_those_of_wrong_drafts_are_replaced() -> None:
    kept = _Kept()
    kept.add(0, rows(0, 4))
    kept.add(4, -rows(4, 9))
    kept.add(6, rows(6, 8))
    assert positions(kept, 8) == [0, 1, 2, 3, -4, -5, 6, 7]


def test_what_was_taken_is_not_taken_again() -> None:
    """Recurrent layers read right draft tokens a second time."""
    kept = _Kept()
    kept.add(0, rows(0, 6))
    kept.take(5)
    kept.add(3, rows(3, 8))
    assert positions(kept, 3) == [5, 6, 7]


def test_a_gap_drops_those_before_it() -> None:
    kept = _Kept()
    kept.add(0, rows(0, 6))
    kept.add(64, rows(64, 66))
    assert kept.start == 64
    assert positions(kept, 2) == [64, 65]


def test_the_oldest_are_dropped() -> None:
    kept = _Kept()
    kept.add(0, rows(0, MAX_KEPT))
    kept.add(MAX_KEPT, rows(MAX_KEPT, MAX_KEPT + 3))
    assert (kept.start, kept.end) == (3, MAX_KEPT + 3)
    assert positions(kept, 2) == [3, 4]
