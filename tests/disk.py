"""Stores of prefixes for tests, which wait for threads and never for a time."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from maskdial.causal.prefix_disk.store import DiskStore
from maskdial.metrics import Metrics

PATIENCE = 60  # seconds, after which a test that waits for something has failed


def until(holds: Callable[[], bool]) -> None:
    """Waits for something that another thread brings about."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


@contextlib.contextmanager
def opened(
    folder: Path, max_bytes: int = 2**30, metrics: Metrics | None = None
) -> Iterator[DiskStore]:
    """A store that knows what its folder has; at the end, it has written what it was given."""
    store = DiskStore(folder, max_bytes, (metrics or Metrics()).disk)
    store.start()
    store.wait_until_open(PATIENCE)
    try:
        yield store
    finally:
        store.close(PATIENCE)
