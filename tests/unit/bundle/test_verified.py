"""Hashes that are remembered: never those of a file that was written to since."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from maskdial.bundle import bundle, verified
from maskdial.bundle.bundle import file_sha256, load_bundle
from maskdial.bundle.starters import STARTER_FOLDER
from maskdial.bundle.verified import known_sha256, remember_sha256
from maskdial.errors import BundleError

Counted = Callable[[Path], str]


@pytest.fixture
def computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were hashed. Those that were just written may be remembered."""
    monkeypatch.setenv("MASKDIAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(verified, "_TICK_NS", 0)
    files: list[Path] = []

    def compute(path: Path) -> str:
        files.append(path)
        return file_sha256(path)

    monkeypatch.setattr(bundle, "file_sha256", compute)
    return files


def sha256(path: Path) -> str:
    return known_sha256(path, bundle.file_sha256)


def test_a_file_is_hashed_until_it_changes(computed: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"some weights")
    found = sha256(file)
    assert [sha256(file), sha256(tmp_path / "." / "weights")] == [found] * 2
    assert len(computed) == 1

    # Other bytes, of the same length, with the times of before: only the last change is another
    before = file.stat()
    with file.open("r+b") as opened:
        opened.write(b"S")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
        before.st_ino,
        before.st_size,
        before.st_mtime_ns,
    )
    assert sha256(file) not in ("", found)
    assert len(computed) == 2

    replacing = tmp_path / "other"
    replacing.write_bytes(b"some weights")
    os.replace(replacing, file)
    assert sha256(file) == found
    assert len(computed) == 3


def test_what_was_just_written_is_not_remembered(
    computed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be written to again in the same tick of the clock."""
    monkeypatch.setattr(verified, "_TICK_NS", 10**18)
    file = tmp_path / "weights"
    file.write_bytes(b"some weights")
    assert sha256(file) == sha256(file)
    assert len(computed) == 2
    assert not (tmp_path / "cache").exists()


def test_its_writer_may_have_hashed_it(
    computed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may be renamed meanwhile; the file may not be written to."""
    folder, place = tmp_path / "new", tmp_path / "place"
    folder.mkdir()
    (folder / "weights").write_bytes(b"some weights")
    found = file_sha256(folder / "weights")
    folder.rename(place)
    remember_sha256(place / "weights", found)
    assert sha256(place / "weights") == found
    assert not computed
    with (place / "weights").open("r+b") as opened:
        opened.write(b"S")
    assert sha256(place / "weights") != found
    assert len(computed) == 1
    monkeypatch.setattr(verified, "_TICK_NS", 10**18)
    (place / "weights").write_bytes(b"other weights")
    remember_sha256(place / "weights", "not its hash")
    assert sha256(place / "weights") == file_sha256(place / "weights")


def test_a_file_that_is_written_to_while_it_is_hashed(computed: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"some weights")

    def compute(path: Path) -> str:
        found = bundle.file_sha256(path)
        with path.open("r+b") as opened:
            opened.write(b"S")
        return found

    known_sha256(file, compute)
    assert sha256(file) == file_sha256(file)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"stamp": 1}', b"\xff"])
def test_a_damaged_memory(computed: list[Path], tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"some weights")
    found = sha256(file)
    (memory,) = (tmp_path / "cache" / ".verified").iterdir()
    memory.write_bytes(content)
    assert [sha256(file), sha256(file)] == [found] * 2
    assert len(computed) == 2


def test_a_cache_that_cannot_be_written(
    computed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("MASKDIAL_CACHE", str(tmp_path / "file" / "cache"))
    file = tmp_path / "weights"
    file.write_bytes(b"some weights")
    assert sha256(file) == sha256(file)
    assert len(computed) == 2


def test_weights_of_a_bundle(
    computed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "_LARGE", 2**20)
    folder = tmp_path / "bundle"
    shutil.copytree(STARTER_FOLDER / "sentiment", folder)
    data = folder / "model.onnx.data"
    for _ in range(2):
        load_bundle("m", folder)
    assert computed.count(data) == 1
    before = data.stat()
    with data.open("r+b") as opened:
        opened.seek(100_000)
        opened.write(b"other")
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(BundleError, match=r"model\.onnx\.data has changed since it was exported"):
        load_bundle("m", folder)
