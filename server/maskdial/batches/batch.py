"""A batch: a file of requests is answered, in order, in bounded memory."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from maskdial.batches.answers import Answer, Answers
from maskdial.batches.lines import Input, Line, Position
from maskdial.batches.output import Journal, Output
from maskdial.engine.thread import in_thread
from maskdial.errors import ConfigError

_READ = 512
"""Lines that are read, and put in order of length, at a time."""

_MAX_WAITING = 2048
"""Lines that are read but not written. The engine has enough to choose from while the first of them
is not finished."""

_MAX_WAITING_BYTES = 4_000_000
"""The same of their bytes: an embedding has a hundred times those of its text."""

_TURN = 16
"""Lines that begin in one turn of the event loop: a tenth of a millisecond or two."""

_PATIENCE_SECONDS = 0.5


@dataclass(slots=True)
class _Place:
    """A line that waits for its turn to be written."""

    line: Line
    answer: Answer | None = None


def skip_done(
    lines: Iterator[Line], journal: Journal, name: str, note: Callable[[Line], object]
) -> Position | None:
    """Reads the lines that a journal says are done, which must be as they were.

    Args:
        lines: the input, from its beginning.
        journal: of the run to go on with.
        name: of the input, for errors.
        note: is told of each of them.

    Returns:
        Where the last one ends; None if none is done.

    Raises:
        ConfigError: the input is not what it was.
    """
    last: Position | None = None
    number = 0
    while number < journal.number:
        line = next(lines, None)
        if line is None:
            raise ConfigError(
                f"{name} has {number:,} lines, but {journal.number:,} were answered before; "
                "begin anew with --overwrite"
            )
        number, last = line.number, line.end
        note(line)
        if number >= journal.number and last.fingerprint != journal.fingerprint:
            raise ConfigError(
                f"the {journal.number:,} lines of {name} that were answered before have changed; "
                "begin anew with --overwrite"
            )
    return last


class Batch:
    """One run over an input.

    Args:
        lines: the input.
        name: its name, for errors.
        answers: answers its lines.
        output: gets the results.
        progress: is told how many lines are written at each step, and how much of the input's size
            all of them are.
    """

    def __init__(
        self,
        lines: Input,
        name: str,
        answers: Answers,
        output: Output,
        progress: Callable[[int, int], None],
    ) -> None:
        self._lines = iter(lines)
        self._name = name
        self._answers = answers
        self._output = output
        self._progress = progress
        self._read_ahead: deque[Line] = deque()
        self._waiting: deque[_Place] = deque()
        self._num_bytes = 0  # of those
        self._fault: BaseException | None = None
        self._changed = asyncio.Event()
        self._last: Position | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Answers the lines that are not done.

        Raises:
            ConfigError: the input is not what it was, or the results cannot be written.
        """
        await in_thread(self._skip)
        reading: asyncio.Future[bool] | None = None
        more = True
        try:
            while more or self._waiting:
                if more and reading is None and self._has_room:
                    reading = in_thread(self._read)
                    reading.add_done_callback(lambda _: self._changed.set())
                is_stuck = not await self._wait()
                if self._fault is not None:
                    raise self._fault
                if reading is not None and reading.done():
                    more, reading = reading.result(), None
                if reading is None or is_stuck:  # those of a slow pipe do not wait for the next
                    await self._begin()
                await self._write()
            await self._checkpoint(complete=True)
        except BaseException:
            with contextlib.suppress(ConfigError):  # as the disk may be full
                await self._write()
                await self._checkpoint()
            raise
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _skip(self) -> None:
        # Answers remember each custom_id.
        self._last = skip_done(
            self._lines, self._output.journal, self._name, self._answers.fault_of
        )

    async def _begin(self) -> None:
        """Has the lines answered that were read.

        A server's event loop has other requests, so it gets its turn after every few lines.
        """
        lines = [self._read_ahead.popleft() for _ in range(len(self._read_ahead))]
        places = {line.number: _Place(line) for line in lines}
        self._waiting.extend(places.values())
        self._num_bytes += sum(line.size for line in lines)
        good = []
        waiting = list(places.values())
        for start in range(0, len(waiting), _TURN):
            for place in waiting[start : start + _TURN]:
                if fault := self._answers.fault_of(place.line):
                    place.answer = self._answers.failure(place.line, fault)
                else:
                    good.append(place.line)
            await asyncio.sleep(0)
        groups = self._answers.groups(good)
        for start in range(0, len(groups), _TURN):
            for group in groups[start : start + _TURN]:
                task = asyncio.create_task(self._answer([places[line.number] for line in group]))
                self._running.add(task)
                task.add_done_callback(self._end)
            await asyncio.sleep(0)

    @property
    def _has_room(self) -> bool:
        has_bytes = self._num_bytes < _MAX_WAITING_BYTES or not self._waiting
        return has_bytes and len(self._waiting) + _READ <= _MAX_WAITING

    def _read(self) -> bool:
        """Reads the next lines; False at the end of the input."""
        num_bytes = self._num_bytes
        for number, line in enumerate(self._lines, start=1):
            num_bytes += line.size
            self._read_ahead.append(line)
            if number == _READ or num_bytes >= _MAX_WAITING_BYTES:
                return True
        return False

    async def _wait(self) -> bool:
        """Waits for something to happen; False if nothing does."""
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fault = task.exception()
        self._changed.set()

    async def _answer(self, places: list[_Place]) -> None:
        found = await self._answers.answer([place.line for place in places])
        for place, answer in zip(places, found, strict=True):
            place.answer = answer

    async def _write(self) -> None:
        num_written = 0
        for place in self._finished():
            assert place.answer is not None, "it is finished"
            self._output.write(place.answer.content, failed=place.answer.failed)
            self._last = place.line.end
            self._num_bytes -= place.line.size
            num_written += 1
        if self._last is not None:
            self._progress(num_written, self._last.done)
        if self._output.is_due:
            await self._checkpoint()

    def _finished(self) -> Iterator[_Place]:
        while self._waiting and self._waiting[0].answer is not None:
            yield self._waiting.popleft()

    async def _checkpoint(self, *, complete: bool = False) -> None:
        """In a thread, as the disk may be slow; one that was begun ends before this does."""
        last = self._last
        number, fingerprint = (0, "") if last is None else (last.number, last.fingerprint)
        flush = partial(self._output.checkpoint, number, fingerprint, complete=complete)
        flushing = in_thread(flush)
        try:
            await asyncio.shield(flushing)
        except asyncio.CancelledError:
            await asyncio.wait({flushing})
            raise
