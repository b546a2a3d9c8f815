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


def restored(
    values: NDArray[Any], dtype: OutputDtype, dimension: int, scale: float | None = None
) -> NDArray[np.float32]:
    """Vectors of what `quantized` made of them, as near as can be.

    A part of the range is its middle; a bit is 1 or -1, and the vector has the length 1.

    Args:
        values: as `quantized` returns them.
        dtype: the type.
        dimension: of a vector.
        scale: of integers that are multiples of it instead.

    Returns:
        float32 (num_texts, dimension).
    """
    if dtype == "float":
        return values.astype(np.float32)
    if dtype in INTEGERS:
        if scale is not None:
            return values.astype(np.float32) * np.float32(scale)
        parts = values.astype(np.float32) + np.float32(0.5 if dtype == "uint8" else 128.5)
        middles: NDArray[np.float32] = parts * _STEP - np.float32(1)
        return middles
    packed = values if dtype == "ubinary" else (values.astype(np.int16) + 128).astype(np.uint8)
    bits = np.unpackbits(packed, axis=-1, count=dimension).astype(np.float32)
    signs: NDArray[np.float32] = (bits * 2 - 1) / np.sqrt(np.float32(dimension))
    return signs
