"""Progress output of an export: phases and findings."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

_WIDTH = 24


@contextmanager
def phase(console: Console, name: str) -> Iterator[None]:
    """Shows a spinner while the block runs, then how long it took."""
    start = time.perf_counter()
    with console.status(f"{name} ..."):
        yield
    console.print(f"{name:<{_WIDTH}}{time.perf_counter() - start:7.1f} s", highlight=False)


def finding(console: Console, text: str) -> None:
    """Prints a result below its phase."""
    console.print(f"  {text}", highlight=False, soft_wrap=True)
