"""How far a download or an export is: one line of a terminal, or a line of a log now and then."""

import math
import sys
import time
from collections.abc import Callable
from typing import TextIO

from maskdial.errors import printable
from maskdial.exporting import Progress

_REDRAW_SECONDS = 0.1
_LOG_SECONDS = 10.0
_BYTES = "bytes"
_CLEAR = "\r\x1b[K"


class ProgressLine:
    """Shows the phases of an intake.

    Args:
        name: what is taken in, for lines of a log.
        stream: a terminal, where one line is drawn again and again, or a file, which gets a line
            of a phase that takes longer than ten seconds, every ten seconds.
        log: gets these lines in place of the stream.
        clock: seconds.
    """

    def __init__(
        self,
        name: str,
        stream: TextIO | None = None,
        *,
        log: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._stream = stream or sys.stderr
        self._redraws = log is None and self._stream.isatty()
        self._log = log or self._print
        self._clock = clock
        self._phase = ""
        self._first = 0
        self._started = self._shown = clock()
        self._is_drawn = False

    def show(self, progress: Progress) -> None:
        """Takes an event; most of them are not worth a line."""
        now = self._clock()
        if progress.phase != self._phase:
            self._phase, self._started, self._first = progress.phase, now, progress.done
            self._shown = -math.inf if self._redraws else now
        between = _REDRAW_SECONDS if self._redraws else _LOG_SECONDS
        if now - self._shown < between:
            return
        self._shown = now
        text = describe(progress, progress.done - self._first, now - self._started)
        if self._redraws:
            self._stream.write(f"{_CLEAR}{printable(text)}")
            self._stream.flush()
            self._is_drawn = True
        else:
            self._log(f"{self._name}: {text}")

    def say(self, text: str) -> None:
        """Prints a line above."""
        self.clear()
        self._log(f"{self._name}: {text.strip()}")

    def clear(self) -> None:
        """Takes the line away."""
        if self._is_drawn:
            self._stream.write(_CLEAR)
            self._stream.flush()
            self._is_drawn = False

    def _print(self, text: str) -> None:
        print(f"maskdial: {printable(text)}", file=self._stream)


def describe(progress: Progress, done: int, seconds: float) -> str:
    """A phase in words: ``Writing 1,024 of 4,900 MB, 35 MB/s, 1:51 left``.

    Args:
        progress: how far it is.
        done: how much of that was done in the ``seconds`` since it began.
    """
    if not progress.total:
        return f"{progress.phase}, {_clock(seconds)}"
    rate = done / seconds if seconds > 0 else 0.0
    left = f", {_clock((progress.total - progress.done) / rate)} left" if rate > 0 else ""
    if progress.things != _BYTES:
        return f"{progress.phase} {progress.done} of {progress.total} {progress.things}{left}"
    sizes = f"{progress.done / 1e6:,.0f} of {progress.total / 1e6:,.0f} MB"
    return f"{progress.phase} {sizes}, {rate / 1e6:,.0f} MB/s{left}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
