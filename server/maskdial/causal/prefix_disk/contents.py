"""Contents: whose prompts a folder of prefixes has, for those who look after it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from maskdial.causal.prefix_disk import record
from maskdial.causal.prefix_disk.record import DamagedError, Owner
from maskdial.causal.prefix_disk.store import record_files


@dataclass(frozen=True, slots=True)
class Item:
    """A record in a folder.

    Attributes:
        path: its file.
        owner: whose prompt it is of; None of a file that is damaged, unfinished, or of another
            version.
        num_bytes: its size.
        used_at: when it was last used, in seconds since the epoch; servers note that every half
            minute.
    """

    path: Path
    owner: Owner | None
    num_bytes: int
    used_at: float

    def remove(self) -> None:
        """Removes the file. A server that has the folder notices when it would read it."""
        self.path.unlink(missing_ok=True)


def items(folder: Path) -> Iterator[Item]:
    """The records of a folder, in no order; also beside a server that has it.

    Raises:
        OSError: it cannot be read.
    """
    for path, parsed, is_file in record_files(folder):
        if parsed is None or not is_file:
            continue
        owner = None
        with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
            stat = path.stat()
            with contextlib.suppress(DamagedError, PermissionError):
                owner = record.read_header(path).owner
            yield Item(path, owner, stat.st_size, stat.st_mtime)
