"""Quantized checkpoints give the float32 weights that were packed."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from maskdial_export.checkpoint.dequantize import dequantize, read_integers
from maskdial_export.checkpoint.source import find
from maskdial_export.checkpoint.weights import load_model
from maskdial_export.errors import ExportError

New = Callable[[str], Path]
Refuse = Callable[..., None]
Add = Callable[..., None]

GROUP = 8
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}


def pack(integers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Rows of integers as int32, n per word: the one at ``order[i]`` in the bits from i * bits."""
    words = torch.zeros(len(integers), integers.shape[1] * bits // 32, dtype=torch.int64)
    for column in range(words.shape[1]):
        for i, place in enumerate(order or range(32 // bits)):
            words[:, column] |= integers[:, column * (32 // bits) + place] << (i * bits)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def random_integers(inputs: int, outputs: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Integers (inputs, outputs), and a zero point and a factor for each group of inputs."""
    torch.manual_seed(0)
    groups = inputs // GROUP
    integers = torch.randint(0, 2**bits, (inputs, outputs))
    zeros = torch.randint(0, 2**bits, (groups, outputs))
    zeros[0, :2] = torch.tensor([0, 2**bits - 1])
    return integers, zeros, (torch.rand(groups, outputs) / 100).half()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq(bits: int, version: str) -> None:
    integers, zeros, scales = random_integers(32, 64, bits)
    group = torch.arange(32)[torch.randperm(32)] // GROUP
    stored = {
        "m.qweight": pack(integers.T, bits).T.contiguous(),
        "m.qzeros": pack(zeros - int(version == "gptq") & 2**bits - 1, bits),
        "m.scales": scales,
        "m.g_idx": group.to(torch.int32),
        "m.bias": torch.ones(64),
        "norm.weight": torch.ones(3),
    }
    settings = GPTQ | {"bits": bits, "checkpoint_format": version}
    plain = dequantize("mine", settings, stored)
    assert set(plain) == {"m.weight", "m.bias", "norm.weight"}
    expected = (integers - zeros[group]) * scales.float()[group]
    assert torch.equal(plain["m.weight"], expected.T)
    parts = {key.removeprefix("m."): each for key, each in stored.items()}
    assert read_integers(settings, parts) is None  # groups of inputs that are no neighbors
    parts["g_idx"] = torch.arange(32) // GROUP
    kept = read_integers(settings, parts)
    assert kept is not None
    plain = dequantize("mine", settings, {f"m.{key}": each for key, each in parts.items()})
    np.testing.assert_array_equal(kept.dequantize(), plain["m.weight"].numpy())


def gptq_parts(integers: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """A module without g_idx, as it is stored."""
    return {
        "m.qweight": pack(integers.T, 4).T.contiguous(),
        "m.qzeros": pack(zeros, 4),
        "m.scales": scales,
    }


@pytest.mark.parametrize("stored", [7, 8, None])
@pytest.mark.parametrize("named", ["format", "checkpoint_format"])
@pytest.mark.parametrize("version", ["gptq", "GPTQ_V2"])
def test_zeros_of_symmetric_weights_are_in_the_middle(
    stored: int | None, named: str, version: str
) -> None:
    """Qwen3.5's GPTQ files state ``sym`` and the first version, and store the second's 8."""
    integers, zeros, scales = random_integers(32, 64, 4)
    parts = gptq_parts(integers, torch.full_like(zeros, stored or 0), scales)
    if stored is None:
        del parts["m.qzeros"]
    settings = GPTQ | {"sym": True, named: version}
    expected = (integers - 8) * scales.float()[torch.arange(32) // GROUP]
    assert torch.equal(dequantize("mine", settings, parts)["m.weight"], expected.T)


def test_zeros_that_are_not_in_the_middle_are_no_symmetric_ones() -> None:
    integers, zeros, scales = random_integers(32, 64, 4)
    parts = gptq_parts(integers, zeros, scales)
    with pytest.raises(ExportError, match=r"m of mine is damaged: sym .* all zeros are 8, and qz"):
        dequantize("mine", GPTQ | {"sym": True}, parts)


@pytest.mark.parametrize(
    ("settings", "shift"),
    [
        ({}, 1),
        ({"format": "gptq"}, 1),
        ({"format": "gptq_v2"}, 0),
        ({"checkpoint_format": "gptq_v2"}, 0),
        ({"checkpoint_format": "gptq_v2", "format": "gptq"}, 0),  # as transformers reads them
    ],
)
def test_both_names_of_the_format(settings: dict[str, Any], shift: int) -> None:
    integers, zeros, scales = random_integers(32, 64, 4)
    parts = gptq_parts(integers, zeros - shift & 15, scales)
    expected = (integers - zeros[torch.arange(32) // GROUP]) * scales.float().repeat_interleave(
        GROUP, 0
    )
    assert torch.equal(dequantize("mine", GPTQ | settings, parts)["m.weight"], expected.T)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_last_group_that_is_not_full(method: str) -> None:
    """40 inputs in groups of 16: 16, 16 and 8, without g_idx."""
    torch.manual_seed(0)
    integers, zeros = torch.randint(0, 16, (40, 64)), torch.randint(1, 16, (3, 64))
    scales = torch.rand(3, 64).half()
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        "m.qweight": pack(integers, 4, order),
        "m.qzeros": pack(zeros, 4, order),
        "m.scales": scales,
    }
    if method == "gptq":
        parts = gptq_parts(integers, zeros - 1, scales)
    settings = (AWQ if method == "awq" else GPTQ) | {"group_size": 16}
    group = torch.arange(40) // 16
    expected = (integers - zeros[group]) * scales.float()[group]
    assert torch.equal(dequantize("mine", settings, parts)["m.weight"], expected.T)
    own = {key.removeprefix("m."): each for key, each in parts.items()}
    assert read_integers(settings, own) is None
    with pytest.raises(ExportError, match="40 inputs are not in 3 groups of group_size 8"):
        dequantize("mine", settings | {"group_size": 8}, parts)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"m.qzeros": torch.zeros(4, 64, dtype=torch.int32)}, "qzeros are not packed"),
        ({"m.qzeros": None}, "it has no qzeros"),
        ({"m.scales": None}, "it has no scales"),
        ({"m.scales": torch.ones(4, 32)}, r"scales have the shape \(4, 32\), zeros"),
        ({"m.g_idx": torch.arange(32) // 4}, "32 inputs are in 8 groups, but scales has 4"),
        ({"m.g_idx": torch.arange(16) // 4}, "32 inputs are in 4 groups, but"),
        ({"m.qweight": torch.zeros(4, 64)}, "packed in torch.float32, not in int32"),
        ({"m.qweight": torch.zeros(64, dtype=torch.int32)}, "its parts do not fit together"),
    ],
)
def test_parts_that_do_not_fit_together(change: dict[str, Tensor | None], why: str) -> None:
    integers, zeros, scales = random_integers(32, 64, 4)
    parts: dict[str, Any] = gptq_parts(integers, zeros, scales) | change
    parts = {key: each for key, each in parts.items() if each is not None}
    with pytest.raises(ExportError, match=f"m of mine is damaged.*{why}"):
        dequantize("mine", GPTQ, parts)


@pytest.mark.parametrize("version", ["gemm", "GEMM"])
def test_awq(version: str) -> None:
    settings = AWQ | {"version": version}
    integers, zeros, scales = random_integers(32, 64, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {
        "m.qweight": pack(integers, 4, order),
        "m.qzeros": pack(zeros, 4, order),
        "m.scales": scales,
    }
    group = torch.arange(32) // GROUP
    expected = (integers - zeros[group]) * scales.float()[group]
    assert torch.equal(dequantize("mine", settings, stored)["m.weight"], expected.T)
    kept = read_integers(settings, {key.removeprefix("m."): each for key, each in stored.items()})
    assert kept is not None
    np.testing.assert_array_equal(kept.dequantize(), expected.T.numpy())


def test_bitsandbytes_8bit() -> None:
    weight = torch.randint(-127, 128, (4, 8), dtype=torch.int8)
    largest = torch.rand(4)
    stored = {"m.weight": weight, "m.SCB": largest, "m.weight_format": torch.tensor(0)}
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    plain = dequantize("mine", settings, stored)
    assert set(plain) == {"m.weight"}
    torch.testing.assert_close(plain["m.weight"], weight * largest[:, None] / 127)


@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_4bit(nested: bool) -> None:
    """Compared with bitsandbytes 0.50 itself once: equal to the last bit."""
    codes = torch.randint(0, 16, (6, 64))
    values, factors = torch.randn(16), torch.rand(6)
    state: dict[str, Any] = {"blocksize": 64, "shape": [6, 64]}
    first, second = codes.reshape(-1, 2).T
    stored = {"m.weight": (first << 4 | second).to(torch.uint8)[:, None]}
    stored |= {"m.weight.quant_map": values, "m.weight.absmax": factors}
    if nested:
        steps, few = torch.randn(256), torch.rand(2)
        small = torch.randint(0, 256, (6,))
        stored["m.weight.absmax"] = small.to(torch.uint8)
        stored |= {"m.weight.nested_quant_map": steps, "m.weight.nested_absmax": few}
        state |= {"nested_blocksize": 4, "nested_offset": 2.5}
        factors = steps[small] * few[torch.arange(6) // 4] + 2.5
    encoded = list(json.dumps(state).encode())
    stored["m.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(encoded, dtype=torch.uint8)
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    plain = dequantize("mine", settings, stored)
    assert set(plain) == {"m.weight"}
    assert torch.equal(plain["m.weight"], values[codes] * factors[:, None])


def to_fp8(weight: Tensor, in_blocks: bool) -> dict[str, Tensor]:
    """The parts that stand for a matrix, in blocks of 16 by 16; edges may be smaller.

    Without blocks there is one factor, and one for the inputs of kernels in fp8.
    """
    if not in_blocks:
        factor = torch.rand(()) + 0.5
        scaled = (weight / factor).to(torch.float8_e4m3fn)
        parts = {"weight": scaled, "weight_scale_inv": factor}
        return parts | {"activation_scale": torch.rand(())}
    rows, columns = (-(-size // 16) for size in weight.shape)
    factors = torch.rand(rows, columns) + 0.5
    whole = factors.repeat_interleave(16, 0).repeat_interleave(16, 1)
    scaled = weight / whole[: weight.shape[0], : weight.shape[1]]
    return {"weight": scaled.to(torch.float8_e4m3fn), "weight_scale_inv": factors}


def quantized_checkpoint(source: Path, settings: Mapping[str, Any], add_json: Add) -> None:
    """Replaces the projections of a Llama by float8 ones."""
    path = source / "model.safetensors"
    weights = load_file(path)
    for name in [name for name in weights if "_proj." in name]:
        module = name.removesuffix("weight")
        parts = to_fp8(weights.pop(name), bool(settings["weight_block_size"]))
        weights |= {f"{module}{part}": each for part, each in parts.items()}
    save_file(weights, path, metadata={"format": "pt"})
    add_json(source / "config.json", quantization_config=settings)


@pytest.mark.parametrize("size", [(16, 16), None])
def test_fp8_checkpoint_against_transformers(
    size: tuple[int, int] | None, new_checkpoint: New, add_json: Add
) -> None:
    source = new_checkpoint("llama")
    kind = {} if size else {"weight_block_size": None, "activation_scheme": "static"}
    quantized_checkpoint(source, FP8 | kind, add_json)
    found = find(str(source), "auto", revision=None, allow_pickle=False)
    ours = load_model(found, strict=True, console=Console(quiet=True)).model.state_dict()
    theirs = transformers.LlamaForCausalLM.from_pretrained(
        source,
        quantization_config=transformers.FineGrainedFP8Config(
            dequantize=True, weight_block_size=size
        ),
    ).state_dict()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name].float()), name


def test_fp8_of_other_blocks_than_the_factors() -> None:
    parts = {f"m.{part}": each for part, each in to_fp8(torch.rand(64, 32), True).items()}
    assert dequantize("mine", FP8, parts)["m.weight"].shape == (64, 32)
    with pytest.raises(ExportError, match=r"factors of the shape \(4, 2\), not \(2, 2\)"):
        dequantize("mine", FP8 | {"weight_block_size": [32, 16]}, parts)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"quant_method": "gptq", "bits": 3}, "gptq of 3 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq of 4 bits in format marlin"),
        (GPTQ | {"format": "bitblas"}, "gptq of 4 bits in format bitblas"),
        (GPTQ | {"pack_dtype": "int64"}, "gptq packed in int64"),
        (
            GPTQ | {"dynamic": {"-:.*gate.*": {}, "+:.*mlp.*": {"bits": 8, "group_size": 8}}},
            "gptq with other bits for +:.*mlp.* (dynamic)",
        ),
        (FP8 | {"expert_dtype": "fp4"}, "fp8 with experts in fp4"),
        (AWQ | {"version": "gemv"}, "awq of 4 bits in format gemv"),
        (AWQ | {"version": None, "format": "llm-awq"}, "awq of 4 bits in format llm-awq"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            "compressed-tensors of",
        ),
        ({"quant_method": "quanto"}, "quanto, which is not supported"),
        ({}, "an unnamed format"),
    ],
)
def test_format_that_is_not_supported(
    settings: dict[str, Any], kind: str, assert_refused: Refuse, new_checkpoint: New, add_json: Add
) -> None:
    source = new_checkpoint("llama")
    add_json(source / "config.json", quantization_config=settings)
    assert_refused(source, f"is quantized with {kind}")


def test_transposed_layers(assert_refused: Refuse, new_checkpoint: New, add_json: Add) -> None:
    """GPT-2's weights are (inputs, outputs); a square one would be transposed unnoticed."""
    source = new_checkpoint("gpt2")
    add_json(source / "config.json", quantization_config=FP8)
    assert_refused(source, "which is not supported for gpt2 models")
