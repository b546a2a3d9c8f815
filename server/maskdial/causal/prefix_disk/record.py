"""Record: one file of the prefix cache on disk, and the checks without which none is believed.

A record holds the keys and values of a block of tokens, or the states of recurrent layers after
one. It is written once, under a name that follows from its content's key, and never changed::

    magic        8 bytes; the last one is the version of this format
    header_size  uint32, bytes of the header with its padding
    header_crc   uint32, CRC-32 of the header
    payload_crc  uint32, CRC-32 of the payload
    (4 bytes)    zero
    payload_sum  uint64, the payload's 64-bit words added up, what is left over as zeros
    header       JSON, padded with spaces so that the payload begins at a multiple of 64
    payload      the array's bytes

The checksums find what a crash, a disk or a stray write did. They are no signature: who can write
to the folder can write a record that passes.
"""

import json
import os
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Part = Literal["block", "states"]
"""Keys and values, or the states of recurrent layers."""

_MAGIC = b"mdprefx\x01"
_PRELUDE = struct.Struct("<8sIIIIQ")
_ALIGNMENT = 64
_MAX_HEADER = 16 * 1024  # bytes; names of keys and models are short
_NAME = re.compile(rf"([0-9a-f]{{64}})\.({'|'.join(get_args(Part))})(\.partial)?")
_CHUNK = 2**20  # bytes that are summed at a time, while they are in the processor's cache


class DamagedError(Exception):
    """A file that is not the record that its name says; the message says why."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose prompts a record is of: a model as it is served, and the name of a request's key."""

    model: str
    key: str


@dataclass(frozen=True, slots=True)
class Header:
    """What a record says of itself.

    Attributes:
        digest: of the block, 32 bytes.
        previous: of the block before it; empty for the first one.
        part: what it holds.
        owner: whose it is.
        dtype: NumPy's name of the elements' type.
        shape: of the array.
    """

    digest: bytes
    previous: bytes
    part: Part
    owner: Owner
    dtype: str
    shape: tuple[int, ...]

    @property
    def file_name(self) -> str:
        return file_name(self.digest, self.part)

    @classmethod
    def of(
        cls, digest: bytes, previous: bytes, part: Part, owner: Owner, array: NDArray[Any]
    ) -> "Header":
        """That of an array."""
        return cls(digest, previous, part, owner, array.dtype.name, array.shape)

    def to_json(self) -> bytes:
        fields = {
            "digest": self.digest.hex(),
            "previous": self.previous.hex(),
            "part": self.part,
            "model": self.owner.model,
            "key": self.owner.key,
            "dtype": self.dtype,
            "shape": self.shape,
        }
        return json.dumps(fields).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Header":
        """Raises: ValueError, KeyError, TypeError: it is none."""
        fields = json.loads(text)
        return cls(
            bytes.fromhex(fields["digest"]),
            bytes.fromhex(fields["previous"]),
            fields["part"],
            Owner(str(fields["model"]), str(fields["key"])),
            str(fields["dtype"]),
            tuple(map(int, fields["shape"])),
        )


def file_name(digest: bytes, part: Part) -> str:
    """The name of a block's record."""
    return f"{digest.hex()}.{part}"


def parse_name(name: str) -> tuple[bytes, Part, bool] | None:
    """The digest, the part, and whether it was being written; None for the name of no record."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    part: Part = "block" if match[2] == "block" else "states"
    return bytes.fromhex(match[1]), part, match[3] is not None


def file_size(header: Header, array: NDArray[Any]) -> int:
    """The bytes of a record."""
    return _PRELUDE.size + len(_padded(header)) + array.nbytes


def write(folder: Path, header: Header, array: NDArray[Any]) -> None:
    """Writes a record.

    It appears under its name at once and whole, as far as this system goes on running. After a
    crash of the system it may be torn, as nothing is synced: its checksums will tell.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    payload = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    text = _padded(header)
    crc, total = _checksums(payload)
    prelude = _PRELUDE.pack(_MAGIC, len(text), zlib.crc32(text), crc, 0, total)
    target = folder / header.file_name
    partial = target.with_name(f"{target.name}.partial")
    try:
        # What has the name already is a rest of this server's; no link is followed or kept.
        partial.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(partial, flags, 0o600), "wb", buffering=0) as file:
            for piece in (prelude, text, payload):
                _write_all(file.fileno(), memoryview(piece))
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_header(path: Path) -> Header:
    """The header of a record, which fits the file's name and size. The payload is not read.

    Raises:
        OSError: the file cannot be read.
        DamagedError: it is no record of this format.
    """
    with _opened(path) as file:
        return _read_head(file.fileno(), path)[0]


def read(
    path: Path, previous: bytes, dtype: "np.dtype[Any]", shape: tuple[int, ...]
) -> NDArray[Any]:
    """The array of a record, in memory of its own.

    It is not mapped: a file that is cut while it is mapped ends the process, and one that is
    written to changes after its checksums were compared.

    Args:
        path: its file.
        previous: the digest of the block before it, as the caller knows it.
        dtype: the elements' type that the caller expects.
        shape: likewise.

    Raises:
        OSError: the file cannot be read.
        DamagedError: it is no such record, or not as it was written.
    """
    with _opened(path) as file:
        header, crc, total = _read_head(file.fileno(), path)
        if (header.previous, header.dtype, header.shape) != (previous, dtype.name, shape):
            raise DamagedError("it is of another chain of blocks, or of other arrays")
        array = np.empty(shape, dtype)
        payload = array.reshape(-1).view(np.uint8).data
        if _read_all(file.fileno(), payload) != len(payload):
            raise DamagedError("it was cut")
    if _checksums(payload) != (crc, total):
        raise DamagedError("its checksum is another")
    return array


def _padded(header: Header) -> bytes:
    text = header.to_json()
    return text + b" " * (-(len(text) + _PRELUDE.size) % _ALIGNMENT)


def _opened(path: Path) -> Any:
    """A file that is no link, and that nothing waits for (a pipe's name would block)."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return open(os.open(path, flags), "rb", buffering=0)


def _read_head(file: int, path: Path) -> tuple[Header, int, int]:
    """The header of an open record, and its payload's checksums; the payload comes next."""
    prelude = os.read(file, _PRELUDE.size)
    if len(prelude) < _PRELUDE.size or prelude[:7] != _MAGIC[:7]:
        raise DamagedError("it does not begin as a record does")
    magic, size, header_crc, crc, _, total = _PRELUDE.unpack(prelude)
    if magic != _MAGIC:
        raise DamagedError(f"it has version {magic[7]} of the format, and this server {_MAGIC[7]}")
    text = os.read(file, size) if size <= _MAX_HEADER else b""
    if len(text) != size or zlib.crc32(text) != header_crc:
        raise DamagedError("its header is damaged")
    try:
        header = Header.from_json(text)
        num_bytes = int(np.prod(header.shape, dtype=object)) * np.dtype(header.dtype).itemsize
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError("its header is not one of a record") from error
    if header.file_name != path.name:
        raise DamagedError("it has the name of another")
    if os.fstat(file).st_size != _PRELUDE.size + size + num_bytes:
        raise DamagedError("it has not the size that it says")
    return header, crc, total


def _checksums(payload: memoryview) -> tuple[int, int]:
    """The CRC-32 of some bytes, and the sum of their 64-bit words, modulo 2**64.

    Two of different kinds: a server that runs for years reads more than 2**32 blocks.
    """
    crc, total = 0, 0
    for start in range(0, len(payload), _CHUNK):
        piece = payload[start : start + _CHUNK]
        crc = zlib.crc32(piece, crc)
        whole = len(piece) // 8 * 8
        total += int(np.frombuffer(piece[:whole], "<u8").sum(dtype=np.uint64))
        total += int.from_bytes(piece[whole:], "little")
    return crc, total % 2**64


def _write_all(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def _read_all(file: int, target: memoryview) -> int:
    """Fills memory from a file; returns how many bytes came, fewer at the file's end only."""
    done = 0
    while done < len(target):
        num_read = os.readv(file, [target[done:]])
        if not num_read:
            break
        done += num_read
    return done
