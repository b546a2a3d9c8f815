"""What WebGPU cannot do is refused in a sentence, and so are drivers that end their process."""

import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from maskdial.bundle.bundle import Bundle, load_bundle
from maskdial.causal.model import CausalModel
from maskdial.config import load_config
from maskdial.errors import BundleError, ConfigError
from maskdial.extras import how_to_install
from maskdial.kernels.webgpu import rewrite_for_webgpu
from maskdial.metrics import Metrics
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.registry.loading import start_model
from maskdial.runtime.placement import Placement, place
from maskdial.runtime.providers import find_provider, webgpu
from maskdial.runtime.providers.webgpu import PROVIDER, probe
from maskdial.runtime.providers.webgpu_probe import Device


def bundle(**manifest: Any) -> Any:
    fields = {"family": "causal", "kv": SimpleNamespace(states=()), "precision": "int4"}
    return SimpleNamespace(label="mine", manifest=SimpleNamespace(**fields | manifest))


@pytest.fixture(scope="module")
def starter() -> Bundle:
    return load_bundle("mine", STARTER_FOLDER / "hybrid")


def choose(bundle: Bundle, choice: str) -> Placement:
    return place(bundle, choice, lambda placement: placement)


def test_webgpu_is_a_provider_by_its_name() -> None:
    assert load_config({"provider": "webgpu, cpu"}).provider == "webgpu,cpu"
    assert find_provider("webgpu") is PROVIDER
    assert not PROVIDER.batch_invariant


def test_recurrent_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="model 'mine' has recurrent layers, which only CPUs run"):
        PROVIDER.check(bundle(kv=SimpleNamespace(states=((2, 3),))))


def test_a_plug_in_that_is_missing(
    starter: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(webgpu, "find_spec", lambda name: None)
    assert not PROVIDER.installed()
    with pytest.raises(
        ConfigError, match=re.escape(f"not installed; {how_to_install('webgpu')}; or")
    ):
        choose(starter, "webgpu")
    with caplog.at_level(logging.INFO):
        assert choose(starter, "webgpu,cpu").provider.name == "cpu"
    assert "model mine does not run on webgpu: the plug-in for WebGPU is not" in caplog.text


def test_no_device_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime_ep_webgpu")
    monkeypatch.setattr(webgpu, "devices_of", lambda *_: [])
    with pytest.raises(ConfigError, match=r"there is no GPU that .* can use; check its driver"):
        PROVIDER.check(bundle())


@pytest.mark.parametrize("precision", ["fp16", "int4-fp16"])
def test_half_precision_needs_a_driver_that_has_it(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime_ep_webgpu")
    device = SimpleNamespace(device=SimpleNamespace(type=SimpleNamespace(name="GPU")))
    monkeypatch.setattr(webgpu, "devices_of", lambda *_: [device])
    monkeypatch.setattr(webgpu, "probe", lambda: Device(attention_works=True, has_half=False))
    with pytest.raises(ConfigError, match=rf"'mine' is {precision}, and .* \(shader-f16\); export"):
        PROVIDER.check(bundle(precision=precision))
    monkeypatch.setattr(webgpu, "probe", lambda: Device(attention_works=True, has_half=True))
    PROVIDER.check(bundle(precision=precision))


def test_graphs_that_go_back_and_forth_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        PROVIDER.check_split(Path("m.onnx"), ["Shape", "Gather", "FusedMatMul", "Range"], 20)
    assert "WebGPU runs 16 of 20 operators; the CPU runs 3 that" in caplog.text
    assert caplog.messages[-1].endswith("and 1 others")
    with pytest.raises(
        BundleError, match=r"kernels for 3 of the 9 operators .* \(Erf, Mish\), and"
    ):
        PROVIDER.check_split(Path("m.onnx"), ["Mish", "Erf", "Shape", "Erf"], 9)


@pytest.mark.parametrize("int8", [False, True])
def test_weights_that_no_buffer_holds_are_refused(int8: bool, tmp_path: Path) -> None:
    """Those of int8 products become floats when they are loaded, four times as large."""
    weight = np.ones((40, 100), np.int8 if int8 else np.float32)
    nodes = [helper.make_node("MatMul", ["x", "floats" if int8 else "weight"], ["y"])]
    if int8:
        nodes.insert(0, helper.make_node("Cast", ["weight"], ["floats"], to=TensorProto.FLOAT))
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, width])
        for name, width in (("x", 40), ("y", 100))
    )
    graph = helper.make_graph(
        nodes, "product", [x], [y], [numpy_helper.from_array(weight, "weight")]
    )
    onnx.save(helper.make_model(graph), tmp_path / "model.onnx")
    assert rewrite_for_webgpu(tmp_path / "model.onnx", lambda: True, 16_000)
    with pytest.raises(
        BundleError, match=r"^the weight 'weight' takes 0\.02 MB, and the GPU's larg"
    ):
        rewrite_for_webgpu(tmp_path / "model.onnx", lambda: True, 15_999)


def test_rows_are_not_flattened_on_the_cpu(hybrid_bundle: Path) -> None:
    """A float graph of a Llama leaves nothing else to it."""
    graph = load_bundle("mine", hybrid_bundle).graph

    def reshaped(model: onnx.ModelProto) -> list[str]:
        return [node.input[0] for node in model.graph.node if node.op_type == "Reshape"]

    before = reshaped(onnx.load(graph, load_external_data=False))
    after = reshaped(onnx.load_from_string(rewrite_for_webgpu(graph, lambda: True)))
    assert "rows" in before
    before.remove("rows")
    assert after == before


@pytest.mark.slow
@pytest.mark.usefixtures("software")
class TestAdapter:
    def test_a_cache_that_no_buffer_holds_is_refused_or_planned_smaller(
        self, hybrid_bundle: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert probe().max_buffer_bytes == 2**30  # SwiftShader's
        # A slot of 64 tokens, with one head of 16 floats, takes 4096 bytes.
        lowered = replace(probe(), max_buffer_bytes=9 * 4096)
        monkeypatch.setattr(webgpu, "probe", lambda: lowered)
        settings = {"provider": "webgpu", "threads": 1, "golden_check": "warn"}
        loaded = load_bundle("mine", hybrid_bundle)
        with pytest.raises(ConfigError) as refusal:
            start_model(loaded, load_config(settings | {"slots": 12}), Metrics())
        assert refusal.value.message == (
            "model 'mine': a buffer of 12 slots of 64 tokens takes 0.0 MB, and the GPU's largest "
            "one holds 0.0 MB: --slots 9 or --max-context 48 would fit"
        )
        model = start_model(loaded, load_config(settings), Metrics())
        model.stop()
        assert isinstance(model, CausalModel)
        assert model.slots == 9

    def test_a_software_adapter_is_for_tests_only(
        self, starter: Bundle, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert not PROVIDER.installed(), "auto takes GPUs only"
        with caplog.at_level(logging.WARNING):
            PROVIDER.check(bundle())
        assert "model mine runs on a software adapter of WebGPU, which is for tests" in caplog.text

    def test_without_an_adapter_the_server_goes_on(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Without an adapter the plug-in calls abort."""
        monkeypatch.setenv("VK_DRIVER_FILES", str(tmp_path / "none.json"))
        probe.cache_clear()
        try:
            with pytest.raises(ConfigError) as refusal:
                PROVIDER.check(bundle())
        finally:
            probe.cache_clear()
        assert refusal.value.message == (
            "there is no GPU that ONNX Runtime's plug-in for WebGPU can use; check its driver (on "
            "Linux, Vulkan's)"
        )

    def test_a_driver_that_hangs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(webgpu, "_PROBE", ("-c", "import time; time.sleep(60)"))
        monkeypatch.setattr(webgpu, "_TIMEOUT", 0.2)
        probe.cache_clear()
        try:
            with pytest.raises(ConfigError, match=r"does not answer WebGPU within 0\.2 seconds"):
                PROVIDER.check(bundle())
        finally:
            probe.cache_clear()
