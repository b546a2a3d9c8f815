"""`maskdial pull`: from a Hub of our own, and from files, through everything that can go wrong."""

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from maskdial import cli
from maskdial.bundle.manifest import MANIFEST
from maskdial.errors import ConfigError
from maskdial.exporting import Progress, export_apart
from maskdial_export.direct.export import export_direct
from maskdial_export.errors import ExportError
from tests.disk import until
from tests.export.test_direct import TYPES
from tests.export.test_gguf_models import write
from tests.hub import COMMIT, Hub, running_hub

FILE = "model-Q4_K_M.gguf"
SOURCE = "acme/model:Q4_K_M"
PATIENCE = 120  # seconds
MEBI = 2**20


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / FILE
    write("llama", path, quantize=TYPES)
    return path.read_bytes()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("MASKDIAL_CACHE", str(folder))
    return folder


@pytest.fixture
def hub(
    tmp_path: Path, cache: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    with running_hub() as found:
        found.files = {FILE: content, "mmproj-Q4_K_M.gguf": b"GGUF"}
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield found


def started(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "maskdial", *arguments]
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    )


def left(folder: Path) -> list[str]:
    """Every file and folder below, hidden ones included."""
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())


def test_a_file_of_the_hub(hub: Hub, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull", SOURCE, SOURCE]) == 0
    folder = cache / "acme" / "model--Q4_K_M"
    said = capfd.readouterr()
    assert said.out == f"{SOURCE} is at {folder}\n" * 2
    assert "Fetching" not in said.err  # bars of huggingface_hub
    assert "%|" not in said.err
    assert len(hub.ranges) == 1
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    assert manifest["source"] == f"acme/model/{FILE}@{COMMIT}"
    assert cli.main(["list"]) == 0
    assert manifest["source"] in capfd.readouterr().out
    assert cli.main(["rm", SOURCE]) == 0
    assert left(cache) == []


def partial_sizes(folder: Path) -> list[int]:
    return [each.stat().st_size for each in folder.rglob("*.incomplete")]


def test_interrupting_a_download_and_going_on(
    hub: Hub, cache: Path, tmp_path: Path, content: bytes
) -> None:
    hub_cache = tmp_path / "hub"
    hub.files[FILE] = content + bytes(2 * MEBI * 12)  # what arrives is written 10 MiB at a time
    hub.held = threading.Event()
    process = started("pull", SOURCE)
    assert hub.halves.acquire(timeout=PATIENCE)
    until(lambda: bool(partial_sizes(hub_cache)) and max(partial_sizes(hub_cache)) > 0)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert error.splitlines() == [
        f"maskdial: exporting {SOURCE} to {cache / 'acme' / 'model--Q4_K_M'}",
        "maskdial: interrupted; run it again to go on: what was downloaded is kept",
    ]
    assert left(cache) == []
    hub.held.set()
    process = started("pull", SOURCE)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, error
    first, second = hub.ranges
    assert first is None
    assert second is not None  # what was not written yet, 10 MiB at most, comes again
    start = int(second.removeprefix("bytes=").removesuffix("-"))
    assert 0 < start <= 12 * MEBI
    assert partial_sizes(hub_cache) == []


def test_a_killed_one_leaves_nothing(hub: Hub, cache: Path) -> None:
    """Its child ends with it, and removes what there is."""
    hub.held = threading.Event()
    process = started("pull", SOURCE)
    assert hub.halves.acquire(timeout=PATIENCE)
    (place,) = (cache / "acme").iterdir()
    process.kill()
    process.communicate(timeout=PATIENCE)
    until(lambda: not place.exists())


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("acme/gated", "acme/gated is gated: accept its terms at http://127.0.0.1:"),
        ("acme/model:Q9", "acme/model has no GGUF file of Q9"),
        ("acme/none", "the Hub shows no such repository; check the id"),
        ("acme/model@nowhere", "acme/model has no revision nowhere; pass a branch, a tag or"),
    ],
)
def test_what_the_hub_refuses(
    hub: Hub, cache: Path, capfd: pytest.CaptureFixture[str], source: str, why: str
) -> None:
    assert cli.main(["pull", source]) == 1
    exporting, error = capfd.readouterr().err.splitlines()
    assert exporting.startswith("maskdial: exporting ")
    assert why in error
    assert left(cache) == []


def test_no_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert cli.main(["pull", "acme/model"]) == 1
    assert "and the Hub cannot be reached" in capfd.readouterr().err.splitlines()[-1]


def test_a_wrong_hash(hub: Hub, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hub.damaged.add(FILE)
    assert cli.main(["pull", SOURCE]) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    assert "a file of acme/model has arrived damaged: its SHA-256 is " in error
    assert left(cache) == []
    hub.damaged.clear()
    assert cli.main(["pull", SOURCE]) == 0


def test_a_disk_that_fills(cache: Path, tmp_path: Path, content: bytes) -> None:
    """A limit of a file's size stands for the disk: it is met in the middle of the weights."""
    file = tmp_path / "some.gguf"
    file.write_bytes(content)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) // 3, hard))
    try:
        with pytest.raises(ConfigError, match="file would be larger than is allowed here"):
            export_apart([str(file)], cache / "some", lambda _: None, lambda _: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [*cache.iterdir()] == []


CUT = """
import mmap, os, sys
source, dest = sys.argv[1:]
os.mkdir(dest)
with open(source, "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
    file.truncate(0)
    mapped[0]
"""


def test_a_file_that_is_cut_while_it_is_mapped(
    cache: Path, tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cutting.py").write_text(CUT, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("maskdial.exporting._MODULE", "cutting")
    file = tmp_path / "some.gguf"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"ended \(Bus error\): memory ran out, or the file was"):
        export_apart([str(file)], cache / "some", lambda _: None, lambda _: None)
    assert [*cache.iterdir()] == []


def test_a_file_that_is_cut_before(cache: Path, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "some.gguf"
    file.write_bytes(content[: len(content) // 2])
    assert cli.main(["pull", str(file)]) == 1
    assert [*(cache / "files").iterdir()] == []


def test_progress_and_giving_up(hub: Hub, cache: Path, tmp_path: Path, content: bytes) -> None:
    seen: list[Progress] = []
    export_apart([SOURCE], cache / "some", seen.append, lambda _: None)
    phases = list(dict.fromkeys(each.phase for each in seen))
    assert phases == ["Downloading", "Writing", "Checking"]
    downloads = [each for each in seen if each.phase == "Downloading"]
    assert (downloads[-1].done, downloads[-1].total) == (len(content), len(content))
    written = [each for each in seen if each.phase == "Writing" and each.total]
    size = (cache / "some" / "model.onnx.data").stat().st_size
    assert written[-1].done == size
    assert all(a.done <= b.done for a, b in itertools.pairwise(written))

    stopping = threading.Event()
    give_up: Callable[[Progress], None] = lambda _: stopping.set()  # noqa: E731
    with pytest.raises(InterruptedError):
        export_apart([SOURCE], cache / "other", give_up, lambda _: None, stopping)
    assert [each.name for each in cache.iterdir()] == ["some"]


def test_a_model_that_does_not_fit_into_memory(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / FILE
    file.write_bytes(content)
    monkeypatch.setattr("maskdial_export.direct.room.available_bytes", lambda: 600 * 10**6)
    for precision, hint in (
        (None, "take a file of fewer bits, or a smaller model"),
        ("fp32", "take a file of fewer bits, or a smaller model"),
    ):
        why = rf"needs 0\.7 GB of memory, and 0\.6 are free; {hint}"
        with pytest.raises(ExportError, match=why):
            export_direct(
                str(file),
                tmp_path / "bundle",
                precision=precision,
                tolerance=1e-4,
                console=Console(quiet=True),
            )
    assert [*tmp_path.iterdir()] == [file]
