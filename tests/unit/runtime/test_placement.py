"""Which provider a model runs on, by what is asked for, installed and working."""

import logging
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from maskdial.bundle.bundle import Bundle, load_bundle
from maskdial.errors import BundleError, ConfigError
from maskdial.extras import how_to_install
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.runtime import providers
from maskdial.runtime.memory import HostMemory
from maskdial.runtime.placement import Placement
from maskdial.runtime.placement import place as start_on_first
from maskdial.runtime.providers import cuda, find_provider
from maskdial.runtime.providers.cpu import CpuProvider
from maskdial.runtime.providers.cuda import CudaProvider

GPU_MEMORY = object()


def place(bundle: Bundle, choice: str) -> Placement:
    return start_on_first(bundle, choice, lambda placement: placement)


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
    monkeypatch.setattr(CudaProvider, "in_build", lambda self: True)
    monkeypatch.setattr(cuda, "load_libraries", lambda: None)
    monkeypatch.setattr(cuda, "check_device", lambda: None)
    monkeypatch.setattr(cuda, "CudaMemory", lambda: GPU_MEMORY)


def no_device() -> None:
    raise ConfigError("there is no CUDA device")


@pytest.mark.parametrize("name", providers.NAMES)
def test_a_module_holds_the_provider_of_its_name(name: str) -> None:
    assert find_provider(name).name == name


def test_a_new_provider_is_a_module_and_a_name(
    half: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TpuProvider(CpuProvider):
        name = "tpu"

    module = SimpleNamespace(PROVIDER=TpuProvider())
    monkeypatch.setitem(sys.modules, "maskdial.runtime.providers.tpu", module)
    monkeypatch.setattr(providers, "NAMES", ("tpu", *providers.NAMES))
    assert isinstance(place(half, "tpu").provider, TpuProvider)
    assert isinstance(place(half, "auto").provider, TpuProvider)


def test_names_are_checked_without_onnx_runtime() -> None:
    """`maskdial --help` would wait for it."""
    code = """
import sys
from maskdial import cli
from maskdial.config import load_config
load_config({"provider": "cuda"})
sys.exit("onnxruntime" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_taken_unless_the_cpu_is_asked_for(half: Bundle) -> None:
    for name in ("auto", "cuda"):
        placement = place(half, name)
        assert isinstance(placement.provider, CudaProvider)
        assert placement.memory is GPU_MEMORY
    placement = place(half, "cpu")
    assert isinstance(placement.provider, CpuProvider)
    assert isinstance(placement.memory, HostMemory)


@pytest.mark.usefixtures("gpu")
def test_without_a_device_auto_says_why_and_takes_the_cpu(
    half: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "check_device", no_device)
    with caplog.at_level(logging.INFO):
        assert place(half, "auto").provider.name == "cpu"
    assert caplog.messages == ["model mine does not run on cuda: there is no CUDA device"]
    with pytest.raises(ConfigError) as refusal:
        place(half, "cuda")
    assert refusal.value.message == (
        "provider 'cuda' was asked for, but there is no CUDA device; or use --provider auto"
    )


@pytest.mark.usefixtures("gpu")
def test_memory_that_cannot_be_opened_is_a_reason_too(
    half: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "CudaMemory", no_device)
    assert place(half, "auto").provider.name == "cpu"


@pytest.mark.usefixtures("gpu")
def test_a_model_that_no_provider_runs_is_refused_with_the_reasons(
    half: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "NAMES", ("cuda",))
    monkeypatch.setattr(cuda, "check_device", no_device)
    with pytest.raises(ConfigError) as refusal:
        place(half, "auto")
    assert refusal.value.message == (
        "no provider can run model 'mine': cuda: there is no CUDA device"
    )


def test_an_installation_for_the_cpu_is_silent_about_it(
    half: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CudaProvider, "in_build", lambda self: False)
    monkeypatch.setattr(cuda, "_gpu_build", lambda: None)
    with caplog.at_level(logging.INFO):
        assert place(half, "auto").provider.name == "cpu"
    assert not caplog.messages


@pytest.mark.parametrize(
    ("installed", "advice"),
    [
        (None, re.escape(how_to_install("cuda"))),
        ("1.31.1", "pip install --force-reinstall --no-deps onnxruntime-gpu==1.31.1"),
    ],
)
def test_a_missing_build_is_named_with_its_remedy(
    half: Bundle, installed: str | None, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        assert name == "onnxruntime-gpu"
        if installed is None:
            raise PackageNotFoundError
        return installed

    monkeypatch.setattr(CudaProvider, "in_build", lambda self: False)
    monkeypatch.setattr(cuda, "version", version)
    with pytest.raises(ConfigError, match=advice):
        place(half, "cuda")


def test_auto_also_mentions_a_gpu_build_that_was_overwritten(
    half: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CudaProvider, "in_build", lambda self: False)
    monkeypatch.setattr(cuda, "_gpu_build", lambda: "1.31.1")
    with caplog.at_level(logging.INFO):
        assert place(half, "auto").provider.name == "cpu"
    assert "--force-reinstall --no-deps onnxruntime-gpu==1.31.1" in caplog.text


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("precision", "dtype", "reason"),
    [
        ("int8", "float32", "is int8, which only CPUs run"),
        ("fp32", "float32", "is fp32, and CUDA attention needs a KV cache in half precision"),
        ("int4", "float32", "is int4, which only CPUs run"),
    ],
)
def test_bundles_without_kernels_stay_on_the_cpu(
    bundle: Bundle, precision: str, dtype: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = of_precision(bundle, precision, dtype)
    with pytest.raises(ConfigError, match=f"model 'mine' {reason}; .*--precision fp16"):
        place(theirs, "cuda")
    with caplog.at_level(logging.INFO):
        assert place(theirs, "auto").provider.name == "cpu"
    assert reason in caplog.text


def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, half: Bundle
) -> None:
    """The provider's own library lies beside ONNX Runtime; here it is no library at all."""
    (tmp_path / "capi").mkdir()
    (tmp_path / "capi" / "libonnxruntime_providers_cuda.so").write_bytes(b"")
    monkeypatch.setattr("onnxruntime.__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(CudaProvider, "in_build", lambda self: True)
    monkeypatch.setattr(cuda, "check_device", lambda: None)
    with pytest.raises(ConfigError, match=r"cannot be loaded \(.*libonnxruntime_providers_cuda"):
        place(half, "cuda")


@pytest.mark.usefixtures("gpu")
def test_a_model_that_does_not_start_is_tried_on_the_next_provider(
    half: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    def start(placement: Placement) -> str:
        if placement.provider.name == "cuda":
            raise BundleError("its graph does not compile")
        return placement.provider.name

    with caplog.at_level(logging.WARNING):
        assert start_on_first(half, "cuda,cpu", start) == "cpu"
    assert caplog.messages == ["model mine does not run on cuda: its graph does not compile"]
    with pytest.raises(BundleError, match="its graph does not compile"):
        start_on_first(half, "cuda", start)
