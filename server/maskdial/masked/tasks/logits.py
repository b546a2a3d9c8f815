"""Arithmetic on logits that several tasks share. All of it in float64, row by row: a text's scores
do not depend on what else is in the batch.
"""

import numpy as np
from numpy.typing import NDArray

from maskdial.elementary import exp, log_sigmoid
from maskdial.errors import InferenceError


def finite(logits: NDArray[np.float32], what: str = "logits") -> NDArray[np.float64]:
    """Logits of any shape in float64; refuses a number that is not finite.

    Raises:
        InferenceError: one of them is infinite or not a number.
    """
    if not np.isfinite(logits).all():
        raise InferenceError(f"the model returned {what} that are not finite numbers")
    return logits.astype(np.float64)


def softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities along the last axis, float64 in the shape of the logits."""
    exponents = exp(values - values.max(axis=-1, keepdims=True, initial=-np.inf))
    probabilities: NDArray[np.float64] = exponents / exponents.sum(axis=-1, keepdims=True)
    return probabilities


def sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logistic function of each element, float64, without overflow."""
    return exp(log_sigmoid(values))


def count_windows(num_tokens: int, room: int, stride: int) -> int:
    """Windows of ``room`` tokens that cover a text whose neighbors share ``stride`` tokens; at
    least one.
    """
    return 1 + max(0, -(-(num_tokens - room) // (room - stride)))
