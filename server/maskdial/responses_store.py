"""ResponseStore: responses of `/v1/responses` and their conversations, in a file of SQLite's."""

import asyncio
import json
import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from maskdial.errors import ConfigError

T = TypeVar("T")

_PURGE_SECONDS = 60.0
_UNFINISHED = ("queued", "in_progress")
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
"""


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
    """Keeps responses for a time. One server uses a file at a time.

    Args:
        path: of the file, which is made if there is none; only its owner may read it.
        max_age: seconds after which a response is dropped.

    Attributes:
        running: the tasks of responses that are written in the background, by their ids.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: Path, max_age: float) -> None:
        self._max_age = max_age
        self._next_purge = 0.0
        self.running: dict[str, asyncio.Task[None]] = {}
        # SQLite's calls wait for the disk; one after the other, so that they need no lock.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses-store")
        try:
            self._database = self._thread.submit(_open, path).result()
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
        """
        now = time.time()
        row = (
            response["id"],
            owner,
            now + self._max_age,
            response["status"],
            json.dumps(response),
            json.dumps(items),
        )

        def write(database: sqlite3.Connection) -> None:
            if now >= self._next_purge:
                self._next_purge = now + _PURGE_SECONDS
                database.execute("DELETE FROM responses WHERE expires <= ?", (now,))
            database.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)", row)

        await self._do(write)

    async def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """A response of its owner; None if there is none, or no more."""

        def read(database: sqlite3.Connection) -> StoredResponse | None:
            found = database.execute(
                "SELECT response, items FROM responses WHERE id = ? AND owner = ? AND expires > ?",
                (response_id, owner, time.time()),
            ).fetchone()
            return None if found is None else StoredResponse(*map(json.loads, found))

        return await self._do(read)

    async def delete(self, response_id: str, owner: str) -> bool:
        """Drops a response of its owner; False if there is none."""

        def drop(database: sqlite3.Connection) -> bool:
            found = database.execute(
                "DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)
            )
            return found.rowcount > 0

        return await self._do(drop)

    async def close(self) -> None:
        """Ends what runs in the background, and closes the file."""
        for task in [*self.running.values()]:
            task.cancel()
        if self.running:
            await asyncio.wait(self.running.values())
        await asyncio.get_running_loop().run_in_executor(self._thread, self._database.close)
        self._thread.shutdown(wait=False)

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def transact() -> T:
            with self._database:
                return work(self._database)

        return await asyncio.get_running_loop().run_in_executor(self._thread, transact)


def _open(path: Path) -> sqlite3.Connection:
    # The file holds conversations: SQLite would let the umask decide who reads it.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    database = sqlite3.connect(path, timeout=1, check_same_thread=False)
    try:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA secure_delete = ON")
        database.executescript(_SCHEMA)
        _fail_unfinished(database)
    except sqlite3.Error:
        database.close()
        raise
    return database


def _fail_unfinished(database: sqlite3.Connection) -> None:
    """Responses that were being written when the server ended are never finished."""
    error = {"code": "server_error", "message": "the server ended before the response did"}
    marks = ", ".join("?" * len(_UNFINISHED))
    with database:
        rows = database.execute(
            f"SELECT id, response FROM responses WHERE status IN ({marks})", _UNFINISHED
        ).fetchall()
        for response_id, content in rows:
            failed = json.loads(content) | {"status": "failed", "error": error}
            database.execute(
                "UPDATE responses SET status = 'failed', response = ? WHERE id = ?",
                (json.dumps(failed), response_id),
            )
