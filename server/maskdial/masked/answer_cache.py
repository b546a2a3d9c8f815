"""AnswerCache: what passes have given for texts, for the next text that is equal.

An answer does not depend on what shares a text's pass, so a kept one has the bits that another pass
would give. That holds for models that are batch-invariant; others have no such cache.
"""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

# Of an entry beside its numbers: digest, array, and their places, as tracemalloc counts them.
_ENTRY_BYTES = 448


class AnswerCache:
    """Arrays by digest, up to a number of bytes; evicts the least recently used first.

    Not thread-safe.

    Args:
        max_bytes: maximum size of all entries in bytes, what Python takes for each included.
        shared: whether texts of different keys share answers.
    """

    def __init__(self, max_bytes: int, *, shared: bool = False) -> None:
        self.shared = shared
        self.num_bytes = 0
        """Bytes of all entries."""
        self._max_bytes = max_bytes
        self._answers: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()  # oldest use first

    def get(self, key: bytes) -> NDArray[np.float32] | None:
        """The answer of a digest, read-only; None if there is none. That is a use of it."""
        answer = self._answers.get(key)
        if answer is not None:
            self._answers.move_to_end(key)
        return answer

    def put(self, key: bytes, answer: NDArray[np.float32]) -> None:
        """Keeps a copy of an answer, unless it has no room of its own or is there."""
        num_bytes = answer.nbytes + _ENTRY_BYTES
        if key in self._answers or num_bytes > self._max_bytes:
            return
        while self.num_bytes + num_bytes > self._max_bytes:
            _, oldest = self._answers.popitem(last=False)
            self.num_bytes -= oldest.nbytes + _ENTRY_BYTES
        kept = answer.copy()  # the pass's array holds the answers of others, too
        kept.flags.writeable = False
        self._answers[key] = kept
        self.num_bytes += num_bytes

    def clear(self) -> None:
        """Drops all of them."""
        self._answers.clear()
        self.num_bytes = 0
