"""The limits of one client: open requests, and tokens a minute."""

import asyncio

import pytest

from maskdial.config import Config
from maskdial.engine.fairness import current_usage
from maskdial.engine.life import Rate
from maskdial.errors import OverloadedError
from maskdial.http.limits import ClientLimits


class Clock:
    """In the place of a module's ``time``.

    Never in that of `time.monotonic` itself: event loops in other threads would plan by it, and
    stand still afterwards for as long as it was ahead.
    """

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("maskdial.http.limits.time", clock)
    monkeypatch.setattr("maskdial.engine.life.time", clock)
    return clock


def limits(**settings: int) -> ClientLimits:
    return ClientLimits(Config(**settings))


def use(limited: ClientLimits, client: str, tokens: int) -> None:
    with limited.admit(client) as usage:
        usage.tokens += tokens


def test_open_requests_are_counted_by_client() -> None:
    limited = limits(max_requests_per_client=2)
    with limited.admit("a"), limited.admit("b"), limited.admit("a"):
        with pytest.raises(OverloadedError, match=r"2 requests open; it may have 2"):
            use(limited, "a", 0)
        use(limited, "b", 0)
    use(limited, "a", 0)
    assert not limited._open


def test_a_request_that_fails_is_no_longer_open() -> None:
    limited = limits(max_requests_per_client=1)
    for _ in range(3):
        with pytest.raises(RuntimeError), limited.admit("a"):
            raise RuntimeError


def test_tokens_are_a_budget_that_refills(clock: Clock) -> None:
    limited = limits(max_tokens_per_minute=600)
    use(limited, "a", 599)
    use(limited, "a", 61)  # admitted with one token left; overdraws by 60
    for _ in range(2):  # a refusal costs nothing
        with pytest.raises(OverloadedError, match=r"600 tokens a minute.*in 7 s") as caught:
            use(limited, "a", 0)
        assert caught.value.retry_after == 7
    use(limited, "b", 10**6)
    clock.now += 5.9
    with pytest.raises(OverloadedError, match="in 1 s"):
        use(limited, "a", 0)
    clock.now += 0.2
    use(limited, "a", 1)


def test_a_budget_may_be_used_to_its_last_token(clock: Clock) -> None:
    limited = limits(max_tokens_per_minute=600)
    use(limited, "a", 600)
    with pytest.raises(OverloadedError, match="in 1 s"):
        use(limited, "a", 0)
    clock.now += 0.1
    use(limited, "a", 0)


def test_tokens_without_a_budget_are_not_counted() -> None:
    limited = limits()
    use(limited, "a", 5)
    assert not limited._full_at


def test_the_time_named_is_enough(clock: Clock) -> None:
    limited = limits(max_tokens_per_minute=100)
    for tokens in (1, 99, 100, 101, 12_345):
        use(limited, "a", tokens + 100)
        with pytest.raises(OverloadedError) as caught:
            use(limited, "a", 1)
        clock.now += caught.value.retry_after or 0
        use(limited, "a", 0)


def test_clients_whose_budget_is_full_are_forgotten(clock: Clock) -> None:
    limited = limits(max_tokens_per_minute=600)
    for number in range(5000):
        use(limited, f"address {number}", 10)
        clock.now += 0.1
    assert len(limited._full_at) < 2000


def test_the_usage_is_that_of_the_task() -> None:
    limited = limits()

    async def request(client: str) -> str:
        with limited.admit(client):
            await asyncio.sleep(0.001)
            return current_usage().client

    async def main() -> list[str]:
        return await asyncio.gather(*map(request, "abc"))

    assert asyncio.run(main()) == ["a", "b", "c"]
    assert current_usage().client == ""


def test_a_rate_estimates_how_long_a_queue_takes(clock: Clock) -> None:
    rate = Rate()
    assert rate.seconds_for(1000) == 1  # nothing is known yet
    for _ in range(600):
        clock.now += 0.1
        rate.add(5)
    assert rate.seconds_for(10) == 1
    assert rate.seconds_for(500) in (10, 11)
    assert rate.seconds_for(10**6) == 60
    clock.now += 3600
    assert rate.seconds_for(1) == 60
