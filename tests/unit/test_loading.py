"""Loading: damaged files and too little memory end in a sentence, however late they are found."""

import shutil
from pathlib import Path

import pytest

from maskdial.bundle import bundle as bundle_module
from maskdial.bundle.bundle import load_bundle, load_bundles
from maskdial.bundle.starters import STARTER_FOLDER
from maskdial.config import load_config
from maskdial.errors import BundleError, ConfigError
from maskdial.metrics import Metrics
from maskdial.registry.loading import start_models
from maskdial.runtime.memory import HostMemory

WEIGHTS = "model.onnx.data"
CHANGED = f"{WEIGHTS} has changed since it was exported"


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle whose weights are hashed in a thread, as those of large ones are."""
    folder = tmp_path / "hybrid"
    shutil.copytree(STARTER_FOLDER / "hybrid", folder)
    monkeypatch.setattr(bundle_module, "_LARGE", (folder / WEIGHTS).stat().st_size)
    return folder


def damage(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / WEIGHTS).write_bytes(content)


def test_weights_are_verified_before_a_model_is_there(hybrid: Path) -> None:
    for bundle in load_bundles("a", hybrid, in_background=True):
        assert list(bundle.hashing) == [WEIGHTS]
        bundle.finish_verifying()
    damage(hybrid)
    bundles = load_bundles("a", hybrid, in_background=True)
    assert len(bundles) == 2
    for bundle in bundles:
        with pytest.raises(BundleError, match=CHANGED):
            bundle.finish_verifying()
    with pytest.raises(BundleError, match=CHANGED):
        load_bundles("a", hybrid)
    with pytest.raises(BundleError, match=CHANGED):
        load_bundle("a", hybrid)
    # One bit of a weight is nothing that the golden check would find
    with pytest.raises(BundleError, match=CHANGED):
        start_models("a", hybrid, load_config({"golden_check": "warn"}), Metrics())


def test_a_damaged_file_is_named_whatever_comes_of_it(hybrid: Path) -> None:
    (hybrid / WEIGHTS).write_bytes((hybrid / WEIGHTS).read_bytes()[:-5000] + bytes(5000 * 2))
    with pytest.raises(BundleError, match=CHANGED):
        start_models("a", hybrid, load_config({}), Metrics())


def test_what_does_not_fit_into_memory_is_refused(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = load_bundle("a", hybrid).num_bytes
    for free, advice in ((needed - 1, r"with --precision int4 it would need 0\.0"), (99, "serve")):
        monkeypatch.setattr(HostMemory, "free_bytes", lambda _self, free=free: free)
        with pytest.raises(ConfigError, match=rf"needs 0\.0 GB of memory .* are free; .*{advice}"):
            start_models("a", hybrid, load_config({}), Metrics())
