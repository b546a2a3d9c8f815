"""ResponseStore: responses of `/v1/responses` and their conversations, in a file of SQLite's."""

import asyncio
import json
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

_PURGE_SECONDS = 60.0
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
    it: nobody can take it from all others.

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
        self._next_purge = 0.0
        self.running: dict[str, asyncio.Task[None]] = {}
        # SQLite's calls wait for the disk; one after the other, so that they need no lock.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses-store")
        try:
            self._database, self._sizes = self._thread.submit(_open, path).result()
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise ConfigError(
                f"the store of responses {path} cannot be used: {error}; one server uses it at a "
                "time (--responses-store)"
            ) from error

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

        def write(database: sqlite3.Connection, sizes: Counter[str]) -> None:
            if now >= self._next_purge:
                self._next_purge = now + _PURGE_SECONDS
                _drop(database, sizes, "expires <= ?", now)
            _drop(database, sizes, "id = ?", response_id)
            while (excess := sizes.total() + num_bytes - self._max_bytes) > 0:
                ((largest, _),) = sizes.most_common(1)
                _drop_oldest(database, sizes, largest, excess)
            database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)
            sizes[owner] += num_bytes

        await self._do(write)

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
            return _drop(database, sizes, "id = ? AND owner = ?", response_id, owner)

        return await self._do(drop)

    async def close(self) -> None:
        """Ends what runs in the background, and closes the file."""
        for task in [*self.running.values()]:
            task.cancel()
        if self.running:
            await asyncio.wait(self.running.values())
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


def _open(path: Path) -> tuple[sqlite3.Connection, Counter[str]]:
    """The database, and how many bytes each owner has in it."""
    # The file holds conversations: SQLite would let the umask decide who reads it.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    database = sqlite3.connect(path, timeout=1, check_same_thread=False)
    try:
        _check_own(database)
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA secure_delete = ON")
        database.executescript(_SCHEMA)
        sizes = database.execute(f"SELECT owner, SUM({_SIZE}) FROM responses GROUP BY owner")
        return database, Counter(dict(sizes.fetchall()))
    except sqlite3.Error:
        database.close()
        raise


def _check_own(database: sqlite3.Connection) -> None:
    """Raises sqlite3.Error: the file is of another program, whose tables are not to be changed."""
    tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    columns = [row[1] for row in database.execute("PRAGMA table_info(responses)")]
    if tables and (tables != [("responses",)] or columns != _COLUMNS):
        raise sqlite3.DatabaseError("it is a database of something else; name a new file")


def _drop(database: sqlite3.Connection, sizes: Counter[str], where: str, *values: object) -> bool:
    """Drops responses; whether there were any."""
    # Not by RETURNING, which SQLite has from 3.35 on only: distributions have older ones.
    dropped = database.execute(
        f"SELECT owner, {_SIZE} FROM responses WHERE {where}", values
    ).fetchall()
    database.execute(f"DELETE FROM responses WHERE {where}", values)
    for owner, num_bytes in dropped:
        sizes[owner] -= num_bytes
        if not sizes[owner]:
            del sizes[owner]
    return bool(dropped)


def _drop_oldest(
    database: sqlite3.Connection, sizes: Counter[str], owner: str, excess: int
) -> None:
    """Drops the oldest responses of an owner, as many as have so many bytes, or all."""
    found = database.execute(
        f"SELECT id, {_SIZE} FROM responses WHERE owner = ? ORDER BY expires, id", (owner,)
    )
    chosen = []
    for response_id, num_bytes in found:
        chosen.append(response_id)
        excess -= num_bytes
        if excess <= 0:
            break
    found.close()
    for response_id in chosen:
        _drop(database, sizes, "id = ?", response_id)
