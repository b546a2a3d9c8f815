"""Progress output of an export: phases and findings."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from maskdial.errors import printable

_WIDTH = 24
BYTES = "bytes"
"""Things of a phase that are shown as sizes."""

Progress = Callable[[int, int, str], None]
"""Shows how far a phase has come: how many things of how many are done, and what they are."""

Report = Callable[[dict[str, Any]], None]
"""Takes a phase, with done, total and the things' name, or a line of text."""


class ReportingConsole(Console):
    """A console that shows nothing: phases and lines are reported to a program."""

    def __init__(self, report: Report) -> None:
        super().__init__(quiet=True)
        self.report = report


def silent(_done: int, _total: int, _things: str) -> None:
    """Shows nothing."""


@contextmanager
def phase(console: Console, name: str) -> Iterator[Progress]:
    """Shows a spinner while the block runs, then how long it took."""
    if isinstance(console, ReportingConsole):
        report = console.report
        report({"phase": name, "done": 0, "total": 0, "things": ""})
        yield lambda done, total, things: report(
            {"phase": name, "done": done, "total": total, "things": things}
        )
        return
    start = time.perf_counter()
    with console.status(f"{name} ...") as status:

        def show(done: int, total: int, things: str) -> None:
            if things == BYTES:
                status.update(f"{name} ... {done / 1e6:,.0f}/{total / 1e6:,.0f} MB")
            else:
                status.update(f"{name} ... {done}/{total} {things}")

        yield show
    console.print(f"{name:<{_WIDTH}}{time.perf_counter() - start:7.1f} s", highlight=False)


def finding(console: Console, text: str) -> None:
    """Prints a result below its phase."""
    say(console, f"  {text}")


def say(console: Console, text: str) -> None:
    """Prints a line that may have words of the checkpoint: they are no markup, no commands."""
    if isinstance(console, ReportingConsole):
        console.report({"line": text})
    console.print(printable(text), highlight=False, markup=False, soft_wrap=True)
