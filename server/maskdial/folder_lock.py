"""The lock on a folder that one process has at a time."""

import fcntl
import os
from pathlib import Path

LOCK = "lock"
"""The name of the file in the folder. It stays there; a process that ends gives the lock up."""


def lock_folder(folder: Path) -> int:
    """Takes a folder for this process, until the descriptor that it returns is closed.

    Raises:
        BlockingIOError: another process has it.
        OSError: its file cannot be opened, or is a link, or cannot be locked.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    lock = os.open(folder / LOCK, flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock
