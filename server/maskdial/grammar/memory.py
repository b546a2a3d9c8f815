"""GrammarMemory: how large the grammars that wait or are in use may be together."""

import threading
import weakref
from collections import Counter

from maskdial.errors import OverloadedError
from maskdial.runtime.memory import return_free_memory

# Of a grammar's text. Compiled, an enumeration of words takes about 50 times as much.
MAX_BYTES = 16 * 2**20
MAX_BYTES_PER_CLIENT = MAX_BYTES // 2
# glibc keeps what was freed. It is asked to give it back whenever so much has been held and let go.
_TRIM_BYTES = 2**20


class Hold:
    """A grammar's share of the memory, for as long as anything refers to this object."""

    __slots__ = ("__weakref__",)


class GrammarMemory:
    """Counts grammars' bytes from the request until the last matcher is gone. Thread-safe."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        # A finalizer may run within any allocation of its own thread, the lock's holder included.
        self._lock = threading.RLock()
        self._num_released = 0

    @property
    def num_bytes(self) -> int:
        """Of the grammars that wait or are in use."""
        with self._lock:
            return self._held.total()

    def hold(self, client: str, num_bytes: int, *, unlimited: bool = False) -> Hold:
        """Makes room for a grammar.

        Args:
            client: whose request it is.
            num_bytes: the size of its text.
            unlimited: whether to count it only.

        Raises:
            OverloadedError: there is none.
        """
        with self._lock:
            of_client, of_all = self._held[client], self._held.total()
            fits = of_client + num_bytes <= MAX_BYTES_PER_CLIENT and of_all + num_bytes <= MAX_BYTES
            if not (fits or unlimited):
                raise OverloadedError(
                    f"the grammars of this client that wait or are in use have {of_client} bytes, "
                    f"and {of_all} in all; there is no room for {num_bytes} more; try again in a "
                    "moment, or send smaller grammars"
                )
            self._held[client] += num_bytes
        held = Hold()
        weakref.finalize(held, self._release, client, num_bytes).atexit = False
        return held

    def _release(self, client: str, num_bytes: int) -> None:
        with self._lock:
            self._held[client] -= num_bytes
            if not self._held[client]:
                del self._held[client]
            self._num_released += num_bytes
            trims = self._num_released >= _TRIM_BYTES
            if trims:
                self._num_released = 0
        if trims:
            _trim()


def _trim() -> None:
    """Gives free memory back to the system, on a thread of its own: it takes milliseconds."""
    threading.Thread(target=return_free_memory, name="maskdial-trim", daemon=True).start()
