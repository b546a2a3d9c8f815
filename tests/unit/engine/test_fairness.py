"""Shares: whose turn it is, and what of a client is remembered."""

from maskdial.engine.fairness import ClientUsage, Shares, current_usage, usage_of_request


def test_the_one_served_least_is_first_and_equal_ones_take_turns() -> None:
    shares = Shares()
    shares.join("a", [])
    shares.join("b", ["a"])
    assert shares.first(["a", "b"]) == "a"
    assert shares.first(["a", "b"]) == "b", "a had the last turn"
    shares.charge("b", 2)
    shares.charge("a", 3)
    assert shares.first(["a", "b"]) == "b"


def test_a_client_that_comes_back_owes_what_it_was_served() -> None:
    shares = Shares()
    shares.join("a", [])
    shares.join("b", ["a"])
    shares.charge("a", 10)
    assert shares.first(["a", "b"]) == "b"
    shares.prune(["b"])
    shares.join("a", ["b"])
    for _ in range(9):
        assert shares.first(["a", "b"]) == "b"
        shares.charge("b", 1)
    shares.charge("b", 2)
    assert shares.first(["a", "b"]) == "a"


def test_a_new_client_does_not_catch_up() -> None:
    shares = Shares()
    shares.join("a", [])
    shares.charge("a", 10)
    shares.join("b", ["a"])
    assert shares.first(["a", "b"]) == "a"
    shares.charge("a", 1)
    assert shares.first(["a", "b"]) == "b"
    shares.charge("b", 2)
    assert shares.first(["a", "b"]) == "a"


def test_nobody_is_remembered_once_nobody_waits() -> None:
    shares = Shares()
    shares.join("a", [])
    shares.charge("a", 10)
    shares.prune([])
    shares.charge("a", 10)  # its last pass ends; it is not counted any more
    shares.join("b", [])
    shares.join("a", ["b"])
    assert shares.first(["a", "b"]) == "a"


def test_usage_is_that_of_the_request() -> None:
    assert current_usage() is not current_usage()
    usage = ClientUsage("a")
    token = usage_of_request.set(usage)
    assert current_usage() is usage
    usage_of_request.reset(token)
    assert current_usage().client == ""
