"""Weights of HQQ and torchao are those that the libraries themselves restore.

The files of `tests/data/quantized` were written by them, with the weights that they restore.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from maskdial.bundle.manifest import GRAPH
from maskdial_export.checkpoint import torchao
from maskdial_export.checkpoint.dequantize import dequantize, read_integers
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.quantize.gate import Gate
from tests.export.test_gguf_integers import weights_of

New = Callable[[str], Path]
Add = Callable[..., None]

DATA = Path(__file__).parents[1] / "data" / "quantized"
KEPT = {
    "hqq": {"four": (4, 32), "eight": (8, 32), "three": (3, 64), "two": (2, 16), "one": (1, 32)}
    | {"rows": (4, 64)},
    "torchao": {"four": (4, 32), "asymmetric": (4, 32), "dynamic": (4, 32)}
    | {"eight": (8, 64), "int8": (8, 64)},
}
"""The modules whose groups are neighboring inputs, with their bits and the size of a group."""


@pytest.mark.parametrize("library", KEPT)
def test_weights_are_those_of_the_library(library: str) -> None:
    stored = load_file(DATA / f"{library}.safetensors")
    expected = {key: stored.pop(key) for key in list(stored) if key.endswith(".expected")}
    settings = {"quant_method": library}
    restored = dequantize("it", settings, stored)
    kept = {}
    for key, weight in expected.items():
        module = key.removesuffix(".expected")
        torch.testing.assert_close(restored[f"{module}.weight"], weight, rtol=0, atol=0)
        parts = {name: each for name, each in stored.items() if name.startswith(f"{module}.")}
        integers = read_integers(
            settings, {name.removeprefix(f"{module}."): each for name, each in parts.items()}
        )
        if integers is not None:
            kept[module] = integers.bits, integers.block_size
            np.testing.assert_array_equal(integers.dequantize(), weight.numpy())
    assert kept == KEPT[library]
    assert len(expected) == len(kept) + 1  # groups of columns, and float8


def as_library(library: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor, str]:
    """Integers of 4 bits in groups of 32, as stored; the weight they stand for, its description."""
    rows, columns = weight.shape
    integers = torch.randint(0, 16, (rows, columns // 32, 32))
    scale = (0.01 + torch.rand(rows, columns // 32, 1) / 30).half().float()
    if library == "torchao":
        zero = torch.randint(0, 16, scale.shape)
        restored = ((integers - zero) * scale).flatten(1)
        parts = {
            "_weight_qdata": (integers - 8).flatten(1).to(torch.int8),
            "_weight_scale": scale[..., 0],
            "_weight_zero_point": (zero[..., 0] - 8).to(torch.int8),
        }
        return parts, restored, json.dumps({"_type": "IntxUnpackedToInt8Tensor"})
    zeros = (15 * torch.rand(scale.shape)).half().float()
    groups = integers.reshape(-1, 32).to(torch.uint8)
    parts = {
        "W_q": groups[: len(groups) // 2] << 4 | groups[len(groups) // 2 :],
        "scale": scale.half().reshape(-1, 1),
        "zero": zeros.half().reshape(-1, 1),
        "shape": torch.tensor(weight.shape),
        "axis": torch.tensor(1, dtype=torch.int32),
        "packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
    }
    return parts, ((integers - zeros) * scale).flatten(1), ""


@pytest.mark.parametrize(
    ("library", "settings"),
    [
        ("hqq", {"quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 32}}}),
        ("torchao", {"quant_type": {"default": {"_data": {"weight_dtype": {"_data": "int4"}}}}}),
    ],
)
def test_a_bundle_keeps_the_integers(
    library: str, settings: dict[str, object], new_checkpoint: New, add_json: Add, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    folder = new_checkpoint("llama")
    stored: dict[str, Tensor] = {}
    expected, metadata = {}, {"format": "pt"}
    for key, weight in load_file(folder / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if not key.endswith("_proj.weight") or weight.shape[1] % 32:
            stored[key] = weight
            continue
        parts, expected[module], described = as_library(library, weight)
        stored |= {f"{module}.{part}": each for part, each in parts.items()}
        metadata |= {key: described} if described else {}
    save_file(stored, folder / "model.safetensors", metadata)
    described_by = {"quant_method": library, **settings}
    add_json(folder / "config.json", quantization_config=described_by)
    gate = Gate(max_loss=math.inf)
    export(str(folder), tmp_path / "bundle", precision="int4", gate=gate)
    graph = onnx.load(tmp_path / "bundle" / GRAPH).graph
    products = [node for node in graph.node if node.input[1:2] and node.input[1].endswith(".int4")]
    assert {node.op_type for node in products} == {"MatMulNBits"}
    assert len(products) == 8
    for node in products:
        modules = node.input[1].removesuffix(".int4").split(",")
        weight = torch.cat([expected.pop(module) for module in modules])
        np.testing.assert_array_equal(weights_of(graph, node), weight.numpy())
    assert not expected


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"a.weight": json.dumps({"_type": "Int4Tensor"})}, "torchao's Int4Tensor, which is not"),
        ({"a.weight": "[]"}, "torchao's unreadable description"),
        ({"format": "pt"}, "tensors without a description"),
    ],
)
def test_kinds_of_torchao_that_are_refused(
    metadata: dict[str, str], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1)}, file, metadata)
    with pytest.raises(ExportError, match=words):
        torchao.check_files("it", [file])


@pytest.mark.parametrize(
    ("library", "change", "words"),
    [
        ("hqq", {"scale": None}, "scales or zeros are quantized themselves"),
        ("hqq", {"packing": torch.tensor([55, 200])}, "description of the weight is not known"),
        ("hqq", {"shape": torch.tensor([16, 7])}, "do not fit weights of the shape"),
        ("hqq", {"W_q": torch.zeros(2, 32, dtype=torch.uint8)}, "are packed as"),
        ("hqq", {"zero": torch.zeros(3)}, "3 zeros"),
        ("torchao", {"_weight_scale": None}, "have no scales that fit"),
        ("torchao", {"_weight_scale": torch.ones(5, 1)}, r"scales of the shape \(5, 1\)"),
        ("torchao", {"_weight_zero_point": torch.ones(5, 1)}, "do not fit"),
        ("torchao", {"_weight_act_pre_scale": torch.ones(1)}, "activations are scaled first"),
    ],
)
def test_damaged_modules(library: str, change: dict[str, Tensor | None], words: str) -> None:
    with safe_open(DATA / f"{library}.safetensors", "pt") as opened:
        stored = {key: opened.get_tensor(key) for key in opened.keys() if key.startswith("four.")}  # noqa: SIM118
    for part, value in change.items():
        stored.pop(f"four.{part}", None)
        stored |= {} if value is None else {f"four.{part}": value}
    with pytest.raises(ExportError, match=f"four of it is damaged: .*{words}"):
        dequantize("it", {"quant_method": library}, stored)
