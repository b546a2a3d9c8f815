"""Sensitivity: the ranking of layers by their quantization error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maskdial_export.quantize.quantize import IntegerPrecision, projections, quantize
from maskdial_export.quantize.sensitivity import (
    ROUNDINGS,
    int8_blocks,
    int8_rows,
    int8_weight,
    layer_errors,
    rank,
)
from maskdial_export.quantize.table import word_embedding
from maskdial_export.session import MaskedSession
from maskdial_export.tracing import masked
from maskdial_export.tracing.graph import optimize, save
from maskdial_export.tracing.survey import survey

New = Callable[[str], Path]
TEXTS = [np.arange(5, 60), np.arange(90, 20, -3)]


@pytest.mark.parametrize(
    ("name", "layer", "before"),
    [
        ("bert", "bert.encoder.layer.0.output.dense", "bert.encoder.layer.0.intermediate.dense"),
        ("gpt2", "transformer.h.0.mlp.c_proj", "transformer.h.0.mlp.c_fc"),
    ],
)
def test_layer_with_an_outlier_comes_first(
    name: str, layer: str, before: str, checkpoint: New, load_reference: Callable[[Path], Any]
) -> None:
    model = load_reference(checkpoint(name))
    modules = dict(model.named_modules())
    names = projections(model)
    assert rank(layer_errors(model, names, TEXTS, "int8"))[0] != layer
    with torch.no_grad():
        modules[before].bias[3] = 1e4
        weight = modules[layer].weight
        (weight.T if name == "bert" else weight)[3] = 0
    ranked = rank(layer_errors(model, names, TEXTS, "int8"))
    assert ranked[0] == layer
    assert sorted(ranked) == sorted(names)
    assert not any(module._forward_hooks for module in modules.values())


def test_int4_ranks_by_its_own_weights(
    checkpoint: New, load_reference: Callable[[Path], Any]
) -> None:
    """A huge weight makes int4's step too large for its block; int8 loses less."""
    model = load_reference(checkpoint("bert"))
    layer = "bert.encoder.layer.1.attention.output.dense"
    weight = dict(model.named_modules())[layer].weight
    with torch.no_grad():
        weight[:, 0] = 10 * weight.abs().max()
    assert rank(layer_errors(model, projections(model), TEXTS, "int4"))[0] == layer


def test_a_token_of_large_activations_does_not_rank_the_layers(
    checkpoint: New, load_reference: Callable[[Path], Any]
) -> None:
    """A first token that outweighs the others a thousand times, and is rounded well, hides nothing
    of what they lose."""
    model = load_reference(checkpoint("llama"))
    names = projections(model)
    sink, damaged = names[0], names[-2]

    def first_is_large(_module: Any, read: Any) -> Any:
        rows = read[0].clone()
        rows[:, 0] = 1000  # one block of equal numbers is exact
        return (rows,)

    def outlier(_module: Any, read: Any) -> Any:
        rows = read[0].clone()
        rows[:, 1:, 3] = 1e3
        return (rows,)

    with torch.no_grad():
        model.get_submodule(damaged).weight[:, 3] = 0
    handles = [
        model.get_submodule(damaged).register_forward_pre_hook(outlier),
        model.get_submodule(damaged).register_forward_pre_hook(first_is_large),
    ]
    errors = layer_errors(model, names, TEXTS, "int8")
    for handle in handles:
        handle.remove()
    assert rank(errors)[0] == damaged != sink
    assert errors[damaged] > 0.01


def test_rounding_is_within_half_a_step() -> None:
    torch.manual_seed(0)
    rows = torch.randn(7, 200)
    rows[3] = 0
    assert_rounded(int8_rows(rows), rows, rows.abs().amax(1, keepdim=True) / 127)
    weight = torch.randn(200, 5)
    for start in range(0, 200, 32):
        block = slice(start, start + 32)
        part = weight[block]
        assert_rounded(int8_weight(weight)[block], part, 1.001 * part.abs().amax(0) / 127)
        part = rows[:, block]
        assert_rounded(int8_blocks(rows)[:, block], part, part.abs().amax(1, keepdim=True) / 127)


def test_int4_of_float16_has_smaller_blocks_and_float16_scales() -> None:
    torch.manual_seed(0)
    weight = torch.randn(200, 5)
    of_rows, of_weight = ROUNDINGS["int4-fp16"]
    for start in range(0, 200, 64):
        part = weight[start : start + 64]
        step = part.abs().amax(0) / 8
        rounded = of_weight(weight)[start : start + 64]
        # what lies on the other side of the largest value ends at 7 steps
        assert ((rounded - part).abs() <= 1.01 * step).all()
        assert not torch.equal(rounded, part)
        integers = rounded / rounded.abs().amax(0) * 8
        assert torch.allclose(integers, integers.round(), atol=1e-3)
    rows = torch.randn(3, 200)
    assert torch.equal(of_rows(rows), rows.half().float())


def assert_rounded(rounded: torch.Tensor, values: torch.Tensor, step: torch.Tensor) -> None:
    assert ((rounded - values).abs() <= 0.501 * step).all()
    assert not torch.equal(rounded, values)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_rounding_is_that_of_the_graph(
    precision: IntegerPrecision,
    checkpoint: New,
    load_reference: Callable[[Path], Any],
    tmp_path: Path,
) -> None:
    """torch's rounding and ONNX Runtime's operators agree on one layer and the embedding."""
    model = load_reference(checkpoint("bert-classify"))
    layer = "bert.encoder.layer.0.intermediate.dense"
    others = [name for name in projections(model) if name != layer]
    graph = optimize(masked.trace(model, survey(model), "classify"))
    embedding = word_embedding(model)
    save(quantize(graph, precision, others, embedding=embedding), tmp_path / "model.onnx")
    of_rows, of_weight = ROUNDINGS[precision]

    def round_it(module: Any, arguments: Any, _output: Any) -> torch.Tensor:
        rows = of_rows(arguments[0].flatten(0, -2))
        product: torch.Tensor = rows @ of_weight(module.weight.T) + module.bias
        return product[None]

    def round_rows(_module: Any, _arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return int8_rows(output[0])[None]

    ids = np.arange(5, 60)
    with torch.no_grad():
        exact = model(torch.from_numpy(ids[None])).logits[0].numpy()
        model.get_submodule(layer).register_forward_hook(round_it)
        model.get_input_embeddings().register_forward_hook(round_rows)
        expected = model(torch.from_numpy(ids[None])).logits[0].numpy()
    (logits,) = MaskedSession(tmp_path / "model.onnx").run([ids])
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    assert np.abs(exact - expected).max() > 1e-4
