"""Tensors of the open inference protocol: texts in; texts, numbers and vectors out.

As JSON, or as bytes after it (Triton's binary tensor data extension). A BYTES tensor has for each
element its length in 4 bytes, little-endian, and then its UTF-8.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskdial.config import MAX_BATCH_INPUTS
from maskdial.errors import ValidationError, shortened

LENGTH_BYTES = 4
"""Of an element's length."""

_DATATYPES = {"float32": "FP32", "int64": "INT64"}


@dataclass(frozen=True, slots=True)
class TextTensor:
    """An input: texts in row-major order.

    Attributes:
        name: of the input.
        texts: as many as the shape says.
    """

    name: str
    texts: Sequence[str]


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """An output: an array of float32 or int64, or texts.

    Attributes:
        name: of the output.
        shape: of the tensor.
        values: of that shape; texts in row-major order.
    """

    name: str
    shape: Sequence[int]
    values: NDArray[np.float32] | NDArray[np.int64] | Sequence[str]

    @classmethod
    def of(cls, name: str, values: Any) -> "OutputTensor":
        """A tensor of an array."""
        return cls(name, values.shape, values)

    @property
    def datatype(self) -> str:
        """The protocol's name of it."""
        if isinstance(self.values, np.ndarray):
            return _DATATYPES[self.values.dtype.name]
        return "BYTES"

    def to_list(self) -> list[Any]:
        """The elements in row-major order."""
        if isinstance(self.values, np.ndarray):
            flat: list[Any] = self.values.ravel().tolist()
            return flat
        return list(self.values)

    def to_bytes(self) -> bytes:
        """The elements as the binary extension has them."""
        if isinstance(self.values, np.ndarray):
            return (
                np.ascontiguousarray(self.values)
                .astype(self.values.dtype.newbyteorder("<"))
                .tobytes()
            )
        encoded = [text.encode() for text in self.values]
        return b"".join(len(each).to_bytes(LENGTH_BYTES, "little") + each for each in encoded)


def check_header(name: str, datatype: str, shape: Sequence[int]) -> int:
    """How many texts a tensor has.

    Raises:
        ValidationError: none, more than any request may have, or not texts.
    """
    if datatype != "BYTES":
        raise ValidationError(
            f"input {shortened(name)!r} has the datatype {shortened(datatype)!r}; models here read "
            "texts, which are BYTES"
        )
    if not shape or min(shape) < 1:
        raise ValidationError(
            f"input {shortened(name)!r} has the shape {shortened(str(list(shape)))}; it must have "
            "at least one text, as in [1]"
        )
    number = math.prod(shape)
    if number > MAX_BATCH_INPUTS:  # before anything of it is read
        raise ValidationError(
            f"input {shortened(name)!r} has {number:,} elements by its shape; an input may have "
            f"{MAX_BATCH_INPUTS:,}"
        )
    return number


def read_list(name: str, num_texts: int, data: Sequence[Any]) -> TextTensor:
    """A tensor whose elements are a JSON list, nested or not.

    Raises:
        ValidationError: they are too few or too many, or no texts.
    """
    values = list(data)
    while values and isinstance(values[0], list):
        if not all(isinstance(each, list) for each in values):
            break
        values = [value for each in values for value in each]
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise ValidationError(f"element {index} of input {shortened(name)!r} must be a string")
    _check_number(name, num_texts, len(values))
    return TextTensor(name, values)


def read_bytes(name: str, num_texts: int, content: bytes) -> TextTensor:
    """A tensor whose elements are bytes.

    Raises:
        ValidationError: they are too few or too many, or not UTF-8.
    """
    texts: list[str] = []
    place = 0
    while place < len(content):
        start = place + LENGTH_BYTES
        place = start + int.from_bytes(content[place:start], "little")
        if start > len(content) or place > len(content):
            raise ValidationError(
                f"element {len(texts)} of input {shortened(name)!r} ends beyond the tensor's "
                f"{len(content):,} bytes; each element begins with its length in 4 bytes"
            )
        if len(texts) == num_texts:
            raise ValidationError(
                f"input {shortened(name)!r} has more elements than the {num_texts:,} of its shape"
            )
        try:
            texts.append(content[start:place].decode())
        except UnicodeDecodeError:
            raise ValidationError(
                f"element {len(texts)} of input {shortened(name)!r} is not UTF-8"
            ) from None
    _check_number(name, num_texts, len(texts))
    return TextTensor(name, texts)


def _check_number(name: str, expected: int, number: int) -> None:
    if number != expected:
        raise ValidationError(
            f"input {shortened(name)!r} has {number:,} elements; its shape says {expected:,}"
        )
