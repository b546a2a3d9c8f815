"""Calibration: which inputs get a fixed scale, and how an export uses it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.quantize.calibrate import calibrate
from maskdial_export.quantize.quality import Gate
from maskdial_export.quantize.quantize import projections
from maskdial_export.quantize.sensitivity import layer_errors

TEXTS = [np.random.default_rng(seed).integers(0, 100, 40) for seed in range(4)]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


def inputs_of(model: LlamaForCausalLM, name: str) -> torch.Tensor:
    """A module's inputs over all texts, (num_rows, inputs)."""
    seen: list[torch.Tensor] = []
    module = model.get_submodule(name)
    handle = module.register_forward_hook(lambda _module, read, _output: seen.append(read[0]))
    with torch.no_grad():
        for text in TEXTS:
            model(input_ids=torch.from_numpy(text[None]))
    handle.remove()
    return torch.cat([rows.flatten(0, -2) for rows in seen])


def test_what_comes_from_a_norm_has_one_scale(model: LlamaForCausalLM) -> None:
    ranges = calibrate(layer_errors(model, projections(model), TEXTS, "int8"))
    for layer in ("model.layers.0.", "model.layers.1."):
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            peak = float(inputs_of(model, layer + name).abs().max())
            assert peak < ranges[layer + name] < 1.5 * peak
    assert ranges["model.layers.0.mlp.gate_proj"] == ranges["model.layers.0.mlp.up_proj"]


def test_rows_of_different_sizes_have_a_scale_each(model: LlamaForCausalLM) -> None:
    """A norm whose output for a few tokens is a hundred times the others'."""

    def enlarge(_module: Any, _read: Any, output: torch.Tensor) -> torch.Tensor:
        few = torch.arange(output.shape[1]) % 20 == 0
        return torch.where(few[:, None], 100 * output, output)

    norm = model.get_submodule("model.layers.1.input_layernorm")
    handle = norm.register_forward_hook(enlarge)
    try:
        ranges = calibrate(layer_errors(model, projections(model), TEXTS, "int8"))
    finally:
        handle.remove()
    assert "model.layers.1.self_attn.q_proj" not in ranges
    assert "model.layers.0.self_attn.q_proj" in ranges


def test_hooks_are_removed(model: LlamaForCausalLM) -> None:
    calibrate(layer_errors(model, projections(model), TEXTS, "int8"))
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("calibrated", [True, False])
def test_export_calibrates_unless_told_otherwise(
    checkpoint: Callable[[str], Path], tmp_path: Path, calibrated: bool
) -> None:
    gate = Gate(max_loss=float("inf"), calibrate=calibrated)
    bundle = tmp_path / "bundle"
    manifest = export(str(checkpoint("llama")), bundle, precision="int8", gate=gate)
    assert manifest.quality is not None
    assert manifest.batch_invariant
    assert (manifest.quality.calibrated > 0) == calibrated
    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph
    operators = [node.op_type for node in graph.node]
    # every product scales its rows afterwards, or none where its input has one scale
    assert operators.count("ReduceMax") < operators.count("QuantizeLinear") or not calibrated


def test_a_gate_that_one_scale_fails_takes_a_scale_for_each_row(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ranges(errors: dict[str, Any]) -> dict[str, float]:
        return dict.fromkeys(errors, 1e-3)  # cuts nearly everything

    monkeypatch.setattr("maskdial_export.quantize.quality.calibrate", ranges)
    gate = Gate(max_loss=0.01)
    source, bundle = str(checkpoint("bert")), tmp_path / "bundle"
    manifest = export(source, bundle, task="embed", precision="int8", gate=gate)
    assert manifest.quality is not None
    assert manifest.quality.calibrated == 0
    assert manifest.quality.loss <= 0.01
    refusing = Gate(max_loss=1e-9, keep_worst=0)
    with pytest.raises(ExportError, match="loses"):
        export(source, tmp_path / "refused", task="embed", precision="int8", gate=refusing)
