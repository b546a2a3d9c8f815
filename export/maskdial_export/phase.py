"""Progress output of an export: phases and findings."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from maskdial.errors import printable

_WIDTH = 24

Progress = Callable[[int, int, str], None]
"""Shows how far a phase has come: how many things of how many are done, and what they are."""


def silent(_done: int, _total: int, _things: str) -> None:
    """Shows nothing."""


@contextmanager
def phase(console: Console, name: str) -> Iterator[Progress]:
    """Shows a spinner while the block runs, then how long it took."""
    start = time.perf_counter()
    with console.status(f"{name} ...") as status:

        def show(done: int, total: int, things: str) -> None:
            status.update(f"{name} ... {done}/{total} {things}")

        yield show
    console.print(f"{name:<{_WIDTH}}{time.perf_counter() - start:7.1f} s", highlight=False)


def finding(console: Console, text: str) -> None:
    """Prints a result below its phase."""
    say(console, f"  {text}")


def say(console: Console, text: str) -> None:
    """Prints a line that may have words of the checkpoint: they are no markup, no commands."""
    console.print(printable(text), highlight=False, markup=False, soft_wrap=True)
