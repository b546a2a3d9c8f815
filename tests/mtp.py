"""Tiny checkpoints that bring a layer for multi-token prediction."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
import transformers
from torch import nn
from transformers.modeling_layers import MtpModel

# What checkpoints of Mellum and Qwen call the parts of a layer beside its block
_NAMES = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
_NAMES |= {"eh_proj": "fc"}

DENSE = {"intermediate_size": 48}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
EXPERTS |= {"shared_expert_intermediate_size": 24}


def declared(model: Any) -> AbstractContextManager[Any]:
    """Says inside the block that Qwen's models have a layer, as other configurations do."""
    config = model.config.get_text_config()
    if hasattr(config, "num_mtp_layers"):
        return nullcontext()
    types = ["full_attention"]
    return mock.patch.multiple(config, create=True, num_mtp_layers=1, mtp_layer_types=types)


def add_layer(model: Any) -> MtpModel:
    """A layer with random weights for a model."""
    with declared(model):
        mtp = MtpModel(model, 1)
    with torch.no_grad():
        for parameter in mtp.layers.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.15)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return mtp.eval()


def save(model: Any, mtp: Any, folder: Path) -> None:
    """Saves a model and its layer as published checkpoints have them."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for name, tensor in mtp.layers[0].state_dict().items():
        part, _, rest = name.partition(".")
        if model.config.model_type in ("glm4_moe", "deepseek_v3"):
            own = rest if part == "mtp_block" else name.replace("post_norm", "shared_head.norm")
            name = f"model.layers.{model.config.num_hidden_layers}.{own}"
        else:
            name = f"mtp.{_NAMES[part]}.{rest}" if part in _NAMES else f"mtp.layers.0.{rest}"
        if tensor.ndim == 3 and "qwen3_5" not in model.config.model_type:
            tensors |= _of_each_expert(name, tensor)
        else:
            tensors[name] = tensor.contiguous()
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def _of_each_expert(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weights of experts, (experts, outputs, inputs), by themselves."""
    path, _, kind = name.rpartition(".")
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    return {
        f"{path}.{number}.{each}.weight": part.contiguous()
        for number, expert in enumerate(tensor)
        for each, part in zip(names, expert.chunk(len(names)), strict=True)
    }


def make_circling(
    folder: Path, tokenizer: Any, max_length: int, architecture: str = "Qwen3_5ForCausalLM"
) -> None:
    """A checkpoint of random weights but for its head, which goes in a circle of letters, and whose
    layer for multi-token prediction mostly goes in it as well. Its first layer is recurrent.

    Products with fewer than 16 outputs would not be int8 in int8 bundles.
    """
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        linear_num_key_heads=4,
        linear_num_value_heads=16,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=max_length,
        bos_token_id=0,
        eos_token_id=2,
        initializer_range=0.15,
        **DENSE if architecture == "Qwen3_5ForCausalLM" else EXPERTS,
    )
    model = model_class(config)
    circle = [tokenizer.token_to_id(letter) for letter in "abcdefg"]
    mtp: Any = add_layer(model)
    with torch.no_grad():
        table = model.model.embed_tokens.weight.normal_()
        head = torch.zeros_like(table)
        head[circle] = 0.3 * table[circle[-1:] + circle[:-1]]  # each is like the one before it
        model.lm_head.weight.copy_(head)
        mtp.layers[0].eh_proj.weight[:, :32] = torch.eye(32)  # what it reads of the token
    save(model, mtp, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
