"""The hidden states that wait for a head."""

import random

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.drafts.head import MAX_KEPT, _Kept


def rows(start: int, end: int, size: int = 2) -> NDArray[np.float32]:
    """Of each token from one position to another, its position."""
    return np.repeat(np.arange(start, end, dtype=np.float32)[:, None], size, axis=1)


def positions(kept: _Kept, count: int) -> list[int]:
    return [int(each) for each in kept.take(count)[:, 0]]


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


def test_they_are_those_of_a_plain_list() -> None:
    """Whatever is added, read again, dropped and taken, in pieces of all sizes."""
    rng = random.Random(3)
    for _ in range(30):
        kept, wanted, end = _Kept(), dict[int, int](), 0
        for number in range(200):
            start = max(end - rng.randint(0, 6), 0) + (70 if rng.random() < 0.02 else 0)
            if start > end:
                wanted.clear()
            end = start + rng.choice((1, 2, 5, 100))
            wanted = {each: value for each, value in wanted.items() if each < start}
            wanted |= dict.fromkeys(range(max(start, kept.start), end), number)
            kept.add(start, np.full((end - start, 3), number, np.float32))
            if rng.random() < 0.3 and kept.end > kept.start:
                count = rng.randint(1, kept.end - kept.start)
                taken = [wanted.pop(kept.start + i) for i in range(count)]
                assert positions(kept, count) == taken
        left = range(kept.start, kept.end)
        assert positions(kept, len(left)) == [wanted[each] for each in left]
