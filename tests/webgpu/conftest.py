"""WebGPU on a software adapter: SwiftShader, which comes with Chromium, and its Vulkan loader.

`fault` puts a driver of ours in between, which fails when it is told to.
"""

import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import onnxruntime as ort
import pytest

from maskdial.runtime.providers import plugin
from maskdial.runtime.providers.webgpu import PROVIDER, probe
from tests.conftest import MakeOnce

_FOLDERS = ("/usr/lib/chromium", "/usr/lib/chromium-browser")
_FAILING_DRIVER = Path(__file__).with_name("failing_driver.c")
_LIBRARIES = ("libvulkan.so.1", "libvk_swiftshader.so", "vk_swiftshader_icd.json")


def _driver() -> Path | None:
    """The folder of Chromium, the system's or Playwright's own, with its driver for Vulkan."""
    own = Path.home().glob(".cache/ms-playwright/chromium-*/chrome-linux*")
    beside = [Path(path).resolve().parent for path in [shutil.which("google-chrome")] if path]
    for folder in (*map(Path, _FOLDERS), *own, *beside):
        if all((folder / name).is_file() for name in _LIBRARIES):
            return folder
    return None


@pytest.fixture
def software(adapter: None) -> None:
    """For tests of what a software adapter does."""
    if PROVIDER.installed():
        pytest.skip("there is a GPU")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Has the plug-in use a software adapter, in this process and those that start meanwhile.

    If there is a GPU, it is used instead.
    """
    pytest.importorskip("onnxruntime_ep_webgpu", reason="onnxruntime-ep-webgpu is missing")
    if PROVIDER.installed():  # a real GPU
        yield
        return
    folder = _driver()
    if folder is None:
        pytest.skip("there is no Chromium with a software driver for Vulkan")
    manifest = json.loads((folder / _LIBRARIES[2]).read_text())
    manifest["ICD"]["library_path"] = str(folder / _LIBRARIES[1])
    driver = tmp_path_factory.mktemp("vulkan") / "driver.json"
    driver.write_text(json.dumps(manifest))
    ctypes.CDLL(str(folder / _LIBRARIES[0]))  # found by its name from now on
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VK_DRIVER_FILES", str(driver))
        patch.setenv("ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER", "1")
        paths = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        patch.setenv("LD_LIBRARY_PATH", os.pathsep.join(paths))  # for processes
        probe.cache_clear()
        _find_devices_again()
        yield
    probe.cache_clear()


@pytest.fixture(scope="session")
def exported(torch: ModuleType, made_once: MakeOnce) -> Callable[[str], Path]:
    """The bundle of a tiny checkpoint of `tests.export.zoo`."""
    from tests.export.conftest import exported_once  # needs torch

    return lambda name: exported_once(name, made_once)


@pytest.fixture
def fault(software: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that says how the driver of processes that start in this test fails.

    ``failing_driver.c`` has the words.
    """
    folder, compiler = _driver(), shutil.which("cc")
    if folder is None or compiler is None:
        pytest.skip("there is no C compiler")
    library, manifest, fault = (tmp_path / name for name in ("driver.so", "driver.json", "fault"))
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", library, _FAILING_DRIVER, "-ldl"], check=True
    )
    content = json.loads((folder / _LIBRARIES[2]).read_text())
    content["ICD"]["library_path"] = str(library)
    manifest.write_text(json.dumps(content))
    monkeypatch.setenv("REAL_DRIVER", str(folder / _LIBRARIES[1]))
    monkeypatch.setenv("VK_DRIVER_FILES", str(manifest))
    monkeypatch.setenv("DRIVER_FAULT", str(fault))
    return fault


def _find_devices_again() -> None:
    """The plug-in looks for devices when it is registered: perhaps before the driver was there."""
    if any(each.ep_name == PROVIDER.ort_name for each in ort.get_ep_devices()):
        return
    plugin.register.cache_clear()
    with suppress(Exception):  # ONNX Runtime's own, if it was not registered
        ort.unregister_execution_provider_library(PROVIDER.ort_name)


def assert_alike(reply: Any, wanted: Any) -> None:
    """The texts of two replies of `/generate`, their log-probabilities within 1e-4."""
    tokens, expected = reply["details"]["tokens"], wanted["details"]["tokens"]
    assert [token["id"] for token in tokens] == [token["id"] for token in expected]
    assert [token["logprob"] for token in tokens] == pytest.approx(
        [token["logprob"] for token in expected], abs=1e-4
    )
