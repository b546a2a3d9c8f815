"""Catalog: what cannot be read in a folder of bundles hides none of the others."""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from maskdial.bundle.bundle import load_bundles, read_manifests
from maskdial.bundle.manifest import MANIFEST
from maskdial.config import Config
from maskdial.errors import BundleError, ConfigError
from maskdial.metrics import Metrics
from maskdial.registry.catalog import STARTER_FOLDER, Catalog
from maskdial.registry.loading import start_models

STARTER = STARTER_FOLDER / "sentiment"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of two bundles. The test runs as a user whom permissions bind."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for each in ("plain", "org/inner"):
            shutil.copytree(STARTER, folder / each)
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            if root:
                os.seteuid(0)


def lock(path: Path) -> None:
    """Takes all rights away, with those of root if the test runs as root."""
    if (user := os.geteuid()) == 65534 and os.getuid() == 0:
        os.seteuid(0)
    path.chmod(0)
    os.seteuid(user)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
@pytest.mark.parametrize("locked", ["lost+found", "org/lost+found", "broken"])
def test_a_folder_that_cannot_be_read_is_left_out_and_named_once(
    locked: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = Catalog({}, folder)
    assert set(catalog.scan()) == {"plain", "org/inner"}
    path = folder / locked
    user = os.geteuid()
    if os.getuid() == 0:
        os.seteuid(0)
    path.mkdir()
    os.seteuid(user)
    lock(path)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert set(catalog.scan()) == {"plain", "org/inner"}
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "permission denied" in record.getMessage()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
def test_a_folder_of_bundles_that_cannot_be_read_itself_is_an_error(folder: Path) -> None:
    lock(folder)
    with pytest.raises(ConfigError, match="cannot be read"):
        Catalog({}, folder).scan()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
@pytest.mark.parametrize("locked", [".", MANIFEST, "tokenizer.json"])
def test_a_bundle_that_cannot_be_read_is_a_sentence(locked: str, folder: Path) -> None:
    lock(folder / "plain" / locked)
    with pytest.raises(BundleError, match=r"model 'plain': .*permission denied"):
        load_bundles("plain", folder / "plain")
    if locked == ".":
        with pytest.raises(BundleError, match="permission denied"):
            read_manifests("plain", folder / "plain")


def test_files_and_empty_folders_are_no_bundles(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "empty" / "deeper" / "deepest").mkdir(parents=True)
    shutil.copytree(STARTER, tmp_path / "empty" / "deeper" / "deepest", dirs_exist_ok=True)
    (tmp_path / ".hidden").mkdir()
    shutil.copytree(STARTER, tmp_path / ".hidden", dirs_exist_ok=True)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert Catalog({}, tmp_path).scan() == {}


@pytest.mark.skipif(os.name == "nt", reason="paths are Unicode there")
def test_a_bundle_in_a_path_that_is_not_utf8_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"b\xff")
    shutil.copytree(STARTER, path)
    with pytest.raises(BundleError, match="not UTF-8, so ONNX Runtime cannot open it"):
        start_models("mine", path, Config(threads=1), Metrics())
