"""Vectors in fewer bits: one byte for each dimension, or one bit.

As sentence-transformers' `quantize_embeddings`, whose ranges are fixed here: a range taken from the
texts of a request would give the same text another vector in another request.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

OutputDtype = Literal["float", "int8", "uint8", "binary", "ubinary"]
"""What a vector consists of, by the names of Voyage and Cohere."""

INTEGERS = frozenset[OutputDtype]({"int8", "uint8"})
"""Those whose range is that of vectors of length 1."""

_STEP = np.float32(2) / 255  # of the range from -1 to 1


def quantized(vectors: NDArray[np.float32], dtype: OutputDtype) -> NDArray[Any]:
    """Vectors in another type.

    Integers divide the range from -1 to 1 into 256 parts, numbered from 0 (uint8) or -128 (int8).
    Bits say which dimensions are above 0, eight to a byte, the first one highest; ``binary`` is
    these bytes less 128, as int8.

    Args:
        vectors: float32 (num_texts, dimension); for integers of length 1.
        dtype: the type.

    Returns:
        (num_texts, dimension), or for bits (num_texts, ceil(dimension / 8)): float32, int8 or
        uint8.
    """
    if dtype == "float":
        return vectors
    if dtype in INTEGERS:
        parts: NDArray[Any] = np.floor((vectors + np.float32(1)) / _STEP).clip(0, 255)
        return parts.astype(np.uint8) if dtype == "uint8" else (parts - 128).astype(np.int8)
    bits: NDArray[Any] = np.packbits(vectors > 0, axis=-1)
    return bits if dtype == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
