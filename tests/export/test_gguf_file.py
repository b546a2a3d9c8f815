"""GGUF headers: what is damaged is refused with one sentence before anything is allocated."""

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from maskdial_export.checkpoint.gguf.file import read_file
from maskdial_export.errors import ExportError

MiB = 2**20


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(
    name: bytes = b"w", shape: tuple[int, ...] = (4, 2), kind: int = 0, offset: int = 0
) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def file(
    *parts: bytes, entries: int = 0, tensors: int = 0, version: int = 3, data: int = 64
) -> bytes:
    """A file with its parts in order, padding and ``data`` bytes of tensors."""
    content = b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + b"".join(parts)
    return content + bytes(-len(content) % 32) + bytes(data)


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + content


BAD = {
    "empty": (b"", "does not begin with GGUF"),
    "another format": (b"PK\x03\x04" + bytes(99), "does not begin with GGUF"),
    "the magic alone": (b"GGUF\x03", "it ends after 5 bytes"),
    "ends in the counts": (b"GGUF\x03\0\0\0\0\0", "it ends within its header, after 10 bytes"),
    "version 1": (file(version=1), "version 1 of GGUF; versions 2 and 3"),
    "version 9": (file(version=9), "version 9 of GGUF"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "written for big-endian machines"),
    "a million tensors": (file(tensors=10**6), "it claims 1,000,000 tensors in 96 bytes"),
    "2^60 entries": (file(entries=2**60), "entries of metadata in"),
    "a key of 2^60 bytes": (
        file(struct.pack("<Q", 2**60), entries=1),
        "a key claims 1,152,921,504,606,846,976 bytes",
    ),
    "a text of 2^60 bytes": (
        file(entry(b"k", 8, struct.pack("<Q", 2**60)), entries=1),
        "'k' claims 1,152,921,504,606,846,976 bytes",
    ),
    "a text that is none": (file(entry(b"k", 8, text(b"\xff")), entries=1), "'k' is not UTF-8"),
    "no such type": (
        file(entry(b"k", 13, b"\0"), entries=1),
        "'k' has the type 13, which does not",
    ),
    "an array of 2^60 numbers": (
        file(entry(b"k", 9, array(5, 2**60)), entries=1),
        "it claims 1,152,921,504,606,846,976 values in 'k'",
    ),
    "an array of 2^61 texts": (
        file(entry(b"k", 9, array(8, 2**61)), entries=1),
        "texts in 'k' in",
    ),
    "a nested array": (
        file(entry(b"k", 9, array(9, 1, array(4, 0))), entries=1),
        "'k' is an array of the type 9, which is not supported",
    ),
    "an array of no such type": (
        file(entry(b"k", 9, array(77, 1)), entries=1),
        "'k' is an array of the type 77, which does not exist",
    ),
    "a key twice": (
        file(*[entry(b"k", 0, b"\1")] * 2, entries=2),
        "the key 'k' occurs twice",
    ),
    "an alignment of 0": (
        file(entry(b"general.alignment", 4, bytes(4)), entries=1),
        "general.alignment is 0, which is no power of two",
    ),
    "an alignment that is a text": (
        file(entry(b"general.alignment", 8, text(b"32")), entries=1),
        "general.alignment is '32', which is no power of two",
    ),
    "a tensor twice": (
        file(tensor(), tensor(offset=32), tensors=2),
        "the tensor 'w' occurs twice",
    ),
    "no such type of tensor": (
        file(tensor(kind=99), tensors=1),
        "the tensor 'w' of {path} has the type 99, which is not supported",
    ),
    "a type with scales elsewhere": (
        file(tensor(kind=40), tensors=1),
        "the tensor 'w' of {path} has the type NVFP4, which is not supported",
    ),
    "no dimensions": (file(tensor(shape=()), tensors=1), "the tensor 'w' has 0 dimensions"),
    "a billion dimensions": (
        file(text(b"w") + struct.pack("<I", 10**9), bytes(64), tensors=1),
        "the tensor 'w' has 1,000,000,000 dimensions",
    ),
    "a dimension of 0": (file(tensor(shape=(0, 2)), tensors=1), "has the shape (2, 0)"),
    "half a block": (file(tensor(shape=(16, 2), kind=2), tensors=1), "which Q4_0 cannot have"),
    "sizes that overflow": (
        file(tensor(shape=(2**32, 2**32, 2**32)), tensors=1),
        "the file has",
    ),
    "misaligned": (file(tensor(offset=4), tensors=1), "begins at 4, not at a multiple of 32"),
    "an offset outside": (
        file(tensor(offset=2**40), tensors=1),
        "the tensor 'w' ends at byte 1,099,511,627,904, and the file has",
    ),
    "truncated data": (file(tensor(), tensors=1, data=31), "incomplete or damaged: the tensor 'w'"),
    "overlapping tensors": (
        file(tensor(shape=(16, 1)), tensor(b"v"), tensors=2),
        "the tensors 'w' and 'v' overlap",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    content, why = BAD[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ExportError) as caught:
            read_file(path)
        assert tracemalloc.get_traced_memory()[1] < MiB
    finally:
        tracemalloc.stop()
    assert why.format(path=path) in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("version", [2, 3])
def test_read(version: int, tmp_path: Path) -> None:
    """What the gguf package writes is read, and refused if it ends at any byte before."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("texts", ["a", "bc", "ü"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_bool("yes", True)
    writer.add_float32("float", 0.5)
    weights = np.arange(64, dtype=np.float32).reshape(2, 32)
    writer.add_tensor("w", weights)
    writer.add_tensor(
        "q",
        gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0),
        raw_dtype=gguf.GGMLQuantizationType.Q8_0,
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = path.read_bytes()
    path.write_bytes(content[:4] + struct.pack("<I", version) + content[8:])
    read = read_file(path)
    assert read.metadata["general.architecture"] == "llama"
    assert read.metadata["texts"] == ["a", "bc", "ü"]
    assert read.metadata["numbers"].tolist() == [1, 2, 3]
    assert (read.metadata["yes"], read.metadata["float"]) == (True, 0.5)
    assert read.tensors["q"].shape == (2, 32)
    np.testing.assert_array_equal(read.tensors["w"].rows().view(np.float32), weights)
    end = read.tensors["q"].offset + read.tensors["q"].num_bytes
    for length in (*range(len(content) - 200), end - 1):
        shorter = tmp_path / f"{length}.gguf"
        shorter.write_bytes(content[:length])
        with pytest.raises(ExportError):
            read_file(shorter)


def test_many_texts_are_refused(tmp_path: Path) -> None:
    """Ten million empty texts would take gigabytes as objects."""
    count = 10**7
    path = tmp_path / "model.gguf"
    path.write_bytes(file(entry(b"k", 9, array(8, count, bytes(8 * count))), entries=1))
    with pytest.raises(ExportError, match="it claims 10,000,000 texts in 'k'"):
        read_file(path)


def test_numbers_stay_in_the_file(tmp_path: Path) -> None:
    count = 10**7
    path = tmp_path / "model.gguf"
    path.write_bytes(file(entry(b"k", 9, array(6, count, bytes(4 * count))), entries=1))
    tracemalloc.start()
    try:
        assert len(read_file(path).metadata["k"]) == count
        assert tracemalloc.get_traced_memory()[1] < MiB
    finally:
        tracemalloc.stop()
