"""Fatbin: leaves the machine code of one architecture in a library of CUDA kernels.

ONNX Runtime's CUDA provider has its kernels six times, and a GPU runs one of them. The others are
taken out of their containers, whose ends become zeros: nothing else moves, and zeros compress to
nothing.

The layout (a container's header, then entries with headers of their own) is that of NVIDIA's
tools, as read out of ONNX Runtime's libraries; NVIDIA's cuobjdump lists what it lists.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

_MAGIC = 0xBA55ED50
_SECTION = ".nv_fatbin"
_ALIGNMENT = 8
_SIZE = 8  # where a container's header has the size of its entries


class Container(NamedTuple):
    """Where a container begins, its entries, and the architecture of each, such as 90."""

    start: int
    entries: tuple[slice, ...]
    architectures: tuple[int, ...]


def keep(library: bytearray, architecture: int) -> None:
    """Takes out the code of all other architectures.

    Args:
        library: a 64-bit ELF file; changed in place.
        architecture: 90 for compute capability 9.0.

    Raises:
        ValueError: it is no such library, or has no code for the architecture.
    """
    found = list(containers(library))
    has = {each for container in found for each in container.architectures}
    if architecture not in has:
        there = ", ".join(map(str, sorted(has))) or "none"
        raise ValueError(f"no kernels for architecture {architecture}; there are: {there}")
    for start, entries, architectures in found:
        pairs = zip(entries, architectures, strict=True)
        kept = b"".join(library[entry] for entry, each in pairs if each == architecture)
        first, end = entries[0].start, entries[-1].stop
        library[first:end] = kept + bytes(end - first - len(kept))
        struct.pack_into("<Q", library, start + _SIZE, len(kept))


def containers(library: bytes | bytearray) -> Iterator[Container]:
    """All containers that are not empty.

    Raises:
        ValueError: it is no 64-bit ELF file with CUDA kernels.
    """
    start, end = _section(library)
    while start < end:
        magic, _, header, size = struct.unpack_from("<IHHQ", library, start)
        if magic != _MAGIC:  # padding between containers
            start += _ALIGNMENT
            continue
        container, entry = start, start + header
        start = entry + size
        entries: list[slice] = []
        architectures: list[int] = []
        while entry < start:
            _, _, header, size = struct.unpack_from("<HHIQ", library, entry)
            entries.append(slice(entry, entry + header + size))
            architectures += struct.unpack_from("<I", library, entry + 28)
            entry += header + size
        if entry != start:
            raise ValueError("its kernels are in a layout that is not known")
        if entries:
            yield Container(container, tuple(entries), tuple(architectures))


def _section(library: bytes | bytearray) -> tuple[int, int]:
    """Where the kernels begin and end."""
    if library[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    size, number, names = struct.unpack_from("<HHH", library, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", library, table + i * size) for i in range(number)]
    for section in sections:
        at = sections[names][4] + section[0]
        if library[at : library.index(0, at)] == _SECTION.encode():
            return section[4], section[4] + section[5]
    raise ValueError("no CUDA kernels in it")
