"""GGUF files: the header, checked, and the tensors, mapped.

The layout is that of ``docs/gguf.md`` in ggml. Nothing in a header is believed: counts and lengths
are compared with the bytes that are left before anything is allocated, so that a damaged or hostile
file costs neither time nor memory.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from maskdial_export.checkpoint.gguf.types import OTHER_TYPES, TYPES, TYPES_BY_NAME, TensorType
from maskdial_export.errors import ExportError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_NUMBERS: Mapping[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_MIN_ENTRY = 8 + 4 + 1  # bytes: a key's length, a type and a value
_MIN_TENSOR = 8 + 4 + 8 + 4 + 8  # a name's length, the number of dimensions, one, type and offset
# Far above what models have: the largest vocabularies have 260,000 tokens and 515,000 merges
_MAX_ENTRIES = 2**16
_MAX_TENSORS = 2**16
_MAX_STRINGS = 2**21
_MAX_TEXT_BYTES = 2**24
_MAX_NAME_BYTES = 2**10
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the file. ``shape`` is in the order of torch, rows first."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    num_bytes: int
    buffer: memoryview = field(repr=False, compare=False)

    @property
    def is_vector(self) -> bool:
        return len(self.shape) == 1

    @property
    def num_rows(self) -> int:
        """How many there are; of a vector, its entries."""
        return self.shape[0] if self.is_vector else math.prod(self.shape[:-1])

    def with_rows(self, rows: NDArray[np.uint8], kind: str | None = None) -> "StoredTensor":
        """A tensor of other rows of bytes, and of another type if ``kind`` names one."""
        of = self.type if kind is None else TYPES_BY_NAME[kind]
        columns = rows.shape[1] // of.num_bytes * of.block_size
        shape = (columns,) if self.is_vector else (len(rows), columns)
        return StoredTensor(self.name, shape, of, 0, rows.size, memoryview(rows.data).cast("B"))

    def rows(self) -> NDArray[np.uint8]:
        """The bytes of each row: (rows, bytes)."""
        part = self.buffer[self.offset : self.offset + self.num_bytes]
        row_bytes = self.shape[-1] // self.type.block_size * self.type.num_bytes
        return np.frombuffer(part, np.uint8).reshape(-1, row_bytes)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A file's metadata and tensors. Arrays of numbers are numpy's, others are lists."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def read_file(path: Path) -> GGUFFile:
    """Reads the header of a GGUF file, and checks where its tensors are.

    Raises:
        ExportError: the file is not GGUF, of another version or byte order, incomplete or damaged.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] != MAGIC:
            raise ExportError(f"{path} is not a GGUF file: it does not begin with GGUF")
        if len(start) < 8:
            raise ExportError(f"{path} is incomplete: it ends after {len(start)} bytes")
        buffer = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return _Header(path, buffer).read()


class _Header:
    """Reads values one after the other."""

    def __init__(self, path: Path, buffer: memoryview) -> None:
        self._path = path
        self._buffer = buffer
        self._place = len(MAGIC)
        self._num_strings = 0

    def read(self) -> GGUFFile:
        version = self._number("<I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            if swapped in _VERSIONS:
                raise ExportError(
                    f"{self._path} is written for big-endian machines; convert it with "
                    "gguf_convert_endian.py of llama.cpp"
                )
            raise ExportError(
                f"{self._path} has version {version} of GGUF; versions 2 and 3 are supported"
            )
        num_tensors, num_entries = self._number("<Q"), self._number("<Q")
        self._check_count(num_tensors, _MIN_TENSOR, _MAX_TENSORS, "tensors")
        self._check_count(num_entries, _MIN_ENTRY, _MAX_ENTRIES, "entries of metadata")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._name("a key")
            if key in metadata:
                self._fail(f"the key {key!r} occurs twice")
            metadata[key] = self._value(self._number("<I"), repr(key))
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment & alignment - 1:
            self._fail(f"general.alignment is {alignment!r}, which is no power of two")
        infos = [self._tensor_info() for _ in range(num_tensors)]
        start = -(-self._place // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                self._fail(f"the tensor {name!r} occurs twice")
            tensors[name] = self._tensor(name, shape, kind, start, offset, alignment)
        self._check_overlaps(tensors)
        return GGUFFile(self._path, metadata, tensors)

    def _fail(self, what: str) -> NoReturn:
        raise ExportError(f"{self._path} is damaged: {what}")

    def _take(self, num_bytes: int, what: str) -> memoryview:
        end = self._place + num_bytes
        if end > len(self._buffer):
            raise ExportError(
                f"{self._path} is incomplete or damaged: it ends within its header, after "
                f"{len(self._buffer):,} bytes, in {what}"
            )
        part = self._buffer[self._place : end]
        self._place = end
        return part

    def _number(self, kind: str) -> Any:
        return struct.unpack(kind, self._take(struct.calcsize(kind), "a number"))[0]

    def _check_count(self, count: int, min_bytes: int, limit: int, what: str) -> None:
        if count > min(limit, (len(self._buffer) - self._place) // min_bytes):
            self._fail(f"it claims {count:,} {what} in {len(self._buffer):,} bytes")

    def _text(self, what: str, limit: int = _MAX_TEXT_BYTES) -> str:
        length = self._number("<Q")
        if length > min(limit, len(self._buffer) - self._place):
            self._fail(f"{what} claims {length:,} bytes")
        try:
            return str(self._take(length, what), "utf-8")
        except UnicodeDecodeError:
            self._fail(f"{what} is not UTF-8")

    def _name(self, what: str) -> str:
        return self._text(what, _MAX_NAME_BYTES)

    def _value(self, kind: int, key: str) -> Any:
        if kind in _NUMBERS:
            return self._numbers(kind, 1)[0].item()
        if kind == _STRING:
            return self._text(key)
        if kind != _ARRAY:
            self._fail(f"{key} has the type {kind}, which does not exist")
        kind, count = self._number("<I"), self._number("<Q")
        if kind in _NUMBERS:
            self._check_count(count, np.dtype(_NUMBERS[kind]).itemsize, 2**63, f"values in {key}")
            return self._numbers(kind, count)
        if kind != _STRING:
            why = "which is not supported" if kind == _ARRAY else "which does not exist"
            self._fail(f"{key} is an array of the type {kind}, {why}")
        self._check_count(count, 8, _MAX_STRINGS - self._num_strings, f"texts in {key}")
        self._num_strings += count
        return [self._text(key) for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> NDArray[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize, "a value"), dtype)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._name("the name of a tensor")
        num_dimensions = self._number("<I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            self._fail(f"the tensor {name!r} has {num_dimensions:,} dimensions")
        shape = tuple(self._number("<Q") for _ in range(num_dimensions))[::-1]
        return name, shape, self._number("<I"), self._number("<Q")

    def _tensor(
        self, name: str, shape: tuple[int, ...], kind: int, start: int, offset: int, alignment: int
    ) -> StoredTensor:
        if kind not in TYPES:
            shown = OTHER_TYPES.get(kind, kind)
            raise ExportError(
                f"the tensor {name!r} of {self._path} has the type {shown}, which is not supported"
            )
        of = TYPES[kind]
        num_values = 1
        for size in shape:
            num_values *= size
        if num_values == 0 or shape[-1] % of.block_size:
            self._fail(f"the tensor {name!r} has the shape {shape}, which {of.name} cannot have")
        if offset % alignment:
            self._fail(f"the tensor {name!r} begins at {offset}, not at a multiple of {alignment}")
        num_bytes = num_values // of.block_size * of.num_bytes
        end = start + offset + num_bytes
        if end > len(self._buffer):
            raise ExportError(
                f"{self._path} is incomplete or damaged: the tensor {name!r} ends at byte "
                f"{end:,}, and the file has {len(self._buffer):,}"
            )
        return StoredTensor(name, shape, of, start + offset, num_bytes, self._buffer)

    def _check_overlaps(self, tensors: Mapping[str, StoredTensor]) -> None:
        ordered = sorted(tensors.values(), key=lambda each: each.offset)
        for first, second in pairwise(ordered):
            if first.offset + first.num_bytes > second.offset:
                self._fail(f"the tensors {first.name!r} and {second.name!r} overlap")
