"""Room: what counts for whom, and when there is no more."""

import pytest

from maskdial.batches.room import LEAST_BYTES, Room, counted
from maskdial.errors import OverloadedError

LIMIT = 100 * LEAST_BYTES


def fill(room: Room, owner: str) -> int:
    """Takes as much as there is; returns how many things that are."""
    num = 0
    while True:
        try:
            room.check(owner, LEAST_BYTES)
        except OverloadedError:
            return num
        room.take(owner, LEAST_BYTES)
        num += 1


def alone() -> bool:
    return False


@pytest.mark.parametrize("owner", ["", "a"])
def test_a_single_owner_may_take_all_of_it(owner: str) -> None:
    """Without keys, and with one."""
    room = Room(LIMIT, alone)
    assert fill(room, owner) == 100
    with pytest.raises(OverloadedError, match="bytes together at most"):
        room.check(owner, 1)
    room.give_back(owner, LEAST_BYTES)
    assert fill(room, owner) == 1


def test_an_owner_that_is_joined_by_another_takes_no_more() -> None:
    names = ["a"]
    room = Room(LIMIT, lambda: len(names) > 1)
    for _ in range(70):
        room.take("a", LEAST_BYTES)
    room.check("a", LEAST_BYTES)
    names.append("b")
    with pytest.raises(OverloadedError, match="this key's files and batches would have"):
        room.check("a", LEAST_BYTES)
    assert fill(room, "b") == 15


def test_a_key_leaves_half_of_the_rest_to_others() -> None:
    room = Room(LIMIT, lambda: True)
    assert [fill(room, owner) for owner in ("a", "b", "c")] == [50, 25, 12]
    with pytest.raises(OverloadedError, match="this key's files and batches would have"):
        room.check("a", LEAST_BYTES)
    room.check("d", LEAST_BYTES)  # however many there are
    for _ in range(30):
        room.give_back("a", LEAST_BYTES)
    assert fill(room, "b") > 0


def test_what_is_received_counts_as_it_comes() -> None:
    room = Room(LIMIT, alone)
    with room.growing("") as first, room.growing("") as second:
        first.grow_to(LIMIT // 2)
        second.grow_to(LIMIT // 4)
        with pytest.raises(OverloadedError):
            second.grow_to(LIMIT // 2 + 1)
        assert (first.num_bytes, second.num_bytes) == (LIMIT // 2, LIMIT // 4)
    assert fill(room, "") == 100


def test_a_beginning_counts_as_a_file() -> None:
    room = Room(LIMIT, alone)
    held = [room.growing("") for _ in range(100)]
    for each in held:
        each.__enter__()
    with pytest.raises(OverloadedError), room.growing(""):
        pass
    for each in held:
        each.__exit__(None, None, None)
    assert fill(room, "") == 100


def test_records_weigh_more_than_files() -> None:
    assert counted(0) == counted(10) == counted(0, 1000) == LEAST_BYTES
    assert counted(2**20) == 2**20
    assert counted(0, 50_000) == 3_200_000
