"""Storage: the folder of the Batch API, which one server has at a time, and who writes to it."""

import asyncio
import errno
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from maskdial.batches.folder import claim, own_names
from maskdial.batches.output import write_whole
from maskdial.errors import ConfigError, UnavailableError

T = TypeVar("T")


class Storage:
    """The folder, and the thread that writes to it, one thing after the other.

    Raises:
        ConfigError: it is not one of batches, cannot be written, or another server has it.
    """

    def __init__(self, folder: Path) -> None:
        self.files, self.batches, self.work = (
            folder / name for name in ("files", "batches", "work")
        )
        self._lock = claim(folder)
        self._thread = ThreadPoolExecutor(1, "maskdial-batches")

    async def run(self, work: Callable[[], T]) -> T:
        """Does work with the folder in its thread, after all that was asked for before.

        It is finished even if the caller is cancelled.

        Raises:
            UnavailableError: the disk is full, or cannot be written.
        """
        loop = asyncio.get_running_loop()
        working = loop.run_in_executor(self._thread, lambda: _explained(work))
        return await asyncio.shield(working)

    async def save(self, path: Path, content: bytes) -> None:
        """Writes a record, as a whole."""
        await self.run(lambda: write_whole(path, content))

    def close(self) -> None:
        """Ends the thread when its work is done, and lets go of the folder."""
        self._thread.shutdown()
        os.close(self._lock)


def records(folder: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """The records in a folder, and how many bytes each has.

    Raises:
        ConfigError: one cannot be read.
    """
    for path in sorted(own_names(folder)):  # by their ids, so the oldest comes first
        if path.suffix != ".json":
            continue
        try:
            content = path.read_bytes()
            yield json.loads(content), len(content)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; repair or remove it") from error


def encode_record(record: object) -> bytes:
    """A record as it is written. Texts are in UTF-8: their escapes would be six times as long."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass")


def new_id(prefix: str) -> str:
    """An id that nobody can guess; ids of one kind are in the order of their creation."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


def _explained(work: Callable[[], T]) -> T:
    try:
        return work()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = "the disk for the server's files is full; try again later"
        else:
            why = f"the server's files cannot be written: {error.strerror}"
        raise UnavailableError(why) from error
