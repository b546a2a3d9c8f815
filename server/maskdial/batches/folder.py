"""The folder of the Batch API: whose it is, and which names in it are the server's own.

lock              held by the server that has the folder; its content marks the folder
files/ID          what was uploaded, or what a batch has given
files/ID.json     what is known of it; a file without that does not count
batches/ID.json   a batch
work/ID/          the results of a batch that is not finished, and their journal

Whatever else is in the folder is nobody's business here: it is neither read nor removed.
"""

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from maskdial.errors import ConfigError
from maskdial.folder_lock import LOCK, lock_folder

_MARK = b"the folder of maskdial's batches\n"
_ID = "[0-9a-f]{32}"
_OWN = {
    "files": re.compile(rf"file-{_ID}(\.json)?(\.partial)?"),
    "batches": re.compile(rf"batch_{_ID}\.json(\.partial)?"),
    "work": re.compile(rf"batch_{_ID}"),
}
_OF_THE_SYSTEM = "lost+found"  # at the root of a volume


def claim(folder: Path) -> int:
    """Takes a folder for this process, with the folders in it, and marks it as one of batches.

    One that is marked may have other things in it. One that is not may not: it is somebody's.

    Returns:
        A descriptor that holds it until it is closed.

    Raises:
        ConfigError: it has what is not of batches, cannot be written, or another server has it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_marked(folder) and (stranger := next(_strangers(folder), None)) is not None:
            raise ConfigError(
                f"the folder {folder} of --batch-dir has something else in it, such as "
                f"{stranger.relative_to(folder)}; name an empty or a new one, which is the "
                "server's alone"
            )
        for each in map(folder.joinpath, _OWN):
            each.mkdir(mode=0o700, exist_ok=True)
            if not os.access(each, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        lock = lock_folder(folder)
    except BlockingIOError as error:
        raise ConfigError(
            f"another server has the folder {folder}; give each a --batch-dir of its own"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} of --batch-dir cannot be written or locked: {error.strerror}"
        ) from error
    try:
        if not os.fstat(lock).st_size:
            os.write(lock, _MARK)
    except OSError as error:
        os.close(lock)
        raise ConfigError(
            f"the folder {folder} of --batch-dir cannot be written: {error.strerror}"
        ) from error
    return lock


def own_names(folder: Path) -> Iterator[Path]:
    """What is in one of the folders of a folder that `claim` has taken, and has a name that only a
    server gives: regular files, and in ``work`` folders. No link is either.
    """
    of_kind = os.DirEntry.is_dir if folder.name == "work" else os.DirEntry.is_file
    with os.scandir(folder) as entries:
        for entry in entries:
            if _OWN[folder.name].fullmatch(entry.name) and of_kind(entry, follow_symlinks=False):
                yield folder / entry.name


def _is_marked(folder: Path) -> bool:
    lock = folder / LOCK
    return lock.is_file() and lock.stat().st_size == len(_MARK) and lock.read_bytes() == _MARK


def _strangers(folder: Path) -> Iterator[Path]:
    """What is not of a folder of batches, or of one from before these were marked."""
    for path in sorted(folder.iterdir()):
        if path.name in _OWN and path.is_dir():
            own = set(own_names(path))
            yield from (each for each in sorted(path.iterdir()) if each not in own)
        elif path.name == LOCK and path.is_file() and not path.stat().st_size:
            continue
        elif path.name != _OF_THE_SYSTEM:
            yield path
