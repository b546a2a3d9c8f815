"""ResponseStore: responses of `/v1/responses` and their conversations, in a file of SQLite's."""

import asyncio
import json
import logging
import math
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from maskdial.errors import ConfigError, UnavailableError

T = TypeVar("T")

_log = logging.getLogger("maskdial.responses")

_LOG_SECONDS = 60.0
_BATCH_BYTES = 2**23
"""What one call drops beside the room that it needs itself: all others wait meanwhile."""

_UNFINISHED = ("queued", "in_progress")
_LOST = {
    "code": "server_error",
    "message": "the server ended before the response did, or could not store it",
}
_UNSTORED = 'try again later, or send "store": false'
_ROW_BYTES = 512  # beside the texts of a row: its id, its places in two indexes
_COLUMNS = ["id", "owner", "expires", "status", "response", "items"]
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    expires REAL NOT NULL,
    status TEXT NOT NULL,
    response TEXT NOT NULL,
    items TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS responses_expires ON responses (expires);
CREATE INDEX IF NOT EXISTS responses_owner ON responses (owner, expires);
"""
_SIZE = f"LENGTH(response) + LENGTH(items) + {_ROW_BYTES}"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as the API writes it, and the items of its conversation before its own output."""

    response: dict[str, Any]
    items: list[dict[str, Any]]

    @property
    def status(self) -> str:
        """How far it is, or how it ended."""
        return str(self.response["status"])


class ResponseStore:
    """Keeps responses for a time, as far as there is room. One server uses a file at a time.

    Where there is none, the oldest responses of the owner that has most make room, whoever needs
    it: nobody can take it from all others. A file that has more than there is room for, as after
    the limit was lowered, gets there in the course of many calls: each drops as many bytes as it
    adds, and some more.

    Args:
        path: of the file, which is made if there is none; only its owner may read it.
        max_age: seconds after which a response is dropped.
        max_bytes: of all responses.

    Attributes:
        running: the tasks of responses that are written in the background, by their ids.

    Raises:
        ConfigError: the file cannot be used, or is of something else.
    """

    def __init__(self, path: Path, max_age: float, max_bytes: int) -> None:
        self._max_age = max_age
        self._max_bytes = max_bytes
        self._num_evicted = self._evicted_bytes = 0
        self._next_log = 0.0
        self.running: dict[str, asyncio.Task[None]] = {}
        # SQLite's calls wait for the disk; one after the other, so that they need no lock.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses-store")
        try:
            self._database, self._sizes, kept = self._thread.submit(_open, path).result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise ConfigError(
                f"the store of responses {path} cannot be used: {error}; one server uses it at a "
                "time (--responses-store)"
            ) from error
        if kept > max_bytes:
            _log.warning(
                "the store of responses %s has %s bytes, and may have %s (--responses-max-bytes): "
                "the oldest responses will be dropped as new ones are stored",
                path,
                f"{kept:,}",
                f"{max_bytes:,}",
            )

    async def save(
        self, owner: str, response: Mapping[str, Any], items: Sequence[Mapping[str, Any]]
    ) -> None:
        """Stores a response, or how far it is by now.

        Args:
            owner: who may use it.
            response: as the API writes it.
            items: of its conversation before its output.

        Raises:
            UnavailableError: it cannot be stored, as the disk is full.
        """
        now, response_id = time.time(), response["id"]
        texts = json.dumps(response), json.dumps(items)
        row = (response_id, owner, now + self._max_age, response["status"], *texts)
        num_bytes = sum(map(len, texts)) + _ROW_BYTES
        if num_bytes > self._max_bytes:
            raise UnavailableError(
                f"the response has {num_bytes:,} bytes, and all that are stored may have "
                f"{self._max_bytes:,} (--responses-max-bytes); {_UNSTORED}"
            )

        def write(database: sqlite3.Connection, sizes: Counter[str]) -> tuple[int, int]:
            _drop(database, sizes, "id = ?", response_id)
            left = num_bytes + _BATCH_BYTES
            expired = "expires <= ? ORDER BY expires, id"
            left -= _drop(database, sizes, expired, now, enough=left)[1]
            num_evicted = evicted_bytes = 0
            while (excess := min(sizes.total() + num_bytes - self._max_bytes, left)) > 0:
                ((largest, _),) = sizes.most_common(1)
                oldest = "owner = ? ORDER BY expires, id"
                num, freed = _drop(database, sizes, oldest, largest, enough=excess)
                left -= freed
                num_evicted += num
                evicted_bytes += freed
            database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
            sizes[owner] += num_bytes
            return num_evicted, evicted_bytes

        num_evicted, evicted_bytes = await self._do(write)
        self._num_evicted += num_evicted
        self._evicted_bytes += evicted_bytes
        if time.monotonic() >= self._next_log:
            self._log_evicted()

    def _log_evicted(self) -> None:
        """Tells what has been dropped since the last time: a full store drops with each call."""
        if not self._num_evicted:
            return
        _log.warning(
            "dropped the oldest %s stored responses (%s bytes) to make room for new ones; all of "
            "them may have %s bytes (--responses-max-bytes)",
            f"{self._num_evicted:,}",
            f"{self._evicted_bytes:,}",
            f"{self._max_bytes:,}",
        )
        self._num_evicted = self._evicted_bytes = 0
        self._next_log = time.monotonic() + _LOG_SECONDS

    async def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """A response of its owner; None if there is none, or no more."""

        def read(database: sqlite3.Connection, _: object) -> StoredResponse | None:
            found = database.execute(
                "SELECT response, items FROM responses WHERE id = ? AND owner = ? AND expires > ?",
                (response_id, owner, time.time()),
            ).fetchone()
            return None if found is None else StoredResponse(*map(json.loads, found))

        is_running = response_id in self.running
        found = await self._do(read)
        if found is None or is_running or found.status not in _UNFINISHED:
            return found
        return StoredResponse(found.response | {"status": "failed", "error": _LOST}, found.items)

    async def delete(self, response_id: str, owner: str) -> bool:
        """Drops a response of its owner; False if there is none."""

        def drop(database: sqlite3.Connection, sizes: Counter[str]) -> bool:
            num, _ = _drop(database, sizes, "id = ? AND owner = ?", response_id, owner)
            return num > 0

        return await self._do(drop)

    async def close(self) -> None:
        """Ends what runs in the background, and closes the file."""
        for task in [*self.running.values()]:
            task.cancel()
        if self.running:
            await asyncio.wait(self.running.values())
        self._log_evicted()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._database.close)
        self._thread.shutdown(wait=False)

    async def _do(self, work: Callable[[sqlite3.Connection, Counter[str]], T]) -> T:
        """Does work in a transaction. The sizes that it changes are those of a copy until then.

        Raises:
            UnavailableError: SQLite cannot do it.
        """

        def transact() -> T:
            sizes = self._sizes.copy()
            try:
                with self._database:
                    result = work(self._database, sizes)
            except sqlite3.Error as error:
                raise UnavailableError(
                    f"the store of responses cannot be used: {error}; {_UNSTORED}"
                ) from error
            self._sizes = sizes
            return result

        return await asyncio.get_running_loop().run_in_executor(self._thread, transact)


def _open(path: Path) -> tuple[sqlite3.Connection, Counter[str], int]:
    """The database, how many bytes each owner has in it, and how many have not expired."""
    # The file holds conversations: SQLite would let the umask decide who reads it.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    database = sqlite3.connect(path, timeout=1, check_same_thread=False)
    try:
        _check_own(database)
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA secure_delete = ON")
        database.executescript(_SCHEMA)
        sizes: Counter[str] = Counter()
        kept = 0
        for owner, num_bytes, fresh_bytes in database.execute(
            f"SELECT owner, SUM({_SIZE}), SUM(({_SIZE}) * (expires > ?)) FROM responses "
            "GROUP BY owner",
            (time.time(),),
        ):
            sizes[owner] = num_bytes
            kept += fresh_bytes
        return database, sizes, kept
    except sqlite3.Error:
        database.close()
        raise


def _check_own(database: sqlite3.Connection) -> None:
    """Raises sqlite3.Error: the file is of another program, whose tables are not to be changed."""
    tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    columns = [row[1] for row in database.execute("PRAGMA table_info(responses)")]
    if tables and (tables != [("responses",)] or columns != _COLUMNS):
        raise sqlite3.DatabaseError("it is a database of something else; name a new file")


def _drop(
    database: sqlite3.Connection,
    sizes: Counter[str],
    where: str,
    *values: object,
    enough: float = math.inf,
) -> tuple[int, int]:
    """Drops responses, one after the other, until those dropped have ``enough`` bytes.

    Returns:
        How many, and their bytes.
    """
    # Not by RETURNING, which SQLite has from 3.35 on only: distributions have older ones.
    found = database.execute(f"SELECT id, owner, {_SIZE} FROM responses WHERE {where}", values)
    chosen, total = [], 0
    for row in found:
        chosen.append(row)
        total += row[2]
        if total >= enough:
            break
    found.close()
    for response_id, owner, num_bytes in chosen:
        database.execute("DELETE FROM responses WHERE id = ?", (response_id,))
        sizes[owner] -= num_bytes
        if not sizes[owner]:
            del sizes[owner]
    return len(chosen), total
