"""Weights of compressed-tensors are those that the library itself restores."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from maskdial.bundle.manifest import GRAPH
from maskdial_export.checkpoint.dequantize import dequantize, read_integers
from maskdial_export.checkpoint.source import find
from maskdial_export.checkpoint.weights import load_model
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.quantize.gate import Gate
from tests.export.test_gguf_integers import weights_of

New = Callable[[str], Path]
Add = Callable[..., None]

ROWS, COLUMNS = 48, 64
DYNAMIC = QuantizationArgs(num_bits=8, dynamic=True, strategy="token")
# name -> (format, arguments, shape of the scales)
FORMS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "int4 in groups": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 16},
        (ROWS, 4),
    ),
    "int4 in groups with zero points": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        (ROWS, 2),
    ),
    "int8, packed": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}, (ROWS, 1)),
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, (ROWS, 1)),
    "int8 with zero points": (
        "int-quantized",
        {"num_bits": 8, "strategy": "channel", "symmetric": False},
        (ROWS, 1),
    ),
    "int8, one scale": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}, (1,)),
    "fp8": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        (ROWS, 1),
    ),
    "fp8, one scale": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        (1,),
    ),
    "fp8 in blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]},
        (2, 2),
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        (ROWS, 2),
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
        (ROWS, 2),
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        (ROWS, 4),
    ),
}


def compress(
    name: str, weight: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """What the library stores for a weight, and what it restores from that."""
    kind, arguments, _ = FORMS[name]
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**arguments), input_activations=DYNAMIC
    )
    compressor = BaseCompressor.get_value_from_registry(kind)
    generator = torch.Generator().manual_seed(1)
    scale = (torch.rand(shape, generator=generator) / 50 + 0.002).to(dtype)
    state = {"weight": weight.to(dtype), "weight_scale": scale}
    if kind.startswith("mxfp"):
        state["weight_scale"] = torch.exp2(torch.randint(-9, -4, shape, generator=generator)).to(
            dtype
        )
    if kind.startswith("nvfp4"):
        state["weight_scale"] = torch.rand(shape, generator=generator) * 200 + 1
        state["weight_global_scale"] = torch.tensor([2000.0])
    if not arguments.get("symmetric", True):
        zero = torch.randint(-5, 5, shape, generator=generator)
        state["weight_zero_point"] = zero.to(torch.int8)
    stored = compressor.compress(state, scheme)
    return stored, compressor.decompress(stored, scheme)["weight"]


def settings(name: str) -> dict[str, Any]:
    kind, arguments, _ = FORMS[name]
    groups = {"group_0": {"weights": arguments, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_equal_to_the_library(name: str, dtype: torch.dtype) -> None:
    """In float32 to the last bit; the library rounds to the type of the scales."""
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)) / 10
    stored, expected = compress(name, weight, FORMS[name][2], dtype)
    parts = {f"m.{key}": each for key, each in stored.items()}
    restored = dequantize(
        "a model",
        settings(name),
        parts | {"m.bias": torch.ones(ROWS), "norm.weight": torch.ones(3)},
    )
    assert restored.keys() == {"m.weight", "m.bias", "norm.weight"}
    found = restored["m.weight"]
    assert found.dtype == torch.float32
    assert len(set(found.flatten().tolist())) > 5
    torch.testing.assert_close(found.to(expected.dtype), expected, rtol=0, atol=0)
    integers = read_integers(settings(name), stored)
    assert (integers is not None) == ("weight_packed" in stored)
    if integers is not None:
        np.testing.assert_array_equal(integers.dequantize(), found.numpy())
        assert integers.values.min() >= (
            0 if integers.zero is not None else -(2**integers.bits) / 2
        )


def test_a_bundle_keeps_the_integers(new_checkpoint: New, add_json: Add, tmp_path: Path) -> None:
    """Of int4, to the last bit; layers that are not quantized become int8."""
    folder = new_checkpoint("llama")
    stored: dict[str, Tensor] = {}
    name, expected = "int4 in groups with zero points", {}
    for key, weight in load_file(folder / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if not key.endswith("_proj.weight") or weight.shape[1] % 32:
            stored[key] = weight
            continue
        parts, restored = compress(name, weight, (len(weight), weight.shape[1] // 32), weight.dtype)
        expected[module] = restored
        stored |= {f"{module}.{part}": each for part, each in parts.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    add_json(folder / "config.json", quantization_config=settings(name))
    gate = Gate(max_loss=math.inf)
    manifest = export(str(folder), tmp_path / "bundle", precision="int4", gate=gate)
    graph = onnx.load(tmp_path / "bundle" / GRAPH).graph
    products = [node for node in graph.node if node.input[1:2] and node.input[1].endswith(".int4")]
    assert {node.op_type for node in products} == {"MatMulNBits"}
    assert len(products) == 8
    for node in products:
        modules = node.input[1].removesuffix(".int4").split(",")
        weight = torch.cat([expected.pop(module) for module in modules])
        np.testing.assert_array_equal(weights_of(graph, node), weight.numpy())
    assert not expected
    assert manifest.quality is not None
    down = [f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)]
    assert {*manifest.quality.raised} == {*down, "lm_head"}


def test_a_whole_checkpoint(new_checkpoint: New, add_json: Add) -> None:
    """Every projection is packed; scales of the KV cache belong to another precision."""
    folder = new_checkpoint("llama")
    weights = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    expected = {}
    for key, weight in weights.items():
        if not key.endswith("_proj.weight"):
            stored[key] = weight
            continue
        shape = (len(weight), weight.shape[1] // 16)
        parts, restored = compress("int4 in groups", weight, shape, torch.float32)
        expected[key] = restored
        stored |= {f"{key.removesuffix('weight')}{part}": each for part, each in parts.items()}
    for name in ("k_scale", "v_scale"):
        stored[f"model.layers.0.self_attn.{name}"] = torch.ones(1)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    add_json(folder / "config.json", quantization_config=settings("int4 in groups"))
    source = find(str(folder), "auto", revision=None, allow_pickle=False)
    model = load_model(source, strict=True, console=Console(quiet=True)).model
    found = model.state_dict()
    assert len(expected) == 14
    for key, each in expected.items():
        torch.testing.assert_close(found[key], each, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "with .* of sparse-24-bitmask"),
        ({"transform_config": {"config_groups": {"R3": {}}}}, r"after transforms \(R3 in"),
    ],
)
def test_what_is_not_supported(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ExportError, match=f"a model is quantized {why}"):
        dequantize("a model", settings("int8") | changes, {})


@pytest.mark.parametrize(
    ("part", "value", "why"),
    [
        ("weight_scale", torch.ones(ROWS, 7), r"scales of the shape \(48, 7\) do not fit"),
        ("weight_packed", torch.ones(ROWS, 9, dtype=torch.int32), r"shape \(48, 9\); 4 and 8 bits"),
    ],
)
def test_damaged_parts(part: str, value: Tensor, why: str) -> None:
    stored, _ = compress("int4 in groups", torch.randn(ROWS, COLUMNS), (ROWS, 4), torch.float32)
    parts = {f"m.{key}": each for key, each in (stored | {part: value}).items()}
    with pytest.raises(ExportError, match=rf"m of a model is damaged: .*{why}"):
        dequantize("a model", settings("int4 in groups"), parts)


def test_awq_by_the_library() -> None:
    """The library's own reading of AutoAWQ, whose integers have an order of their own."""
    generator = torch.Generator().manual_seed(0)

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)

    stored = {
        "m.qweight": words(COLUMNS, ROWS // 8),
        "m.qzeros": words(COLUMNS // 16, ROWS // 8),
        "m.scales": torch.rand(COLUMNS // 16, ROWS, generator=generator),
    }
    awq = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}
    found = dequantize("a model", awq, stored)["m.weight"]
    converted = AutoAWQConverter.from_autoawq_config(awq, targets=["re:m"]).process(dict(stored))
    _, arguments, _ = FORMS["int4 in groups with zero points"]
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**arguments | {"group_size": 16})
    )
    packed = BaseCompressor.get_value_from_registry("pack-quantized")
    parts = {key.removeprefix("m."): each for key, each in converted.items()}
    expected = packed.decompress(parts, scheme)["weight"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
