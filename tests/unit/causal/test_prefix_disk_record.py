"""Records of the prefix cache: what was written comes back, and nothing else ever does."""

import errno
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from maskdial.causal.prefix_disk import record
from maskdial.causal.prefix_disk.record import DamagedError, Header, Owner, Part

DIGEST, PREVIOUS = bytes(range(32)), bytes(range(32, 64))
OWNER = Owner("mine", "alice")


def write(folder: Path, array: Any, part: Part = "block") -> Path:
    header = Header.of(DIGEST, PREVIOUS, part, OWNER, array)
    record.write(folder, header, array)
    path = folder / header.file_name
    assert path.stat().st_size == record.file_size(header, array)
    return path


def read(path: Path, array: Any) -> Any:
    return record.read(path, PREVIOUS, array.dtype, array.shape)


ARRAYS = arrays.arrays(
    st.sampled_from([np.float32, np.float16, np.int16, np.int8]),
    arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=9),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(array=ARRAYS, part=st.sampled_from(["block", "states"]))
def test_every_array_comes_back_to_the_last_bit(tmp_path: Path, array: Any, part: Part) -> None:
    path = write(tmp_path, array, part)
    found = read(path, array)
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert found.tobytes() == array.tobytes()
    header = record.read_header(path)
    assert (header.digest, header.previous, header.part) == (DIGEST, PREVIOUS, part)
    assert header.owner == OWNER


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(data=st.data())
def test_no_flipped_bit_goes_unnoticed(tmp_path: Path, data: st.DataObject) -> None:
    array = np.arange(50, dtype=np.float32)
    path = write(tmp_path, array)
    content = bytearray(path.read_bytes())
    bit = data.draw(st.integers(0, len(content) * 8 - 1))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    if 20 <= bit // 8 < 24:  # four bytes mean nothing
        assert read(path, array).tobytes() == array.tobytes()
    else:
        with pytest.raises(DamagedError):
            read(path, array)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_torn_file_is_believed(tmp_path: Path, data: st.DataObject) -> None:
    """It ends early, or pages of it were never written."""
    array = np.arange(5000, dtype=np.int16)
    path = write(tmp_path, array)
    content = path.read_bytes()
    cut = data.draw(st.integers(0, len(content) - 1))
    path.write_bytes(content[:cut])
    with pytest.raises(DamagedError):
        read(path, array)
    zeros = bytes(min(4096, len(content) - cut))
    torn = content[:cut] + zeros + content[cut + len(zeros) :]
    path.write_bytes(torn)
    if torn != content and torn[:20] + torn[24:] != content[:20] + content[24:]:
        with pytest.raises(DamagedError):
            read(path, array)


def test_words_that_change_places_are_noticed(tmp_path: Path) -> None:
    """The sum alone does not see it."""
    array = np.arange(16, dtype=np.int64)
    path = write(tmp_path, array)
    content = path.read_bytes()
    path.write_bytes(content[:-16] + content[-8:] + content[-16:-8])
    with pytest.raises(DamagedError, match="checksum"):
        read(path, array)


@pytest.mark.parametrize(
    ("previous", "dtype", "shape"),
    [
        (DIGEST, np.float32, (2, 3)),
        (b"", np.float32, (2, 3)),
        (PREVIOUS, np.int8, (2, 3)),
        (PREVIOUS, np.float32, (3, 2)),
        (PREVIOUS, np.float32, (6,)),
    ],
)
def test_another_array_is_not_taken_for_it(
    tmp_path: Path, previous: bytes, dtype: Any, shape: tuple[int, ...]
) -> None:
    path = write(tmp_path, np.zeros((2, 3), np.float32))
    with pytest.raises(DamagedError, match="another chain"):
        record.read(path, previous, np.dtype(dtype), shape)


def test_a_record_under_anothers_name(tmp_path: Path) -> None:
    array = np.zeros(4, np.float32)
    path = write(tmp_path, array)
    other = path.rename(tmp_path / record.file_name(PREVIOUS, "block"))
    with pytest.raises(DamagedError, match="name of another"):
        read(other, array)


def test_another_version_of_the_format(tmp_path: Path) -> None:
    array = np.zeros(4, np.float32)
    path = write(tmp_path, array)
    content = bytearray(path.read_bytes())
    content[7] = 9
    path.write_bytes(content)
    with pytest.raises(DamagedError, match="version 9"):
        read(path, array)


def test_gigabytes_of_zeros_are_refused_by_their_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / record.file_name(DIGEST, "block")
    with path.open("wb") as file:
        file.truncate(64 * 2**30)
    for attempt in (lambda: record.read_header(path), lambda: read(path, np.zeros(4))):
        with pytest.raises(DamagedError, match="does not begin"):
            attempt()


def test_a_record_that_grew_by_zeros(tmp_path: Path) -> None:
    array = np.zeros(4, np.float32)
    path = write(tmp_path, array)
    with path.open("r+b") as file:
        file.truncate(64 * 2**30)
    with pytest.raises(DamagedError, match="size"):
        read(path, array)


def test_links_and_pipes_are_not_opened(tmp_path: Path) -> None:
    array = np.zeros(4, np.float32)
    path = write(tmp_path, array)
    real = path.rename(tmp_path / "elsewhere")
    path.symlink_to(real)
    with pytest.raises(OSError, match="symbolic links"):
        read(path, array)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises((OSError, DamagedError)):
        read(path, array)


def test_a_link_in_its_place_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    array = np.zeros(4, np.float32)
    target = tmp_path / "precious"
    target.write_text("mine")
    name = record.file_name(DIGEST, "block")
    for each in (name, f"{name}.partial"):
        (tmp_path / each).symlink_to(target)
    path = write(tmp_path, array)
    assert not path.is_symlink()
    assert target.read_text() == "mine"
    assert read(path, array).tobytes() == array.tobytes()


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        path = write(tmp_path, np.zeros(4, np.float32))
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    written: list[int] = []

    def fill(file: int, data: Any) -> int:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(len(data))
        return real(file, data[: len(data) // 2 or 1])

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path, np.zeros(400, np.float32))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name",
    [
        "lock",
        "0" * 64,
        "0" * 63 + ".block",
        "0" * 64 + ".blocks",
        "A" * 64 + ".block",
        "0" * 64 + ".block.partial.partial",
        "0" * 64 + ".block\n",
    ],
)
def test_names_of_no_record(name: str) -> None:
    assert record.parse_name(name) is None


def test_names() -> None:
    assert record.parse_name(record.file_name(DIGEST, "states")) == (DIGEST, "states", False)
    assert record.parse_name(record.file_name(DIGEST, "block") + ".partial") == (
        DIGEST,
        "block",
        True,
    )
