"""Phases of an export, as the terminal shows them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

_WIDTH = 24


@contextmanager
def phase(console: Console, name: str) -> Iterator[None]:
    """Shows a spinner while it runs and its time when it is done."""
    start = time.perf_counter()
    with console.status(f"{name} ..."):
        yield
    console.print(f"{name:<{_WIDTH}}{time.perf_counter() - start:7.1f} s", highlight=False)


def finding(console: Console, text: str) -> None:
    """Shows what a phase found, on a line of its own below it."""
    console.print(f"  {text}", highlight=False, soft_wrap=True)
