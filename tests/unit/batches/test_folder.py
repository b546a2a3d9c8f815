"""The folder of the Batch API: what in it is the server's, and is removed, and what is not."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from maskdial.batches.files import FileStore, new_file_id
from maskdial.batches.folder import own_names
from maskdial.batches.jobs import JobStore
from maskdial.batches.room import Room
from maskdial.batches.storage import Storage, new_id
from maskdial.errors import ConfigError


def everything(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def clean(folder: Path) -> int:
    """Opens a folder as a server does that starts; returns how many strays it has removed."""
    storage = Storage(folder)
    try:
        room = Room(2**30, lambda: False)
        files, jobs = FileStore(storage, room), JobStore(storage, room)
        return files.remove_strays(()) + jobs.remove_strays()
    finally:
        storage.close()


@pytest.mark.parametrize(
    "name",
    [
        "photo.jpg",
        ".bashrc",
        "work/thesis/chapter.tex",
        "files/photo.jpg",
        "files/notes.json",
        "files/FILE/inside",
        "files/FILE.txt",
        "batches/BATCH",
        "work/BATCH.tex",
        "lock/a",
        "work",
    ],
)
def test_a_folder_with_anything_else_is_refused_and_left_as_it_is(
    tmp_path: Path, name: str
) -> None:
    # Ids are made here: the processes that share the tests have to know them by the same names.
    name = name.replace("FILE", new_file_id()).replace("BATCH", new_id("batch_"))
    home = tmp_path / "home"
    (home / name).parent.mkdir(parents=True)
    (home / name).write_bytes(b"mine")
    (tmp_path / "link").symlink_to(home)
    before = everything(home)
    for folder in (home, tmp_path / "link"):
        with pytest.raises(ConfigError, match="has something else in it, such as"):
            Storage(folder)
    assert everything(home) == before


def test_a_lock_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"1234\n")
    with pytest.raises(ConfigError, match="such as lock;"):
        Storage(tmp_path)
    assert (tmp_path / "lock").read_bytes() == b"1234\n"


def test_a_link_in_the_place_of_a_file_is_not_the_servers(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"mine")
    (tmp_path / "home" / "files").mkdir(parents=True)
    (tmp_path / "home" / "files" / new_file_id()).symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="something else"):
        Storage(tmp_path / "home")


@pytest.mark.parametrize(
    "prepare",
    [
        lambda folder: None,
        lambda folder: folder.mkdir(),
        lambda folder: (folder / "lost+found").mkdir(parents=True),
        # One of a version that did not mark them.
        lambda folder: (
            [(folder / name).mkdir(parents=True) for name in ("files", "work")]
            and (folder / "lock").touch()
            and (folder / "files" / new_file_id()).touch()
        ),
    ],
)
def test_an_empty_folder_is_taken_and_marked(
    tmp_path: Path, prepare: Callable[[Path], object]
) -> None:
    folder = tmp_path / "home"
    prepare(folder)
    clean(folder)
    assert b"batches" in (folder / "lock").read_bytes()


def test_only_names_of_its_own_are_removed(tmp_path: Path) -> None:
    clean(tmp_path)
    strays = [
        tmp_path / "files" / new_file_id(),
        tmp_path / "files" / f"{new_file_id()}.partial",
        tmp_path / "files" / f"{new_file_id()}.json.partial",
        tmp_path / "batches" / f"{new_id('batch_')}.json.partial",
    ]
    for path in strays:
        path.write_bytes(b"x")
    others = [tmp_path / "files" / "photo.jpg", tmp_path / "batches" / "notes.json"]
    others += [tmp_path / "work" / "thesis" / "a.tex", tmp_path / "mine"]
    others += [tmp_path / "files" / new_file_id() / "inside", tmp_path / "work" / new_file_id()]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"{}")
    assert clean(tmp_path) == len(strays)
    assert not any(path.exists() for path in strays)
    assert all(path.exists() for path in others)


def test_names_of_its_own_are_of_the_right_kind(tmp_path: Path) -> None:
    clean(tmp_path)
    folder = tmp_path / "work" / new_id("batch_")
    folder.mkdir()
    (tmp_path / "work" / new_id("batch_")).write_bytes(b"a file")
    (tmp_path / "work" / new_id("batch_")).symlink_to(tmp_path / "files")
    assert list(own_names(tmp_path / "work")) == [folder]


def test_a_fifo_as_lock_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(ConfigError, match="such as lock;"):
        Storage(tmp_path)
