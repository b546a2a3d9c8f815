"""Makes hqq.safetensors and torchao.safetensors: weights as the two libraries store them.

Beside each module the weight that the library itself restores, as "expected". Made with hqq
0.2.8.post1 and torchao 0.18.0, which the tests do not need. (The former needs termcolor, the
latter nothing but torch.)
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent
DTYPES: Any = torch  # torch's stubs lack int4


def weight(rows: int, columns: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, columns) * torch.logspace(-2, 0, columns)


def make_hqq() -> None:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

    tensors = {}
    for name, bits, size, axis in [
        ("four", 4, 32, 1),
        ("columns", 4, 64, 0),
        ("eight", 8, 32, 1),
        ("three", 3, 64, 1),
        ("two", 2, 16, 1),
        ("one", 1, 32, 1),
        ("rows", 4, None, 1),
    ]:
        linear = nn.Linear(64, 16, bias=False)
        linear.weight.data = weight(16, 64)
        config = BaseQuantizeConfig(nbits=bits, group_size=size, axis=axis)
        made = HQQLinear(linear, config, compute_dtype=torch.float16, device="cpu")
        meta = dict(made.meta)
        for key, value in made.state_dict().items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}.{key}"] = value.contiguous()
        meta |= {key: meta[key].float() for key in ("zero", "scale")}
        meta["compute_dtype"] = torch.float32
        tensors[f"{name}.expected"] = Quantizer.dequantize(made.W_q.data, meta)
    save_file(tensors, HERE / "hqq.safetensors")


def make_torchao() -> None:
    import torchao.quantization as ao
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization.granularity import PerAxis, PerGroup

    nibble = DTYPES.int4
    configs = {
        "four": ao.IntxWeightOnlyConfig(nibble, PerGroup(32)),
        "asymmetric": ao.IntxWeightOnlyConfig(
            nibble, PerGroup(32), mapping_type=ao.MappingType.ASYMMETRIC
        ),
        "eight": ao.IntxWeightOnlyConfig(torch.int8, PerAxis(0)),
        "int8": ao.Int8WeightOnlyConfig(),
        "float8": ao.Float8WeightOnlyConfig(),
        "dynamic": ao.Int8DynamicActivationIntxWeightConfig(nibble, PerGroup(32)),
    }
    whole, expected = {}, {}
    for name, config in configs.items():
        layer = nn.Sequential(nn.Linear(64, 16, bias=False))
        layer[0].weight.data = weight(16, 64)
        ao.quantize_(layer, config)
        whole[f"{name}.weight"] = layer[0].weight.data
        expected[f"{name}.expected"] = layer[0].weight.data.dequantize().contiguous()
    whole["plain.weight"] = torch.ones(3)
    tensors, metadata = flatten_tensor_state_dict(whole)
    save_file(tensors | expected, HERE / "torchao.safetensors", metadata=metadata)


if __name__ == "__main__":
    {"hqq": make_hqq, "torchao": make_torchao}[sys.argv[1]]()
