"""DiskStore: the records of a folder, up to a number of bytes, and the threads that access them."""

import contextlib
import logging
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.prefix_disk import record
from maskdial.causal.prefix_disk.record import DamagedError, Header, Part
from maskdial.folder_lock import LOCK, lock_folder
from maskdial.metrics import DiskMetrics

_log = logging.getLogger("maskdial.prefix_disk")

_MAX_QUEUED = 256 * 2**20  # bytes that wait to be written; what is more is written another time
_RETRY_SECONDS = 10.0  # until a folder that could not be opened is tried again
_PAUSE_SECONDS = 60.0  # after a record that could not be written, a full disk for example
_TIMES_SECONDS = 30.0  # how often the times of use are written to the files
_LOWEST_PRIORITY = 19

_PARTS: tuple[Part, ...] = ("block", "states")


@dataclass(slots=True)
class _Entry:
    """The records of a block: their sizes in bytes, and when they were last used.

    The times are in nanoseconds, as a file's time of modification, which keeps them.
    """

    previous: bytes
    sizes: dict[Part, int] = field(default_factory=dict)
    used_at: int = 0
    states_used_at: int = 0

    def time_of(self, part: Part) -> int:
        """When a record of it was last used."""
        return self.used_at if part == "block" else self.states_used_at


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A record that waits to be written; see `DiskStore.write`."""

    header: Header
    array: NDArray[Any]
    snapshots: Sequence[bytes]


class DiskStore:
    """Blocks of the prefix cache in a folder, the least recently used of which go first.

    As in memory, a block counts as used later than those that follow it, and is evicted after
    them; states are used, and evicted, by themselves. One process at a time has a folder, by a lock
    on a file in it, so that its bytes stay within the limit. Where another one has it, or it cannot
    be opened, the store is empty and tries again every few seconds; everything else goes on.

    `write` and `read_later` return at once: a thread of its own writes, at the lowest priority, and
    another one reads. Nothing is synced: a file that a crash of the system has torn fails its
    checksum. Thread-safe.

    Args:
        folder: made if it is missing. Names in it that are not of the store are left alone.
        max_bytes: maximum size of all records.
        metrics: the store's instruments.
    """

    def __init__(self, folder: Path, max_bytes: int, metrics: DiskMetrics) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Bytes of the records in the folder."""
        self.problem = "it is being opened"
        """Why nothing is read or written, in a sentence; empty if all is well."""
        self._metrics = metrics
        self._changed = threading.Condition()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # oldest use first
        self._snapshots: OrderedDict[bytes, None] = OrderedDict()  # those with states, likewise
        self._newest = 0  # the time of the last use
        self._queue: deque[_Waiting] = deque()
        self._queued: set[tuple[bytes, Part]] = set()
        self._num_queued_bytes = 0
        self._jobs: deque[Callable[[], None]] = deque()
        self._touched: set[bytes] = set()  # whose files have an older time
        self._lock_file: int | None = None
        self._is_closing = False
        self._closes_at = 0.0
        self._paused_until = 0.0
        self._last_fault = ""
        self._opened = threading.Event()  # or found that it cannot be
        self._threads = [
            threading.Thread(target=run, name=f"maskdial-prefix-disk-{name}", daemon=True)
            for name, run in (("write", self._write_all), ("read", self._read_all))
        ]

    @property
    def num_blocks(self) -> int:
        """Blocks in the folder."""
        return len(self._entries)

    def start(self) -> None:
        """Starts the threads, which open the folder."""
        for thread in self._threads:
            thread.start()

    def wait_until_open(self, timeout: float) -> None:
        """Waits until it is known what the folder has, or that it cannot be opened."""
        self._opened.wait(timeout)

    def close(self, grace: float) -> None:
        """Writes what waits, for at most ``grace`` seconds, and gives the folder up."""
        with self._changed:
            self._closes_at = time.monotonic() + grace
            self._is_closing = True
            self._jobs.clear()
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(grace)
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def size(self, digest: bytes, part: Part) -> int:
        """The bytes of a record; 0 if there is none."""
        entry = self._entries.get(digest)
        return 0 if entry is None else entry.sizes.get(part, 0)

    def write(self, header: Header, array: NDArray[Any], snapshots: Sequence[bytes] = ()) -> None:
        """Has a record written later, unless it is there or too many wait already.

        Args:
            header: the array's.
            array: must not change any more.
            snapshots: blocks of the prompt whose states are used by that, too.
        """
        key = header.digest, header.part
        if self.problem or key in self._queued or self.size(*key):
            return
        with self._changed:
            if self._num_queued_bytes + array.nbytes > _MAX_QUEUED or self._is_closing:
                return
            self._queue.append(_Waiting(header, array, snapshots))
            self._queued.add(key)
            self._num_queued_bytes += array.nbytes
            self._changed.notify_all()

    def use(self, digest: bytes, snapshots: Iterable[bytes] = ()) -> None:
        """Counts as a use of a block and all blocks before it, and of the states after some."""
        with self._changed:
            self._newest = now = max(time.time_ns(), self._newest)  # a clock may be set back
            for each in self._chain(digest):
                self._entries.move_to_end(each)
                self._entries[each].used_at = now
                self._touched.add(each)
            for each in snapshots:
                if each in self._snapshots:
                    self._snapshots.move_to_end(each)
                    self._entries[each].states_used_at = now
                    self._touched.add(each)

    def read_later(self, job: Callable[[], None]) -> None:
        """Has the thread that reads call this."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def read(
        self,
        digest: bytes,
        previous: bytes,
        part: Part,
        dtype: "np.dtype[Any]",
        shape: tuple[int, ...],
    ) -> NDArray[Any] | None:
        """The array of a record; None if it is gone, or is not as it was written, which is logged.

        It blocks: call it where nothing waits, as `read_later` does.
        """
        path = self._path(digest, part)
        try:
            array = record.read(path, previous, dtype, shape)
        except FileNotFoundError:  # somebody has purged it
            self._forget(digest)
            return None
        except (OSError, DamagedError) as error:
            self._metrics.damaged.inc()
            _log.warning("a block of the prefix cache is computed again: %s: %s", path, error)
            self._discard(digest)
            return None
        self._metrics.read_bytes.inc(array.nbytes)
        return array

    # The thread that reads.

    def _read_all(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    if self._is_closing:
                        return
                    self._changed.wait()
                job = self._jobs.popleft()
            try:
                job()
            except Exception:  # the text is computed instead
                _log.exception("the prefix cache on disk could not be read")

    # The thread that writes.

    def _write_all(self) -> None:
        if sys.platform == "linux":  # where it is the thread's own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while not self._try_to_open():
            self._opened.set()
            with self._changed:
                if self._is_closing or self._changed.wait_for(
                    lambda: self._is_closing, _RETRY_SECONDS
                ):
                    return
        self._opened.set()
        while (item := self._next_to_write()) is not None:
            if time.monotonic() >= self._paused_until:
                self._try_to_write(item)
        self._write_times()

    def _next_to_write(self) -> _Waiting | None:
        """Waits for a record to write; None when there is no more and the store closes."""
        while True:
            with self._changed:
                if self._is_closing and time.monotonic() > self._closes_at:
                    return None
                if self._queue:
                    item = self._queue.popleft()
                    self._queued.discard((item.header.digest, item.header.part))
                    self._num_queued_bytes -= item.array.nbytes
                    return item
                if self._is_closing:
                    return None
                if self._changed.wait_for(lambda: self._queue or self._is_closing, _TIMES_SECONDS):
                    continue
            self._write_times()

    def _try_to_write(self, item: _Waiting) -> None:
        try:
            self._write(item)
        except Exception as error:  # the thread goes on, or what waits would stay in memory
            if not isinstance(error, OSError):
                _log.exception("a block of the prefix cache could not be written")
                return
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            reason = error.strerror or str(error)
            if reason != self._last_fault:
                _log.warning(
                    "the prefix cache in %s cannot be written: %s; what it has is read, and "
                    "writing is tried again every minute",
                    self.folder,
                    reason,
                )
            self._last_fault = reason

    def _write(self, item: _Waiting) -> None:
        """Writes a record, evicting others as needed.

        It is left out if the block before it is missing, without which it is never found.
        """
        header, array = item.header, item.array
        num_bytes = record.file_size(header, array)
        if num_bytes > self.max_bytes:
            return
        self._evict(num_bytes)
        before = header.digest if header.part == "states" else header.previous
        if before and before not in self._entries:
            return
        record.write(self.folder, header, array)
        with self._changed:
            entry = self._entries.setdefault(header.digest, _Entry(header.previous))
            self.num_bytes += num_bytes - entry.sizes.get(header.part, 0)
            entry.sizes[header.part] = num_bytes
            if header.part == "states":
                self._snapshots[header.digest] = None
        self.use(header.digest, (*item.snapshots, header.digest))
        self._metrics.written_bytes.inc(array.nbytes)
        self._last_fault = ""
        self._report()

    def _evict(self, num_bytes: int) -> None:
        """Removes blocks until there is room for so many bytes, or none is left; and states that
        were not used for longer than the oldest block.
        """
        while True:
            with self._changed:
                if self.num_bytes + num_bytes <= self.max_bytes or not self._entries:
                    return
                digest, oldest = next(iter(self._entries.items()))
                aged = next(iter(self._snapshots), None)
                only_states = (
                    aged is not None and self._entries[aged].states_used_at < oldest.used_at
                )
                if aged is not None and only_states:
                    self._snapshots.pop(aged)
                    self.num_bytes -= self._entries[aged].sizes.pop("states")
            if aged is not None and only_states:
                with contextlib.suppress(OSError):
                    self._path(aged, "states").unlink(missing_ok=True)
                self._report()
            else:
                self._discard(digest)

    def _write_times(self) -> None:
        """Notes when blocks were used, for the order after a restart."""
        with self._changed:
            touched, self._touched = self._touched, set()
            times = {
                self._path(digest, part): entry.time_of(part)
                for digest in touched
                if (entry := self._entries.get(digest)) is not None
                for part in entry.sizes
            }
        for path, used_at in times.items():
            with contextlib.suppress(OSError):
                os.utime(path, ns=(used_at, used_at), follow_symlinks=False)

    # Its opening.

    def _try_to_open(self) -> bool:
        try:
            self._open()
        except OSError as error:
            problem = (
                "another server has it; give each a folder of its own"
                if isinstance(error, BlockingIOError)
                else f"it cannot be opened: {error.strerror or error}"
            )
            if problem != self.problem:
                _log.warning(
                    "the folder %s of --prefix-cache-dir is not used: %s; it is tried again every "
                    "%d seconds",
                    self.folder,
                    problem,
                    _RETRY_SECONDS,
                )
            self.problem = problem
            return False
        self.problem = ""
        return True

    def _open(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = lock_folder(self.folder)
        try:
            entries, num_strangers, num_removed = _scan(self.folder)
        except BaseException:
            os.close(lock)
            raise
        with self._changed:
            self._lock_file = lock
            self._entries = entries
            self._snapshots = _by_states(entries)
            self.num_bytes = sum(sum(entry.sizes.values()) for entry in entries.values())
        self._evict(0)
        self._report()
        _log.info(
            "prefix cache in %s: %d blocks of %.0f MB",
            self.folder,
            len(entries),
            self.num_bytes / 1e6,
        )
        if num_removed:
            _log.warning(
                "the prefix cache in %s had %d files that were damaged, of another version, or "
                "behind a block that is missing; they are removed",
                self.folder,
                num_removed,
            )
        if num_strangers:
            _log.warning(
                "the folder %s of --prefix-cache-dir has %d files of something else, which are "
                "left alone",
                self.folder,
                num_strangers,
            )

    # For all threads.

    def _path(self, digest: bytes, part: Part) -> Path:
        return self.folder / record.file_name(digest, part)

    def _chain(self, digest: bytes) -> Iterator[bytes]:
        """The digests of a block and of those before it, last to first; the lock is held."""
        while digest in self._entries:
            yield digest
            digest = self._entries[digest].previous

    def _forget(self, digest: bytes) -> _Entry | None:
        """Counts a block as missing."""
        with self._changed:
            entry = self._entries.pop(digest, None)
            self._snapshots.pop(digest, None)
            if entry is not None:
                self.num_bytes -= sum(entry.sizes.values())
        self._report()
        return entry

    def _discard(self, digest: bytes) -> None:
        """Removes a block."""
        entry = self._forget(digest)
        for part in entry.sizes if entry is not None else _PARTS:
            with contextlib.suppress(OSError):
                self._path(digest, part).unlink(missing_ok=True)

    def _report(self) -> None:
        self._metrics.bytes.set(self.num_bytes)
        self._metrics.blocks.set(self.num_blocks)


def _scan(folder: Path) -> tuple[OrderedDict[bytes, _Entry], int, int]:
    """What a folder has, and how many files are strangers', and how many were removed.

    A record's size and header are checked now, so that nothing of another size counts; its payload
    when it is read.
    """
    found: dict[bytes, _Entry] = {}
    num_strangers, num_removed = 0, 0
    for path, parsed, is_file in record_files(folder):
        if parsed is None or not is_file:
            num_strangers += path.name != LOCK
            continue
        digest, part, is_partial = parsed
        try:
            if is_partial:
                raise DamagedError("it was never finished")
            header, stat = record.read_header(path), path.stat()
        except (OSError, DamagedError):
            num_removed += not is_partial  # a server that was killed leaves one
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        entry = found.setdefault(digest, _Entry(header.previous))
        entry.sizes[part] = stat.st_size
        if part == "block":
            entry.used_at = stat.st_mtime_ns
        else:
            entry.states_used_at = stat.st_mtime_ns
    depths = _depths(found)
    for digest in found.keys() - depths.keys():
        for part in found.pop(digest).sizes:
            num_removed += 1
            with contextlib.suppress(OSError):
                (folder / record.file_name(digest, part)).unlink()
    return _ordered(found, depths), num_strangers, num_removed


def record_files(
    folder: Path,
) -> Iterator[tuple[Path, tuple[bytes, Part, bool] | None, bool]]:
    """What is in a folder: its path, what its name says of a record, and whether it is a file."""
    with os.scandir(folder) as entries:
        for entry in entries:
            is_file = entry.is_file(follow_symlinks=False)
            yield folder / entry.name, record.parse_name(entry.name), is_file


def _depths(found: dict[bytes, _Entry]) -> dict[bytes, int]:
    """How many blocks there are before each one; without those that `DiskStore` cannot reach."""
    depths: dict[bytes, int] = {}
    for digest in found:
        chain: dict[bytes, None] = {}  # a ring of blocks has no beginning
        while digest in found and digest not in depths and digest not in chain:
            chain[digest] = None
            digest = found[digest].previous
        if digest and digest not in depths:
            continue
        depth = depths[digest] + 1 if digest else 0
        for each in reversed(chain):
            if "block" not in found[each].sizes:
                break
            depths[each] = depth
            depth += 1
    return depths


def _ordered(found: dict[bytes, _Entry], depths: dict[bytes, int]) -> OrderedDict[bytes, _Entry]:
    """Oldest use first, and every block after those that follow it, whatever the files' times."""
    now = time.time_ns()
    for digest in sorted(found, key=depths.__getitem__, reverse=True):
        entry = found[digest]
        entry.used_at = min(entry.used_at, now)  # of a clock that was wrong
        entry.states_used_at = min(entry.states_used_at, now)
        if entry.previous:
            before = found[entry.previous]
            before.used_at = max(before.used_at, entry.used_at)
    in_order = sorted(found, key=lambda each: (found[each].used_at, -depths[each]))
    return OrderedDict((digest, found[digest]) for digest in in_order)


def _by_states(entries: Mapping[bytes, _Entry]) -> OrderedDict[bytes, None]:
    """The blocks that have states, those first whose states were not used for longest."""
    with_states = (digest for digest, entry in entries.items() if "states" in entry.sizes)
    in_order = sorted(with_states, key=lambda digest: entries[digest].states_used_at)
    return OrderedDict.fromkeys(in_order)
