"""The store of prefixes: its order, its limit, its restarts, and folders that are not as hoped."""

import errno
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maskdial.causal.prefix_disk import record
from maskdial.causal.prefix_disk import store as store_module
from maskdial.causal.prefix_disk.record import Header, Owner, Part
from maskdial.causal.prefix_disk.store import DiskStore
from maskdial.folder_lock import lock_folder
from maskdial.metrics import Metrics
from tests.disk import opened, until

OWNER = Owner("mine", "")
SHAPE = (4, 256)
TYPE = np.dtype(np.float32)


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def array(number: int) -> Any:
    return np.full(SHAPE, number, TYPE)


def put(store: DiskStore, number: int, previous: int | None = None, part: Part = "block") -> None:
    before = b"" if previous is None else digest(previous)
    data = array(number)
    store.write(Header.of(digest(number), before, part, OWNER, data), data)


def put_chain(store: DiskStore, numbers: range) -> None:
    for number in numbers:
        put(store, number, None if number == numbers.start else number - 1)
    until(lambda: store.size(digest(numbers[-1]), "block") > 0)


def get(store: DiskStore, number: int, previous: int | None = None) -> Any:
    before = b"" if previous is None else digest(previous)
    return store.read(digest(number), before, "block", TYPE, SHAPE)


def has(store: DiskStore, number: int) -> bool:
    return store.size(digest(number), "block") > 0


@pytest.fixture
def one() -> int:
    """The bytes of a block's file; a first one's has a little less."""
    data = array(0)
    return record.file_size(Header.of(digest(1), digest(0), "block", OWNER, data), data)


def test_what_was_written_is_read_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put_chain(store, range(5))
        put(store, 4, 3, "states")
    size = store.num_bytes
    with opened(tmp_path) as store:
        assert (store.num_blocks, store.num_bytes) == (5, size)
        assert size == sum(path.stat().st_size for path in tmp_path.iterdir())
        for number in range(5):
            found = get(store, number, number - 1 if number else None)
            assert found.tobytes() == array(number).tobytes()
        states = store.read(digest(4), digest(3), "states", TYPE, SHAPE)
        assert states is not None
        assert get(store, 9) is None


def test_closing_writes_what_waits(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number in range(100):
            put(store, number)
    with opened(tmp_path) as store:
        assert store.num_blocks == 100


def test_no_more_waits_than_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real = threading.Event(), record.write

    def wait(*arguments: Any) -> None:
        assert gate.wait(60)
        real(*arguments)

    monkeypatch.setattr(store_module, "_MAX_QUEUED", 10 * array(0).nbytes)
    monkeypatch.setattr(record, "write", wait)
    with opened(tmp_path) as store:
        put(store, 0)
        until(lambda: not store._queue)  # the thread has it
        for number in range(1, 50):
            put(store, number)
        gate.set()
        until(lambda: store.num_blocks == 11)
        put(store, 49)
        until(lambda: has(store, 49))


def test_the_least_recently_used_chain_goes_from_its_end(tmp_path: Path, one: int) -> None:
    with opened(tmp_path / "store", max_bytes=6 * one) as store:
        put_chain(store, range(3))
        put_chain(store, range(10, 13))
        store.use(digest(2))
        put_chain(store, range(20, 21))
        assert [n for n in range(30) if has(store, n)] == [0, 1, 2, 10, 11, 20]
        store.use(digest(11))
        put_chain(store, range(30, 32))
        assert [n for n in range(40) if has(store, n)] == [0, 10, 11, 20, 30, 31]
        assert 5 * one < store.num_bytes <= 6 * one
    files = (tmp_path / "store").iterdir()
    assert sum(path.stat().st_size for path in files) == store.num_bytes


def has_states(store: DiskStore, number: int) -> bool:
    return store.size(digest(number), "states") > 0


def test_states_of_earlier_turns_go_before_blocks(tmp_path: Path, one: int) -> None:
    """Also after a restart, by the times of their files."""
    folder = tmp_path / "store"
    with opened(folder) as store:
        put_chain(store, range(6))
        for number in (0, 2, 4):  # where the instructions end, and after two turns
            put(store, number, number - 1 if number else None, "states")
            until(lambda number=number: has_states(store, number))  # type: ignore[misc]
        store.use(digest(5), [digest(0), digest(4)])
    with opened(folder, max_bytes=9 * one) as store:
        put(store, 6, 5)
        until(lambda: has(store, 6))
        assert [n for n in range(9) if has_states(store, n)] == [0, 4]
        assert [n for n in range(9) if has(store, n)] == [*range(7)]
        files = [path for path in folder.iterdir() if path.name != "lock"]
        assert store.num_bytes == sum(path.stat().st_size for path in files)
        put(store, 2, 1, "states")  # they may come again
        until(lambda: has_states(store, 2))
        assert store.read(digest(2), digest(1), "states", TYPE, SHAPE) is not None


def test_a_clock_that_is_set_back_does_not_change_the_order(
    tmp_path: Path, one: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 2 * 10**18
    monkeypatch.setattr(time, "time_ns", lambda: now)
    with opened(tmp_path, max_bytes=7 * one) as store:
        put_chain(store, range(3))
        put_chain(store, range(10, 12))
        put(store, 11, 10, "states")
        until(lambda: has_states(store, 11))
        now -= 10**18  # 31 years
        store.use(digest(11), [digest(11)])
        put_chain(store, range(20, 23))
        assert [n for n in range(30) if has(store, n)] == [0, 10, 11, 20, 21, 22]
        assert has_states(store, 11)


def test_a_file_system_that_lies_about_sync(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a crash of the system, files have their names and sizes, and zeros or rests of others
    in them. Each is a miss.
    """
    with opened(tmp_path) as store:
        put_chain(store, range(5))
    path = {number: tmp_path / record.file_name(digest(number), "block") for number in range(5)}
    sizes = {number: each.stat().st_size for number, each in path.items()}
    path[1].write_bytes(bytes(sizes[1]))  # nothing of it was written: sparse
    whole = path[2].read_bytes()
    path[2].write_bytes(whole[:512] + bytes(sizes[2] - 512))  # a sector was
    path[3].write_bytes(whole[: sizes[3]].ljust(sizes[3], b"x"))  # blocks of another file
    path[4].write_bytes(b"")
    with opened(tmp_path) as store:
        assert get(store, 0) is not None
        assert not has(store, 1)
        for number in range(1, 5):
            assert get(store, number, number - 1) is None
        put_chain(store, range(5))
        assert get(store, 4, 3).tobytes() == array(4).tobytes()
    assert len(caplog.messages) <= 2


def test_gigabytes_of_zeros_cost_neither_memory_nor_time(tmp_path: Path) -> None:
    """Sparse files under names of records, and one whose header is right and whose size is not."""
    with opened(tmp_path) as store:
        put_chain(store, range(2))
    for number in range(50, 60):
        for part in ("block", "states"):
            with (tmp_path / f"{digest(number).hex()}.{part}").open("wb") as file:
                file.truncate(2**40)
    with (tmp_path / record.file_name(digest(1), "block")).open("r+b") as file:
        file.truncate(2**40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with opened(tmp_path, max_bytes=2**20) as store:
        assert [n for n in range(99) if has(store, n)] == [0]
        assert store.num_bytes < 2**20
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 * 2**10  # kilobytes
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) < 2**20


def test_random_use_against_the_folder(tmp_path: Path, one: int) -> None:
    """The limit holds at every moment, the chain of every block is whole, the sums are right."""
    rng = random.Random(3)
    folder = tmp_path / "store"
    chains = [range(start, start + rng.randint(1, 6)) for start in range(0, 100, 10)]
    for _ in range(5):
        with opened(folder, max_bytes=20 * one) as store:
            for _ in range(40):
                chain = rng.choice(chains)
                for number in chain[: rng.randint(1, len(chain))]:
                    put(store, number, None if number == chain.start else number - 1)
                    if rng.random() < 0.3:
                        store.use(digest(rng.choice(chain)))
                assert store.num_bytes <= 20 * one
            until(lambda store=store: not store._queue)  # type: ignore[misc]
        files = [path for path in folder.iterdir() if path.name != "lock"]
        assert store.num_bytes == sum(path.stat().st_size for path in files) <= 20 * one
        for chain in chains:
            held = [has(store, number) for number in chain]
            assert held == sorted(held, reverse=True)


def test_a_restart_keeps_the_order_of_use(tmp_path: Path, one: int) -> None:
    folder = tmp_path / "store"
    with opened(folder) as store:
        for start in (0, 10, 20):
            put_chain(store, range(start, start + 2))
        store.use(digest(1))
    with opened(folder, max_bytes=3 * one) as store:
        assert [n for n in range(30) if has(store, n)] == [0, 1, 20]


@pytest.mark.parametrize("when", [0, 2**33])
def test_times_of_a_wrong_clock_do_not_break_a_chain(tmp_path: Path, one: int, when: int) -> None:
    folder = tmp_path / "store"
    with opened(folder) as store:
        put_chain(store, range(6))
    rng = random.Random(when)
    for path in folder.iterdir():
        os.utime(path, (when + rng.randrange(1000),) * 2)
    with opened(folder, max_bytes=4 * one) as store:
        assert [n for n in range(6) if has(store, n)] == [0, 1, 2, 3]
        put_chain(store, range(10, 12))  # what is used now is newer than any time of the past
        assert [n for n in range(20) if has(store, n)] == [0, 1, 10, 11]


def test_a_damaged_block_is_a_miss_and_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    with opened(tmp_path, metrics=metrics) as store:
        put_chain(store, range(3))
        path = tmp_path / record.file_name(digest(1), "block")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        assert get(store, 1, 0) is None
        assert len(caplog.messages) == 1
        assert "is computed again" in caplog.text
        assert path.name in caplog.text
        assert "its checksum is another" in caplog.text
        assert not path.exists()
        assert [has(store, n) for n in range(3)] == [True, False, True]
        assert metrics.registry.get_sample_value("maskdial_prefix_disk_damaged_total") == 1
        put(store, 1, 0)
        until(lambda: has(store, 1))
        assert get(store, 1, 0) is not None


def test_a_purge_beside_a_server_is_no_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as store:
        put_chain(store, range(2))
        for path in tmp_path.glob("*.block"):
            path.unlink()
        assert get(store, 1, 0) is None
        assert not caplog.messages
        assert not has(store, 1)


def test_what_a_start_finds_and_removes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rests of writes, zeros, other versions, blocks without those before them."""
    with opened(tmp_path) as store:
        put_chain(store, range(4))
        put_chain(store, range(10, 12))
        put(store, 11, 10, "states")
    (tmp_path / (record.file_name(digest(7), "block") + ".partial")).write_bytes(b"half")
    (tmp_path / record.file_name(digest(1), "block")).unlink()
    with (tmp_path / record.file_name(digest(8), "block")).open("wb") as file:
        file.truncate(8 * 2**30)
    old = bytearray((tmp_path / record.file_name(digest(10), "block")).read_bytes())
    old[7] = 0
    (tmp_path / record.file_name(digest(9), "block")).write_bytes(old)
    ring = Header.of(digest(20), digest(21), "block", OWNER, array(0))
    record.write(tmp_path, ring, array(0))
    record.write(tmp_path, Header.of(digest(21), digest(20), "block", OWNER, array(0)), array(0))
    lone = Header.of(digest(22), b"", "states", OWNER, array(0))
    record.write(tmp_path, lone, array(0))
    with opened(tmp_path) as store:
        assert sorted(n for n in range(30) if has(store, n)) == [0, 10, 11]
    assert len(list(tmp_path.iterdir())) == 3 + 1 + 1  # blocks, states, lock
    (line,) = caplog.messages
    assert "had 7 files that were damaged" in line


def test_what_is_not_its_own_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    (tmp_path / "folder").mkdir()
    (tmp_path / record.file_name(digest(1), "block")).symlink_to(tmp_path / "letter.txt")
    (tmp_path / record.file_name(digest(2), "block")).mkdir()
    with opened(tmp_path, max_bytes=2**20) as store:
        put_chain(store, range(10, 12))
        assert store.num_blocks == 2
    (line,) = caplog.messages
    assert "4 files of something else" in line
    assert (tmp_path / "letter.txt").read_text() == "dear"
    assert len(list(tmp_path.iterdir())) == 4 + 2 + 1


def test_two_servers_do_not_have_one_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second serves without it, until the first one ends."""
    monkeypatch.setattr(store_module, "_RETRY_SECONDS", 0.01)
    with opened(tmp_path) as first:
        put_chain(first, range(2))
        with opened(tmp_path) as second:
            put(second, 7)
            assert "another server has it" in second.problem
            assert (second.num_blocks, has(second, 1)) == (0, False)
            first.close(60)
            until(lambda: not second.problem)
            assert has(second, 1)
    (line,) = caplog.messages
    assert "is not used: another server has it" in line


def test_a_server_that_was_killed_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from maskdial.folder_lock import lock_folder\n"
        "lock_folder(pathlib.Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(BlockingIOError):
            lock_folder(tmp_path)
        process.kill()
        process.wait()
    os.close(lock_folder(tmp_path))


def test_a_path_that_is_no_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with opened(file) as store:
        put(store, 1)
        assert "cannot be opened" in store.problem
    (line,) = caplog.messages
    assert str(file) in line
    assert file.read_text() == "mine"


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read as before; one line tells, and one more only after it has worked again."""
    monkeypatch.setattr(store_module, "_PAUSE_SECONDS", 0.0)
    real, is_full = record.write, True
    tried = []

    def write(*arguments: Any) -> None:
        tried.append(arguments)
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(*arguments)

    with opened(tmp_path) as store:
        put_chain(store, range(2))
        monkeypatch.setattr(record, "write", write)
        for number in range(10, 15):
            put(store, number)
        until(lambda: len(tried) == 5)
        until(lambda: bool(caplog.messages))
        assert get(store, 0) is not None
        assert len(caplog.messages) == 1
        assert "cannot be written: No space left on device" in caplog.text
        is_full = False
        put(store, 20)
        until(lambda: has(store, 20))
        is_full = True
        put(store, 21)
        until(lambda: len(caplog.messages) == 2)


def test_a_folder_that_goes_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "store"
    with opened(folder) as store:
        put_chain(store, range(2))
        shutil.rmtree(folder)
        assert get(store, 0) is None
        put(store, 5)
        until(lambda: bool(caplog.messages))
    assert "cannot be written: No such file" in caplog.text


def test_files_and_folder_are_their_owners_alone(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        with opened(tmp_path / "new") as store:
            put(store, 1)
    finally:
        os.umask(mask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o600}
