"""How far an intake is: a line of a terminal that is drawn again, or lines of a log."""

import io

import pytest

from maskdial.exporting import Progress
from maskdial.progress import ProgressLine, describe


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("progress", "done", "seconds", "text"),
    [
        (
            Progress("Writing", 1_024_000_000, 4_900_000_000, "bytes"),
            *(1_024_000_000, 29.0),
            "Writing 1,024 of 4,900 MB, 35 MB/s, 1:50 left",
        ),
        # Half of it was there already: the rate is that of what came since.
        (
            Progress("Downloading", 600_000_000, 1_000_000_000, "bytes"),
            *(100_000_000, 10.0),
            "Downloading 600 of 1,000 MB, 10 MB/s, 0:40 left",
        ),
        (Progress("Writing", 0, 10**9, "bytes"), 0, 0.0, "Writing 0 of 1,000 MB, 0 MB/s"),
        (Progress("Checking", 0, 0, ""), 0, 3725.0, "Checking, 1:02:05"),
        (Progress("Measuring", 3, 12, "windows"), 3, 6.0, "Measuring 3 of 12 windows, 0:18 left"),
    ],
)
def test_in_words(progress: Progress, done: int, seconds: float, text: str) -> None:
    assert describe(progress, done, seconds) == text


def test_a_terminal_has_one_line() -> None:
    stream, clock = Terminal(), Clock()
    line = ProgressLine("m", stream, clock=clock)
    for step in range(5):
        line.show(Progress("Writing", step * 10**6, 4 * 10**6, "bytes"))
        clock.now += 0.06  # every second one is drawn
    line.say("a finding")
    line.show(Progress("Checking", 0, 0, ""))
    line.clear()
    drawn = stream.getvalue().split("\r\x1b[K")
    assert drawn == [
        "",
        "Writing 0 of 4 MB, 0 MB/s",
        "Writing 2 of 4 MB, 17 MB/s, 0:00 left",
        "Writing 4 of 4 MB, 17 MB/s, 0:00 left",
        "maskdial: m: a finding\n",
        "Checking, 0:00",
        "",
    ]


def test_a_log_has_a_line_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    line = ProgressLine("m", stream, clock=clock)
    for step in range(25):
        line.show(Progress("Writing", step * 10**6, 24 * 10**6, "bytes"))
        clock.now += 1
    line.show(Progress("Checking", 0, 0, ""))  # a short phase
    line.clear()
    assert stream.getvalue().splitlines() == [
        "maskdial: m: Writing 10 of 24 MB, 1 MB/s, 0:14 left",
        "maskdial: m: Writing 20 of 24 MB, 1 MB/s, 0:04 left",
    ]
