"""Where a model runs, by what is asked for, what is installed and what is there."""

import logging
from pathlib import Path

import pytest

from maskdial.errors import ConfigError
from maskdial.models.bundle import Bundle, load_bundle
from maskdial.models.registry import STARTER_FOLDER
from maskdial.runtime import placement
from maskdial.runtime.placement import find_device

DEVICE = object()


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    """An int8 bundle, of the causal family."""
    return load_bundle("mine", STARTER_FOLDER / "hybrid")


def of_precision(bundle: Bundle, precision: str, dtype: str) -> Bundle:
    assert bundle.manifest.kv is not None
    kv = bundle.manifest.kv.model_copy(update={"dtype": dtype})
    manifest = bundle.manifest.model_copy(update={"precision": precision, "kv": kv})
    return Bundle(bundle.name, bundle.path, manifest)


@pytest.fixture
def half(bundle: Bundle) -> Bundle:
    return of_precision(bundle, "fp16", "float16")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation for CUDA, on a machine with a device."""
    monkeypatch.setattr(placement, "has_provider", lambda provider: True)
    monkeypatch.setattr(placement, "_load_libraries", lambda: None)
    monkeypatch.setattr(placement, "check_device", lambda: None)
    monkeypatch.setattr(placement, "CudaDevice", lambda: DEVICE)


def no_device() -> None:
    raise ConfigError("there is no CUDA device")


@pytest.mark.usefixtures("gpu")
def test_a_device_is_taken_unless_the_cpu_is_asked_for(half: Bundle) -> None:
    assert find_device(half, "auto") is DEVICE
    assert find_device(half, "cuda") is DEVICE
    assert find_device(half, "cpu") is None


@pytest.mark.usefixtures("gpu")
def test_without_a_device_auto_says_why_and_takes_the_cpu(
    half: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(placement, "check_device", no_device)
    with caplog.at_level(logging.INFO):
        assert find_device(half, "auto") is None
    assert caplog.messages == ["model mine runs on the CPU: there is no CUDA device"]
    with pytest.raises(ConfigError) as refusal:
        find_device(half, "cuda")
    assert refusal.value.message == (
        "provider 'cuda' was asked for, but there is no CUDA device; or use --provider cpu"
    )


def test_an_installation_for_the_cpu_is_silent_about_it(
    half: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(placement, "has_provider", lambda provider: False)
    monkeypatch.setattr(placement, "_gpu_build", lambda: None)
    with caplog.at_level(logging.INFO):
        assert find_device(half, "auto") is None
    assert not caplog.messages


@pytest.mark.parametrize(
    ("installed", "advice"),
    [
        (None, r"pip install 'maskdial\[cuda\]'"),
        ("1.31.1", "pip install --force-reinstall --no-deps onnxruntime-gpu==1.31.1"),
    ],
)
def test_what_is_missing_is_said_with_its_remedy(
    half: Bundle, installed: str | None, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        assert name == "onnxruntime-gpu"
        if installed is None:
            raise placement.PackageNotFoundError
        return installed

    monkeypatch.setattr(placement, "has_provider", lambda provider: False)
    monkeypatch.setattr(placement, "version", version)
    with pytest.raises(ConfigError, match=advice):
        find_device(half, "cuda")


def test_a_build_for_gpus_that_was_overwritten_is_told_to_auto_as_well(
    half: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(placement, "has_provider", lambda provider: False)
    monkeypatch.setattr(placement, "_gpu_build", lambda: "1.31.1")
    with caplog.at_level(logging.INFO):
        assert find_device(half, "auto") is None
    assert "--force-reinstall --no-deps onnxruntime-gpu==1.31.1" in caplog.text


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("precision", "dtype", "reason"),
    [
        ("int8", "float32", "is int8, which is for CPUs"),
        ("fp32", "float32", "is fp32, and CUDA attends over a cache in half precision only"),
        ("int4", "float32", "is int4, which is for CPUs"),
    ],
)
def test_bundles_without_kernels_stay_on_the_cpu(
    bundle: Bundle, precision: str, dtype: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = of_precision(bundle, precision, dtype)
    with pytest.raises(ConfigError, match=f"model 'mine' {reason}; .*--precision fp16"):
        find_device(theirs, "cuda")
    with caplog.at_level(logging.INFO):
        assert find_device(theirs, "auto") is None
    assert reason in caplog.text


def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, half: Bundle
) -> None:
    """The provider's own library lies beside ONNX Runtime; here it is no library at all."""
    (tmp_path / "capi").mkdir()
    (tmp_path / "capi" / "libonnxruntime_providers_cuda.so").write_bytes(b"")
    monkeypatch.setattr(placement.ort, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(placement, "has_provider", lambda provider: True)
    monkeypatch.setattr(placement, "check_device", lambda: None)
    with pytest.raises(ConfigError, match=r"cannot be loaded \(.*libonnxruntime_providers_cuda"):
        find_device(half, "cuda")
