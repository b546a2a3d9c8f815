"""Output: what is written for an input, in its order, and the journal that outlives a kill.

Every second, and at the end, results and failures are flushed to the disk, and only then the
journal says how much of them counts, and how far the input was read for it. It is a file beside the
results that is replaced as a whole. A run that goes on cuts both files to what the journal says,
and reads on from there: no line is repeated and none lost, whenever the process or the machine
stopped.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from maskdial.errors import ConfigError

_CHECKPOINT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Journal:
    """How far a run came.

    Attributes:
        options: what the run was asked for; another one cannot go on with it.
        number: lines of the input that are done.
        fingerprint: of the input up to there.
        num_answered: of those lines; blank ones are in neither number.
        num_failed: likewise.
        output_bytes: of the results.
        error_bytes: of the failures.
        complete: whether the input had ended.
    """

    options: Mapping[str, Any]
    number: int = 0
    fingerprint: str = ""
    num_answered: int = 0
    num_failed: int = 0
    output_bytes: int = 0
    error_bytes: int = 0
    complete: bool = False

    @classmethod
    def read(cls, path: Path) -> "Journal | None":
        """The journal of a file; None if there is none.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            return cls(**json.loads(path.read_bytes()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"the journal {path} cannot be read: {error}") from error


class Output(Protocol):
    """Where results and failures go."""

    @property
    def journal(self) -> Journal: ...

    def write(self, result: bytes, *, failed: bool) -> None:
        """Takes the result of the next line, or its failure."""

    def checkpoint(self, number: int, fingerprint: str, *, complete: bool = False) -> None:
        """Has all that was written count, which a run that goes on keeps."""

    @property
    def is_due(self) -> bool:
        """Whether the last checkpoint is long ago."""


class Pipe:
    """Results on standard output, failures on standard error; nothing to go on with."""

    is_due = False

    def __init__(self) -> None:
        self.journal = Journal({})

    def write(self, result: bytes, *, failed: bool) -> None:
        if failed:
            self.journal = dataclasses.replace(self.journal, num_failed=self.journal.num_failed + 1)
        file = sys.stderr.buffer if failed else sys.stdout.buffer
        try:
            file.write(result)
            file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise ConfigError(f"standard output cannot be written: {error.strerror}") from error

    def checkpoint(self, number: int, fingerprint: str, *, complete: bool = False) -> None:
        self.journal = dataclasses.replace(self.journal, number=number, complete=complete)


class Files:
    """A file of results, with one of failures and the journal beside it.

    Args:
        path: of the results.
        options: what the run is asked for.
        resume: go on with what is there, if anything is.
        overwrite: begin anew whatever is there.

    Raises:
        ConfigError: there is a file already, another run writes to it or wrote it with other
            options, or the folder cannot be written.
    """

    def __init__(
        self, path: Path, options: Mapping[str, Any], *, resume: bool, overwrite: bool
    ) -> None:
        self.path = path
        self.errors = errors_path(path)
        self._journal_path = journal_path(path)
        self._pending: dict[bool, list[bytes]] = {False: [], True: []}
        self._failed = False
        exists = path.exists()
        if exists and not (resume or overwrite):
            raise ConfigError(
                f"{path} is there already; go on with it by --resume, or replace it by --overwrite"
            )
        if not (exists or overwrite):
            self._check_beside()
        self.journal = Journal(options)
        if exists and resume:
            self.journal = self._read_journal(options)
        with self._explained():
            self._files = {False: _open(path), True: _open(self.errors)}
            try:
                fcntl.flock(self._files[False], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"another run writes to {path}") from error
            for failed, length in (
                (False, self.journal.output_bytes),
                (True, self.journal.error_bytes),
            ):
                size = os.fstat(self._files[failed]).st_size
                if size < length:
                    name = self.errors if failed else path
                    raise ConfigError(
                        f"{name} has {size:,} bytes, and had {length:,} when the run stopped; "
                        "begin anew with --overwrite"
                    )
                os.ftruncate(self._files[failed], length)
                os.lseek(self._files[failed], 0, os.SEEK_END)
            self._write_journal()
        self._checked_at = time.monotonic()

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._checked_at >= _CHECKPOINT_SECONDS

    def write(self, result: bytes, *, failed: bool) -> None:
        self._pending[failed].append(result)

    def checkpoint(self, number: int, fingerprint: str, *, complete: bool = False) -> None:
        if self._failed:  # some of what was written is not in the files
            return
        self._failed = True
        with self._explained():
            added = {failed: self._flush(failed) for failed in (False, True)}
            self.journal = Journal(
                self.journal.options,
                number,
                fingerprint,
                self.journal.num_answered + added[False][1],
                self.journal.num_failed + added[True][1],
                self.journal.output_bytes + added[False][0],
                self.journal.error_bytes + added[True][0],
                complete,
            )
            self._write_journal()
        self._failed = False
        self._checked_at = time.monotonic()

    def close(self) -> None:
        """Closes the files; one of failures without any is removed."""
        for file in self._files.values():
            os.close(file)
        if not self.journal.error_bytes:
            self.errors.unlink(missing_ok=True)

    def _check_beside(self) -> None:
        """Refuses files beside results that are not there, unless a run to them has left these."""
        try:
            if Journal.read(self._journal_path) is not None:
                return
        except ConfigError:  # it is no journal
            pass
        for each in (self.errors, self._journal_path):
            if each.exists():
                raise ConfigError(
                    f"{each} is there already, and of no run to {self.path}; move it away, or "
                    "replace it by --overwrite"
                )

    def _flush(self, failed: bool) -> tuple[int, int]:
        """The bytes and the lines that were pending."""
        lines, self._pending[failed] = self._pending[failed], []
        content = memoryview(b"".join(lines))
        written = 0
        while written < len(content):
            written += os.write(self._files[failed], content[written:])
        if lines:
            os.fsync(self._files[failed])
        return written, len(lines)

    def _write_journal(self) -> None:
        content = json.dumps(dataclasses.asdict(self.journal), indent=1).encode() + b"\n"
        write_whole(self._journal_path, content)

    def _read_journal(self, options: Mapping[str, Any]) -> Journal:
        journal = Journal.read(self._journal_path)
        if journal is None:
            raise ConfigError(
                f"there is no journal {self._journal_path}, so {self.path} cannot be gone on with; "
                "replace it by --overwrite"
            )
        for name, value in options.items():
            if journal.options.get(name) != value:
                raise ConfigError(
                    f"the run to go on with had another {name}; repeat it as it was, or begin anew "
                    "with --overwrite"
                )
        return journal

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ConfigError(
                    f"the disk of {self.path} is full; make room, and go on with --resume"
                ) from error
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from error


def journal_path(path: Path) -> Path:
    """Where the journal of a file of results is."""
    return path.with_name(path.name + ".journal")


def errors_path(path: Path) -> Path:
    """Where the failures are that belong to a file of results."""
    return path.with_name(path.name + ".errors.jsonl")


def write_whole(path: Path, content: bytes) -> None:
    """Replaces a file as a whole: whatever stops the process or the machine, it is the one before
    or this one.
    """
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Has the names in a folder outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
