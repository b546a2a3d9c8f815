"""RetryPolicy and the Retry-After header, without a server."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskdial_client.errors import OverloadedError, UnavailableError, ValidationError
from maskdial_client.replies import retry_after_seconds
from maskdial_client.retry import RetryPolicy


@given(st.integers(0, 2), st.floats(0, 30), st.floats(0, 1))
def test_the_wait_is_never_shorter_than_retry_after(
    attempt: int, seconds: float, uniform: float
) -> None:
    policy = RetryPolicy(uniform=lambda: uniform)
    delay = policy.delay(attempt, OverloadedError("full", retry_after=seconds))
    assert delay is not None
    assert seconds <= delay <= 1.25 * seconds


@given(st.integers(0, 50), st.floats(0, 1))
def test_the_backoff_without_retry_after_is_bounded(attempt: int, uniform: float) -> None:
    policy = RetryPolicy(max_retries=51, first_delay=0.5, max_delay=8, uniform=lambda: uniform)
    delay = policy.delay(attempt, UnavailableError("loading"))
    assert delay is not None
    assert min(0.5 * 2**attempt, 8) / 2 <= delay <= 8


def test_it_gives_up_after_the_last_retry_and_on_other_errors() -> None:
    policy = RetryPolicy(max_retries=1, max_delay=10)
    assert policy.delay(1, OverloadedError("full")) is None
    assert policy.delay(0, OverloadedError("full", retry_after=10.5)) is None
    assert policy.delay(0, ValidationError("no mask", retry_after=1)) is None


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("3", 3.0),
        ("soon", None),
        ("-1", None),
        ("Wed, 21 Oct 2026 07:28:30 GMT", 30.0),
        ("Wed, 21 Oct 2026 07:27:00 GMT", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str | None, seconds: float | None) -> None:
    now = datetime(2026, 10, 21, 7, 28, tzinfo=UTC)
    assert retry_after_seconds(header, now) == seconds
