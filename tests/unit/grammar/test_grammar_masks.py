"""Masks are computed beside the model, and given up when they take too long."""

import logging
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from maskdial.errors import ValidationError
from maskdial.grammar import masks
from maskdial.grammar.masks import MaskThreads
from maskdial.grammar.matcher import Mask

MASK: Mask = np.array([True, False])


class Endless:
    """A mask that takes CPU time until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def __call__(self) -> Mask:
        while not self.released.is_set():
            sum(range(1000))
        return MASK


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[MaskThreads]:
    monkeypatch.setattr(masks, "CPU_SECONDS", 0.05)
    threads = MaskThreads(2)
    yield threads
    threads.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_mask_and_an_error_reach_their_reader(threads: MaskThreads) -> None:
    def fail() -> Mask:
        raise ValidationError("no")

    good, bad = threads.submit(lambda: MASK), threads.submit(fail)
    good.wait(60)
    assert good.ready
    assert good.result() is MASK
    with pytest.raises(ValidationError, match="no"):
        bad.result()


def test_waiting_ends(threads: MaskThreads) -> None:
    released = threading.Event()

    def wait() -> Mask:
        released.wait(60)
        return MASK

    pending = threads.submit(wait)
    pending.wait(0.01)
    assert not pending.ready
    released.set()
    assert pending.result() is MASK


def test_masks_without_end_are_given_up(
    threads: MaskThreads, caplog: pytest.LogCaptureFixture
) -> None:
    """The other masks go on, even if nobody waits for those without end any more."""
    endless = [Endless() for _ in range(2)]
    pending = [threads.submit(each) for each in endless]
    with caplog.at_level(logging.ERROR), pytest.raises(ValidationError, match="takes more than"):
        pending[0].result()
    assert "CPU time" in caplog.text
    assert threads.submit(lambda: MASK).result() is MASK
    until(lambda: pending[1].ready)
    assert not threads.exhausted
    for each in endless:
        each.released.set()
    with pytest.raises(ValidationError):
        pending[0].result()


def test_a_thread_that_waits_is_not_over_the_limit(threads: MaskThreads) -> None:
    """The limit is on CPU time: a busy machine fails nobody."""
    released = threading.Event()

    def sleep() -> Mask:
        released.wait(60)
        return MASK

    pending = threads.submit(sleep)
    pending.wait(0.2)
    assert not pending.ready
    released.set()
    assert pending.result() is MASK


def test_after_too_many_no_more_are_risked(threads: MaskThreads) -> None:
    endless = [Endless() for _ in range(4)]
    for each in endless:
        with pytest.raises(ValidationError):
            threads.submit(each).result()
    assert threads.exhausted
    for each in endless:
        each.released.set()
    until(lambda: not threads.exhausted)
    assert threads.submit(lambda: MASK).result() is MASK
