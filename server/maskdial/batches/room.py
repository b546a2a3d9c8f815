"""Room: how much of the folder the files and batches of each owner take, and may take."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from maskdial.errors import OverloadedError

LEAST_BYTES = 2**18
"""A file, or a batch, counts as so many bytes at least: there cannot be any number of them."""

_RECORD_WEIGHT = 64
"""What is known of a batch is in memory, and is read when the server starts; so it counts for
more."""


class Room:
    """The bytes of everything in the folder, by its owner. Used on the event loop only.

    While it is shared, each owner may take half of what the others leave. So none fills the folder
    for all, however many there are.

    Args:
        limit: bytes of all of them.
        is_shared: whether there may be several owners; asked each time, as keys come and go.
    """

    def __init__(self, limit: int, is_shared: Callable[[], bool]) -> None:
        self._limit = limit
        self._is_shared = is_shared
        self._taken: Counter[str] = Counter()

    def take(self, owner: str, num_bytes: int) -> None:
        """Has bytes count that are there already, such as results."""
        self._taken[owner] += num_bytes

    def give_back(self, owner: str, num_bytes: int) -> None:
        """Has them count no more."""
        self._taken[owner] -= num_bytes
        if not self._taken[owner]:
            del self._taken[owner]

    def check(self, owner: str, num_bytes: int) -> None:
        """Refuses what does not fit any more.

        Raises:
            OverloadedError: it does not.
        """
        own = self._taken[owner] + num_bytes
        left = self._limit - (self._taken.total() - self._taken[owner])
        if own > left:
            raise OverloadedError(
                f"the server's files have {self._limit:,} bytes together at most "
                "(--batch-max-dir-bytes); delete some, or wait until some expire",
                retry_after=60,
            )
        if own > left // 2 and self._is_shared():
            raise OverloadedError(
                f"this key's files and batches would have {own:,} bytes, and may have half of what "
                f"others leave, {left // 2:,} (--batch-max-dir-bytes); delete some, or wait until "
                "some expire",
                retry_after=60,
            )

    @contextmanager
    def growing(self, owner: str) -> "Iterator[Growing]":
        """What is being received: it counts as it comes, until the end of the block."""
        growing = Growing(self, owner)
        try:
            growing.grow_to(0)
            yield growing
        finally:
            self.give_back(owner, growing.num_bytes)


class Growing:
    """Something that is being received."""

    def __init__(self, room: Room, owner: str) -> None:
        self._room = room
        self._owner = owner
        self.num_bytes = 0

    def grow_to(self, num_bytes: int) -> None:
        """Counts all that has come by now.

        Raises:
            OverloadedError: that does not fit.
        """
        added = counted(num_bytes) - self.num_bytes
        if added > 0:
            self._room.check(self._owner, added)
            self._room.take(self._owner, added)
            self.num_bytes += added


def counted(num_bytes: int, record_bytes: int = 0) -> int:
    """As how many bytes a file or batch counts."""
    return max(num_bytes, _RECORD_WEIGHT * record_bytes, LEAST_BYTES)
