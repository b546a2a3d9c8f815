"""Tiny checkpoints that bring a layer for multi-token prediction."""

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import nn
from transformers.modeling_layers import MtpModel

# What Mellum's checkpoints call the parts of a layer beside its block
_MELLUM = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
_MELLUM |= {"eh_proj": "fc"}


def add_layer(model: Any) -> MtpModel:
    """A layer with random weights for a model whose configuration has one."""
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
        if isinstance(model, transformers.MellumForCausalLM):
            name = f"mtp.{_MELLUM[part]}.{rest}" if part in _MELLUM else f"mtp.layers.0.{rest}"
        else:
            own = rest if part == "mtp_block" else name.replace("post_norm", "shared_head.norm")
            name = f"model.layers.{model.config.num_hidden_layers}.{own}"
        tensors[name] = tensor.contiguous()
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def make_circling(folder: Path, tokenizer: Any, max_length: int) -> None:
    """A checkpoint of random weights but for its head, which goes in a circle of letters, and whose
    layer for multi-token prediction mostly goes in it as well.
    """
    torch.manual_seed(0)
    config = transformers.MellumConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=max_length,
        bos_token_id=0,
        eos_token_id=2,
        layer_types=["full_attention"],
        mlp_layer_types=["dense"],
        num_mtp_layers=1,
        mtp_layer_types=["full_attention"],
        mtp_mlp_layer_types=["dense"],
        initializer_range=0.15,
    )
    model = transformers.MellumForCausalLM(config)
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
