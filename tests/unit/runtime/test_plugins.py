"""Providers in packages of their own: found by name, loaded on demand, refused in a sentence."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from maskdial.bundle.bundle import Bundle, load_bundle, load_bundles
from maskdial.config import load_config
from maskdial.errors import ConfigError
from maskdial.masked.model import MaskedModel
from maskdial.metrics import Metrics
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.registry.loading import start_model
from maskdial.runtime import providers
from maskdial.runtime.memory import HostMemory
from maskdial.runtime.placement import Placement, place
from maskdial.runtime.providers import find_provider, plugin
from maskdial.runtime.session import Session, SessionOptions

PACKAGE = """
def get_ep_name(): return "FakeExecutionProvider"
def get_library_path(): return {library!r}
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A plug-in that is installed as ``fake-npu``; its library is none."""
    library = tmp_path / "libfake.so"
    library.write_bytes(b"")
    package = tmp_path / "onnxruntime_ep_fake_npu"
    package.mkdir()
    (package / "__init__.py").write_text(PACKAGE.format(library=str(library)))
    monkeypatch.syspath_prepend(tmp_path)
    plugin.register.cache_clear()
    yield package
    plugin.register.cache_clear()
    sys.modules.pop(package.name, None)


@pytest.fixture(scope="module")
def masked() -> Bundle:
    return load_bundle("mine", STARTER_FOLDER / "sentiment")


def choose(bundle: Bundle, choice: str) -> Placement:
    return place(bundle, choice, lambda placement: placement)


def with_devices(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    devices = [
        SimpleNamespace(ep_name=name, device=SimpleNamespace(type=SimpleNamespace(name=kind)))
        for kind in kinds
        for name in ("CPUExecutionProvider", "FakeExecutionProvider")
    ]
    monkeypatch.setattr("onnxruntime.register_execution_provider_library", lambda *_: None)
    monkeypatch.setattr("onnxruntime.get_ep_devices", lambda: devices)


@pytest.mark.usefixtures("fake")
def test_installed_plugins_are_names_for_the_setting() -> None:
    assert "fake-npu" in providers.plugin_names()
    assert load_config({"provider": "fake-npu:npu, cpu"}).provider == "fake-npu:npu,cpu"
    for name in ("tpu", "fake-npu:tpu", "cpu:gpu", "fake-npu:", ""):
        with pytest.raises(
            ConfigError, match=r"use one of auto, cuda, webgpu, cpu, .*fake-npu.*, or inst"
        ):
            load_config({"provider": f"cpu,{name}"})


@pytest.mark.usefixtures("fake")
def test_a_library_that_does_not_load_is_named_in_one_sentence(
    masked: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError) as refusal:
        choose(masked, "fake-npu")
    message = refusal.value.message
    assert message.startswith(
        "provider 'fake-npu' was asked for, but its library cannot be loaded: "
    )
    assert "libfake.so" in message
    assert message.endswith("; or use --provider fake-npu,cpu")
    assert "\n" not in message
    with caplog.at_level(logging.INFO):
        assert choose(masked, "fake-npu,cpu").provider.name == "cpu"
    assert "model mine does not run on fake-npu: its library cannot be loaded" in caplog.text


def test_a_package_that_cannot_be_imported_is_an_error(fake: Path, masked: Bundle) -> None:
    (fake / "__init__.py").write_text("raise OSError('libcuda.so.1 is missing')")
    with pytest.raises(ConfigError, match=r"cannot be imported: libcuda\.so\.1 is missing; or use"):
        choose(masked, "fake-npu")


@pytest.mark.usefixtures("fake")
def test_only_masked_models_run_on_plugins(
    masked: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_devices(monkeypatch, "NPU")
    causal = load_bundle("writer", STARTER_FOLDER / "hybrid")
    with pytest.raises(ConfigError, match="'writer' is not masked, and plug-ins run no others"):
        choose(causal, "fake-npu")
    with caplog.at_level(logging.INFO):
        assert choose(causal, "fake-npu,auto").provider.name == "cpu"
    assert caplog.messages[0].startswith("model writer does not run on fake-npu: model 'writer' is")
    placement = choose(masked, "fake-npu,auto")
    assert placement.provider.name == "fake-npu"
    assert isinstance(placement.memory, HostMemory)
    assert not placement.provider.batch_invariant


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("name", "kinds", "chosen"),
    [
        ("fake-npu", ("CPU", "NPU", "GPU", "GPU"), 2),
        ("fake-npu", ("NPU", "CPU"), 1),
        ("fake-npu:npu", ("NPU", "CPU"), 0),
        ("fake-npu", ("NPU",), 0),
    ],
)
def test_a_plugin_gets_the_first_device_of_the_kind_wanted(
    name: str, kinds: tuple[str, ...], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_devices(monkeypatch, *kinds)
    import onnxruntime as ort

    theirs = [each for each in ort.get_ep_devices() if each.ep_name == "FakeExecutionProvider"]
    assert find_provider(name).devices() == [theirs[chosen]]


@pytest.mark.usefixtures("fake")
def test_a_missing_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with_devices(monkeypatch)
    with pytest.raises(ConfigError, match=r"there is no device that it can use \(it found: none\)"):
        find_provider("fake-npu").devices()
    with_devices(monkeypatch, "CPU")
    with pytest.raises(ConfigError, match=r"there is no gpu \(it found: cpu\)"):
        find_provider("fake-npu:gpu").devices()


@pytest.fixture
def openvino() -> None:
    pytest.importorskip("onnxruntime_ep_openvino", reason="onnxruntime-ep-openvino is missing")
    try:
        find_provider("openvino").devices()
    except ConfigError as error:  # on AMD's processors
        pytest.skip(error.message)


@pytest.mark.usefixtures("openvino")
def test_openvino_computes_a_masked_model_whole(
    masked: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    """All of it on OpenVINO, the golden check included, and close to ONNX Runtime's results."""
    config = load_config({"provider": "openvino:cpu", "threads": 1})
    model = start_model(masked, config, Metrics(), alone=True)
    try:
        assert isinstance(model, MaskedModel)
        assert model.provider == "openvino:cpu"
        assert not model.batch_invariant
    finally:
        model.stop()
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    feeds: dict[str, Any] = {
        "input_ids": np.arange(5, 69).reshape(4, 16),
        "lengths": np.array([16, 3, 9, 16], np.int32),
    }
    theirs, ours = (
        Session(masked.graph, SessionOptions(name, 1)).run(feeds) for name in ("openvino", "cpu")
    )
    assert np.abs(theirs - ours).max() < masked.manifest.golden.tolerance


@pytest.mark.usefixtures("openvino")
def test_what_openvino_cannot_compile_falls_back_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, full = load_bundles("mine", STARTER_FOLDER / "hybrid")
    model = start_model(full, load_config({"provider": "openvino,cpu", "threads": 1}), Metrics())
    model.stop()
    assert model.provider == "cpu"
    assert "model mine:full does not run on openvino: ONNX Runtime cannot load" in caplog.text
    assert "RotaryEmbedding" in caplog.text
