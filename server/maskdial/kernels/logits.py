"""VocabularyKernels: a sampler's passes over whole rows of logits, by the library of kernels."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SUMMARY: dict[str, type[np.generic]] = {
    "best": np.int64,
    "max_logits": np.float32,
    "sum_exp": np.float64,
}
"""Outputs of rewritten causal graphs; `maskdial.runtime.logits.SummarizedLogits` describes them."""

_POINTER, _SIZE, _ID = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
_FLOAT, _DOUBLE = ctypes.c_float, ctypes.c_double


class VocabularyKernels:
    """Passes over rows of logits in a third of NumPy's time, or less. Not thread-safe.

    All instruction sets give the same bits, and a row's results depend on that row only.

    Args:
        library: the file of the kernels.
        vocab_size: the length of the rows, at least 1.
    """

    def __init__(self, library: Path, vocab_size: int) -> None:
        # Keeps the GIL: a row takes 10 to 100 microseconds, and another thread that has
        # meanwhile taken the lock gives it back after 5 milliseconds at the latest.
        loaded = ctypes.PyDLL(str(library))
        self._processor = _function(loaded, "processor", _POINTER)()
        self._summarize = _function(
            loaded, "summarize", None, _POINTER, _POINTER, _SIZE, _SIZE, *(_POINTER,) * 3
        )
        drawing = _FLOAT, _FLOAT, _SIZE, _DOUBLE, _FLOAT, _DOUBLE
        self._draw = _function(
            loaded, "draw", _ID, _POINTER, _POINTER, _SIZE, *drawing, _POINTER, _POINTER
        )
        self._find_greatest = _function(
            loaded, "find_greatest", _SIZE, _POINTER, _POINTER, _SIZE, _SIZE, _POINTER
        )
        self._vocab_size = vocab_size
        self._weights = np.empty(vocab_size, np.float32)
        self._found = np.empty(2 * vocab_size, np.int64)
        self._weights_at, self._found_at = _address(self._weights), _address(self._found)
        self._make_room(1)

    def summarize(self, logits: NDArray[np.float32]) -> list[tuple[int, float, float]]:
        """For each row of logits (num_rows, vocab_size): the first token with the greatest one,
        that logit, and the sum of e to the power of each logit's distance from it.

        The greatest one is NaN if any is. The sum is 0 unless it is finite.
        """
        logits = np.ascontiguousarray(logits)
        num_rows = len(logits)
        if num_rows > len(self._best):
            self._make_room(num_rows)
        self._summarize(
            self._processor, self._check(logits), num_rows, self._vocab_size, *self._summary_at
        )
        return list(
            zip(
                self._best[:num_rows].tolist(),
                self._max_logits[:num_rows].tolist(),
                self._sum_exp[:num_rows].tolist(),
                strict=True,
            )
        )

    def draw(
        self,
        scores: NDArray[np.float32],
        greatest: float,
        u: float,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> int:
        """Draws a token by its score (vocab_size,): the one at which the cumulative share of the
        candidates' weights passes ``u``, in [0, 1).

        Args:
            greatest: the maximum score, finite. Scores are not NaN; those of -inf are not drawn.
            temperature, top_k, top_p, min_p: as of `SamplingParams`, in this order.
        """
        token_id: int = self._draw(
            self._processor,
            self._check(scores),
            self._vocab_size,
            greatest,
            temperature,
            top_k,
            top_p,
            min_p,
            u,
            self._weights_at,
            self._found_at,
        )
        return token_id

    def greatest_k(self, scores: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        """The tokens with the k greatest scores (vocab_size,) and with those equal to the k-th,
        ascending; 1 <= k <= vocab_size.
        """
        found = self._find_greatest(
            self._processor, self._check(scores), self._vocab_size, k, self._found_at
        )
        return self._found[:found].copy()

    def _make_room(self, num_rows: int) -> None:
        self._best = np.empty(num_rows, np.int64)
        self._max_logits = np.empty(num_rows, np.float32)
        self._sum_exp = np.empty(num_rows, np.float64)
        self._summary_at = _address(self._best), _address(self._max_logits), _address(self._sum_exp)

    def _check(self, scores: NDArray[np.float32]) -> int:
        """The address of rows that can be read."""
        if scores.dtype != np.float32 or not scores.flags.c_contiguous:
            raise ValueError("scores are contiguous and of float32")
        if scores.shape[-1] != self._vocab_size:
            raise ValueError(f"rows of {scores.shape[-1]} scores; expected {self._vocab_size}")
        return _address(scores)


def _function(library: ctypes.PyDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = library[f"maskdial_{name}"]
    function.restype, function.argtypes = result, arguments
    return function


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])  # array.ctypes takes three times as long
