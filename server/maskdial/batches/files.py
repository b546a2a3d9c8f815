"""FileStore: what clients have uploaded, and what their batches have given."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from maskdial.batches.folder import own_names
from maskdial.batches.output import write_whole
from maskdial.batches.room import Room, counted
from maskdial.batches.storage import Storage, encode_record, new_id, records
from maskdial.errors import ConfigError, NotFoundError, UnavailableError

Purpose = Literal["batch", "batch_output"]

EXPIRY_SECONDS = 30 * 86_400
"""After so long a file is removed, unless it says otherwise; as OpenAI's."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file.

    ``owner`` is the name of the key that it belongs to, empty without keys. Times are in seconds
    since 1970.
    """

    id: str
    owner: str
    num_bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose


class FileStore:
    """The files of a folder. On the event loop only; the disk is written in the storage's thread.

    Args:
        storage: the folder.
        room: in which they count.
        clock: gives seconds since 1970.

    Raises:
        ConfigError: a record cannot be read.
    """

    def __init__(
        self, storage: Storage, room: Room, clock: Callable[[], float] = time.time
    ) -> None:
        self._storage = storage
        self._room = room
        self._clock = clock
        self._files: dict[str, StoredFile] = {}
        there = {path.name for path in own_names(storage.files)}
        try:
            for record, _ in records(storage.files):
                file = StoredFile(**record)
                if file.id in there:
                    self.note(file)
        except TypeError as error:
            raise ConfigError(f"a record in {storage.files} is of another version") from error

    def path(self, file_id: str) -> Path:
        """Where its content is."""
        return self._storage.files / file_id

    def get(self, file_id: str, owner: str, field: str = "id") -> StoredFile:
        """A file of an owner; ``field`` is where the request names it.

        Raises:
            NotFoundError: there is none, or it is another one's.
        """
        file = self._files.get(file_id)
        if file is None or file.owner != owner or file.expires_at <= self._clock():
            raise NotFoundError("there is no file with this id", field=field)
        return file

    def of(self, owner: str) -> list[StoredFile]:
        """All files of an owner, the oldest first."""
        now = self._clock()
        return [
            file for file in self._files.values() if file.owner == owner and file.expires_at > now
        ]

    def expired(self) -> list[StoredFile]:
        """Those whose time is over."""
        now = self._clock()
        return [file for file in self._files.values() if file.expires_at <= now]

    def keep(
        self,
        source: Path,
        file_id: str,
        *,
        owner: str,
        filename: str,
        purpose: Purpose,
        expiry: int,
    ) -> Callable[[], StoredFile]:
        """What takes a file into the folder, to be run in the storage's thread, and `note` noted.

        It may be repeated: a file that was taken before is left as it is.
        """
        return partial(
            self._keep, source, file_id, owner, filename, purpose, int(self._clock()), expiry
        )

    def _keep(
        self,
        source: Path,
        file_id: str,
        owner: str,
        filename: str,
        purpose: Purpose,
        now: int,
        expiry: int,
    ) -> StoredFile:
        path = self.path(file_id)
        if source.exists():
            source.replace(path)
        size = path.stat().st_size
        file = StoredFile(file_id, owner, size, now, now + expiry, filename, purpose)
        write_whole(_record_path(path), encode_record(asdict(file)))
        return file

    def note(self, file: StoredFile) -> None:
        """Has a file count that was taken into the folder."""
        if file.id not in self._files:
            self._room.take(file.owner, counted(file.num_bytes))
        self._files[file.id] = file

    async def delete(self, file: StoredFile) -> None:
        """Removes a file.

        Raises:
            UnavailableError: it cannot be removed.
        """
        path = self.path(file.id)

        def remove() -> None:
            _record_path(path).unlink(missing_ok=True)
            path.unlink(missing_ok=True)

        # At once, so that no batch begins with it meanwhile.
        if self._files.pop(file.id, None) is None:
            return
        self._room.give_back(file.owner, counted(file.num_bytes))
        try:
            await self._storage.run(remove)
        except UnavailableError:
            self.note(file)
            raise

    def remove_strays(self, wanted: Iterable[str]) -> int:
        """Removes what is no file: the beginnings of uploads that never ended, before a restart.

        Args:
            wanted: ids of files that are about to become some.

        Returns:
            How many there were.
        """
        known = {*self._files, *wanted}
        strays = [
            path
            for path in own_names(self._storage.files)
            if path.name.removesuffix(".json") not in known
        ]
        for path in strays:
            path.unlink()
        return len(strays)


def new_file_id() -> str:
    """A new id of a file, which begins as those of OpenAI do."""
    return new_id("file-")


def _record_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")
