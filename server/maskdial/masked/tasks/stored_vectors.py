"""Vectors of tokens that a client has stored, in the types in which vectors are returned."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskdial.errors import ValidationError
from maskdial.masked.tasks.quantized import INTEGERS, OutputDtype, restored

Stored = str | Sequence[Sequence[float]]
"""A document: a list of numbers for each token, or the bytes of all of them as base64."""

SECONDS_PER_NUMBER = 50e-9
MAX_NUMBERS = 2**24
"""Of a document, in memory while it is compared: 64 MiB, and twice as much to read bits."""
_LARGEST = 1e9  # products of larger numbers may overflow
_TYPES = {"float": "<f4", "int8": "i1", "uint8": "u1", "binary": "i1", "ubinary": "u1"}


@dataclass(frozen=True, slots=True)
class StoredVectors:
    """Documents, each as the vectors of its tokens.

    Attributes:
        documents: as they are stored.
        dtype: what their vectors consist of.
        scale: of int8 and uint8: what a step is worth, so that 0 stays 0; None: they divide the
            range from -1 to 1, as `quantized` makes them.
    """

    documents: Sequence[Stored]
    dtype: OutputDtype = "float"
    scale: float | None = None

    @property
    def seconds(self) -> float:
        """Estimate of how long they take to read."""
        sizes = (
            len(each) if isinstance(each, str) else sum(map(len, each)) for each in self.documents
        )
        return sum(sizes) * SECONDS_PER_NUMBER

    def read(self, dimension: int) -> list[NDArray[Any]]:
        """The vectors of each document as they are stored, (num_tokens, numbers of a vector).

        They are `restored` one document at a time: bits take 32 times as much memory then.

        Raises:
            ValidationError: one has none, or vectors of another size or type.
        """
        if self.scale is not None and self.dtype not in INTEGERS:
            raise ValidationError("only int8 and uint8 have a scale", field="vectors.scale")
        found = []
        for index, document in enumerate(self.documents):
            try:
                found.append(self._rows(document, dimension))
            except ValueError as error:
                raise ValidationError(str(error), field=f"vectors.documents[{index}]") from None
        return found

    def restored(self, stored: NDArray[Any], dimension: int) -> NDArray[np.float32]:
        """The vectors of a document that was read, float32 (num_tokens, dimension)."""
        return restored(stored, self.dtype, dimension, self.scale)

    def _rows(self, document: Stored, dimension: int) -> NDArray[Any]:
        """What is stored of a document, (num_tokens, numbers of a vector), in its type."""
        is_packed = self.dtype in ("binary", "ubinary")
        width = math.ceil(dimension / 8) if is_packed else dimension
        kind = np.dtype(_TYPES[self.dtype])
        wanted = f"{width} numbers of the type {self.dtype}, for {dimension} dimensions"
        if isinstance(document, str):
            try:
                content = base64.b64decode(document, validate=True)
            except ValueError:  # among them binascii.Error
                raise ValueError("must be base64, or a list of vectors") from None
            if not content or len(content) % (width * kind.itemsize):
                raise ValueError(f"has {len(content):,} bytes; each vector has {wanted}")
            rows: NDArray[Any] = np.frombuffer(content, kind).reshape(-1, width)
        else:
            if not document:
                raise ValueError("has no vectors")
            for at, row in enumerate(document):
                if len(row) != width:
                    raise ValueError(f"vector {at} has {len(row)} numbers; each has {wanted}")
            numbers = np.array(document, np.float64)
            with np.errstate(invalid="ignore", over="ignore"):
                rows = numbers.astype(kind)
            if kind.kind != "f" and not np.array_equal(rows, numbers):
                raise ValueError(f"has numbers that are no {kind.name}")
        if kind.kind == "f" and not (np.abs(rows) <= _LARGEST).all():
            raise ValueError(f"has numbers that are not finite, or beyond {_LARGEST:g}")
        if len(rows) * dimension > MAX_NUMBERS:
            raise ValueError(
                f"has {len(rows):,} vectors; at most {MAX_NUMBERS // dimension:,} are compared"
            )
        return rows
