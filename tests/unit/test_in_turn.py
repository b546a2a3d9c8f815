"""Parts of a matrix that are worked on ahead of their turn."""

import threading
import time
from collections.abc import Generator, Iterator

import pytest

from maskdial_export.direct import weights
from maskdial_export.direct.weights import in_turn


@pytest.fixture(autouse=True)
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "num_cores", lambda: 3)


def test_results_are_in_the_order_of_their_parts() -> None:
    def work(part: int) -> int:
        time.sleep(0.002 * (part % 3 == 0))  # the first of three ends last
        return part * part

    assert list(in_turn(work, range(20))) == [part * part for part in range(20)]
    assert list(in_turn(work, [])) == []


def test_no_more_parts_are_in_memory_than_threads_and_one() -> None:
    begun = 0

    def parts() -> Iterator[int]:
        nonlocal begun
        for part in range(50):
            begun += 1
            yield part

    for done, _ in enumerate(in_turn(lambda part: part, parts())):
        assert begun - done <= 4


def test_an_error_comes_in_its_turn_and_ends_the_threads() -> None:
    def work(part: int) -> int:
        if part == 2:
            raise ValueError("part 2")
        return part

    found = in_turn(work, range(10))
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(ValueError, match="part 2"):
        next(found)
    before = {thread.name for thread in threading.enumerate()}
    abandoned = in_turn(work, range(2))
    assert isinstance(abandoned, Generator)
    next(abandoned)
    abandoned.close()
    assert {thread.name for thread in threading.enumerate()} <= before
