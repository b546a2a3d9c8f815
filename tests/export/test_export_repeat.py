"""Repeated layers: the first ones are traced, and the graph is that of a trace of all."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
import transformers
from rich.console import Console
from transformers.models.llama import modeling_llama

from maskdial_export.export import export
from maskdial_export.tracing import causal, masked
from maskdial_export.tracing.graph import optimize
from maskdial_export.tracing.repeat import find_stack
from maskdial_export.tracing.rewrite import modules_of
from maskdial_export.tracing.survey import survey
from tests.export.conftest import CHECKPOINTS

LAYERS = 5


def build(name: str, **settings: Any) -> Any:
    """A model of the zoo with more layers, whose weights are all different."""
    torch.manual_seed(0)
    architecture, shape = CHECKPOINTS[name]
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**{**shape, "num_hidden_layers": LAYERS, **settings})
    model = model_class._from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def trace(model: Any, *, whole: bool) -> ir.Model:
    surveyed = replace(survey(model), whole=whole)
    assert (find_stack(model, surveyed) is None) == whole
    if surveyed.causal:
        return causal.trace(model, surveyed)
    return masked.trace(model, surveyed, "fill-mask")


def description(graph: ir.Graph) -> list[Any]:
    """What a graph computes, without the names that have no meaning."""
    places: dict[ir.Value, Any] = {}

    def of(value: ir.Value | None) -> Any:
        if value is None or value.is_graph_input():
            return value and value.name
        if value.const_value is not None:
            array = value.const_value.numpy()
            return str(array.dtype), array.shape, array.tobytes()
        return places[value]

    nodes: list[Any] = [value.name for value in graph.inputs]
    for index, node in enumerate(graph):
        attributes = sorted((key, str(each.value)) for key, each in node.attributes.items())
        nodes.append((node.op_type, [of(value) for value in node.inputs], attributes))
        nodes.append(modules_of(node))
        places.update({value: (index, place) for place, value in enumerate(node.outputs)})
    return [*nodes, *((value.name, of(value)) for value in graph.outputs)]


@pytest.mark.parametrize(
    ("name", "settings", "first", "period"),
    [
        ("llama", {}, 1, 1),
        pytest.param("gpt2", {}, 1, 1, marks=pytest.mark.zoo),
        pytest.param("bert", {}, 1, 1, marks=pytest.mark.zoo),
        # Every other layer attends locally
        pytest.param("gemma2", {"num_hidden_layers": 7}, 1, 2, marks=pytest.mark.zoo),
        # Every other layer has no rotation
        pytest.param(
            "smollm3",
            {"num_hidden_layers": 7, "no_rope_layers": [1, 0, 1, 0, 1, 0, 1]},
            1,
            2,
            marks=pytest.mark.zoo,
        ),
        # Every third layer attends globally, and rotates otherwise; the second computes a mask
        ("modernbert", {"num_hidden_layers": 10}, 1, 3),
    ],
)
def test_the_graph_is_that_of_a_trace_of_all_layers(
    name: str,
    settings: dict[str, Any],
    first: int,
    period: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = []

    def counting(*arguments: Any) -> Any:
        counts.append(arguments)
        return to_onnx_ir(*arguments)

    model = build(name, **settings)
    surveyed = survey(model)
    stack = find_stack(model, surveyed)
    assert stack is not None
    assert (stack.first, stack.period) == (first, period)
    module = causal if surveyed.causal else masked
    to_onnx_ir = module.to_onnx_ir
    whole = optimize(trace(model, whole=True))
    monkeypatch.setattr(module, "to_onnx_ir", counting)
    repeated = optimize(trace(model, whole=False))
    assert len(counts) == 1, "the layers that were traced are found to be alike"
    assert description(repeated.graph) == description(whole.graph)
    products = sum(bool(modules_of(node)) for node in repeated.graph)
    assert products > model.config.num_hidden_layers


def enlarge(model: Any) -> None:
    model.model.layers[4].self_attn.scaling *= 2


def turn(model: Any) -> None:
    model.model.layers[2].mlp.act_fn = torch.nn.ReLU()


def shrink(model: Any) -> None:
    mlp = model.model.layers[3].mlp
    for name in ("gate_proj", "up_proj"):
        setattr(mlp, name, torch.nn.Linear(32, 8, bias=False))
    mlp.down_proj = torch.nn.Linear(8, 32, bias=False)


def share(model: Any) -> None:
    model.model.layers[4].mlp.up_proj = model.model.layers[3].mlp.up_proj


@pytest.mark.parametrize("change", [enlarge, turn, shrink, share])
def test_layers_that_differ_are_all_traced(change: Callable[[Any], None]) -> None:
    model = build("llama")
    assert find_stack(model, survey(model)) is not None
    change(model)
    assert find_stack(model, survey(model)) is None


def test_layers_of_two_kinds_are_all_traced_if_they_are_few() -> None:
    model = build("gemma2")
    assert len(set(model.config.layer_types)) == 2
    assert find_stack(model, survey(model)) is None


def test_layers_that_differ_in_the_code_only_are_found_by_parity(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = modeling_llama.LlamaDecoderLayer.forward

    def counting(layer: Any, *arguments: Any, **settings: Any) -> Any:
        output = forward(layer, *arguments, **settings)
        return output * (2 if layer.self_attn.layer_idx == 3 else 1)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", counting)
    source = tmp_path / "source"
    model = build("llama")
    model.save_pretrained(source)
    tokenizer = checkpoint("llama") / "tokenizer.json"
    (source / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    manifest = export(str(source), tmp_path / "bundle", console=console)
    assert "each layer is traced" in shown.getvalue()
    assert manifest.parity.ragged_batch < 1e-4
