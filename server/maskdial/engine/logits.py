"""Arithmetic on rows of logits over a vocabulary, row by row: a row's results do not depend on the
others.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from maskdial.errors import InferenceError
from maskdial.kernels.logits import VocabularyKernels


def log_normalizer(logits: NDArray[np.float32]) -> tuple[float, float]:
    """The maximum of logits, float (vocab_size,), and the sum of their exponentials relative to it.

    Raises:
        InferenceError: the logits leave no finite sum.
    """
    largest = logits.max()
    with np.errstate(invalid="ignore"):  # infinities are caught below
        total = np.exp(logits - largest).sum(dtype=np.float64)
    if not np.isfinite(total):
        raise InferenceError("the model returned logits that are not finite numbers")
    return float(largest), float(total)


def summarize(
    logits: NDArray[np.float32], kernels: VocabularyKernels | None
) -> Iterator[tuple[int, float]]:
    """For each row of logits (num_rows, vocab_size), its first greatest token, and the natural
    logarithm of the sum of its exponentials.

    Args:
        logits: the rows.
        kernels: of this vocabulary, in a quarter of NumPy's time; None for NumPy.

    Raises:
        InferenceError: the logits leave no finite sum.
    """
    if kernels is None:
        for row in logits:
            largest, total = log_normalizer(row)
            yield int(row.argmax()), largest + math.log(total)
        return
    for best, largest, total in kernels.summarize(logits):
        if not total:
            raise InferenceError("the model returned logits that are not finite numbers")
        yield best, largest + math.log(total)


def largest_indices(
    values: NDArray[np.float32] | NDArray[np.float64],
    k: int,
    kernels: VocabularyKernels | None = None,
) -> NDArray[np.int64]:
    """Indices of the k largest values, largest first, ties by index; sorts only those k.

    ``kernels`` are those of a vocabulary that has the values, float32, one for each token.
    """
    chosen = np.arange(len(values))
    if kernels is not None:
        chosen = kernels.greatest_k(values.astype(np.float32, copy=False), k)
    elif k < len(values):
        kth = np.partition(values, len(values) - k)[len(values) - k]
        above = np.flatnonzero(values > kth)
        chosen = np.concatenate([above, np.flatnonzero(values == kth)[: k - len(above)]])
    return chosen[np.argsort(-values[chosen], kind="stable")][:k]
