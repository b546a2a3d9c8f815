"""LogWriter: log lines on their way to a descriptor that perhaps nobody reads."""

import logging
import os
import select
import threading
from collections import deque

_MAX_BYTES = 4 * 2**20
_FLUSH_SECONDS = 2.0


class LogWriter(logging.Handler):
    """Has a thread write the lines, so that nothing else waits for a terminal, pipe or disk.

    Lines that do not fit into the queue are dropped, and a line says how many.

    Args:
        descriptor: to write to; it stays open.
        max_bytes: of the lines that wait.
    """

    def __init__(self, descriptor: int, max_bytes: int = _MAX_BYTES) -> None:
        super().__init__()
        self.num_dropped = 0
        """Records that were not written, since the start."""
        self._descriptor = descriptor
        self._max_bytes = max_bytes
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0  # of the lines that wait, and of that being written
        self._num_told = 0  # of the dropped records
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_lines, name="maskdial-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._encode(record)
        except Exception:  # the arguments do not fit the message; logging itself would print that
            line = self._encode(_record(f"a record of {record.name} cannot be written"))
        with self._changed:
            if self._num_bytes + len(line) > self._max_bytes:
                self.num_dropped += 1
                return
            self._append(line)

    def flush(self) -> None:
        """Waits until all is written, for two seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_bytes, _FLUSH_SECONDS)

    def _write_lines(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                lines = list(self._lines)
                self._lines.clear()
            text = b"".join(lines)
            is_written = _write(self._descriptor, text)
            with self._changed:
                self._num_bytes -= len(text)
                if not is_written:
                    self.num_dropped += len(lines)
                elif self.num_dropped > self._num_told:
                    num = self.num_dropped - self._num_told
                    self._num_told = self.num_dropped
                    self._append(self._encode(_record(f"{num} log records were dropped")))
                self._changed.notify_all()

    def _append(self, line: bytes) -> None:
        self._lines.append(line)
        self._num_bytes += len(line)
        if len(self._lines) == 1:
            self._changed.notify_all()

    def _encode(self, record: logging.LogRecord) -> bytes:
        return (self.format(record) + "\n").encode(errors="backslashreplace")


def _record(message: str) -> logging.LogRecord:
    return logging.LogRecord("maskdial.logs", logging.WARNING, __file__, 0, message, (), None)


def _write(descriptor: int, line: bytes) -> bool:
    """Writes a line as a whole; False if that is not possible."""
    while line:
        try:
            line = line[os.write(descriptor, line) :]
        except BlockingIOError:  # another process that has the same pipe wants it so
            poll = select.poll()  # select() takes no descriptor above 1023
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
        except OSError:
            return False
    return True
