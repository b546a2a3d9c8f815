"""The folder that an export writes to: temporary until it is complete, and removed on failure."""

import glob
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maskdial_export.errors import ExportError, io_reason

if sys.platform != "win32":
    import fcntl

_SUFFIX = ".maskdial-export"
_RANDOM = re.compile(r"[a-z0-9_]{8}")  # of tempfile's names


@contextmanager
def new_folder(dest: Path) -> Iterator[Path]:
    """A temporary folder, renamed to ``dest`` on success and removed on failure.

    An empty ``dest`` is replaced at once, so that one which cannot be is found before the work. A
    process that is killed leaves the temporary folder; the next export to ``dest`` removes it.

    Raises:
        ExportError: ``dest`` has files, or cannot be written.
    """
    check_vacant(dest)
    if dest.is_dir():
        dest = dest.resolve()  # a folder cannot take the place of a link
    try:
        if dest.parent.exists() and not dest.parent.is_dir():
            raise ExportError(f"cannot write to {dest}: {dest.parent} is not a folder")
        dest.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(dest)
        if dest.is_dir():
            _replace(_temporary(dest), dest)
        folder = _temporary(dest)
    except OSError as error:
        raise ExportError(f"cannot write to {dest}: {io_reason(error)}") from error
    lock = _lock(folder)
    try:
        yield folder
        check_vacant(dest)
        try:
            os.replace(folder, dest)
        except OSError as error:
            raise ExportError(f"cannot write to {dest}: {io_reason(error)}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def check_vacant(dest: Path) -> None:
    """Refuses a destination that exists, unless it is an empty folder."""
    if dest.is_dir() and not any(dest.iterdir()):
        return
    if dest.exists() or dest.is_symlink():
        raise ExportError(f"{dest} already exists; remove it or choose another folder")


def _temporary(dest: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", suffix=_SUFFIX, dir=dest.parent))
    folder.chmod(0o755)
    return folder


def _replace(folder: Path, dest: Path) -> None:
    try:
        os.replace(folder, dest)
    except OSError:
        folder.rmdir()
        raise


def _remove_stale(dest: Path) -> None:
    """Removes temporary folders of exports to ``dest`` that no running one holds."""
    prefix = f".{dest.name}."
    for folder in dest.parent.glob(f"{glob.escape(prefix)}*{_SUFFIX}"):
        random = folder.name.removeprefix(prefix).removesuffix(_SUFFIX)
        if not _RANDOM.fullmatch(random) or folder.is_symlink() or not folder.is_dir():
            continue
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Locks a folder until the descriptor is closed; None if another process has locked it."""
    if sys.platform == "win32":
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
