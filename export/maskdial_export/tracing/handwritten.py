"""Attention that does not go through transformers' attention interface.

A few older models write it out: scores, mask, softmax, product. Each of them has an entry here,
which computes queries, keys and values as the model does and hands them to the given function.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial_export.tracing import handwritten_encoders as encoders
from maskdial_export.tracing.handwritten_encoders import Attend, Forward, split_heads
from maskdial_export.tracing.positions import max_length
from maskdial_export.tracing.products import with_products

_Write = Callable[[Any, Attend, PreTrainedModel], Forward]


@contextmanager
def interfaced(model: PreTrainedModel, attend: Attend) -> Iterator[None]:
    """Lets hand-written attention go through ``attend`` inside the block.

    ``attend`` is called as by transformers; models with ALiBi pass ``alibi``, float (num_heads,
    max_length), which is added to the scores by the position of the key.
    """
    with ExitStack() as patches:
        for module in list(model.modules()):
            name = f"{type(module).__module__.rpartition('.')[2]}.{type(module).__name__}"
            if name not in _METHODS:
                continue
            if name in _PRODUCTS:
                patches.enter_context(with_products(module, _PRODUCTS[name](module)))
            method, write = _METHODS[name]
            patches.enter_context(mock.patch.object(module, method, write(module, attend, model)))
            modeling = sys.modules[type(module).__module__]
            if hasattr(modeling, "create_causal_mask"):
                patches.enter_context(mock.patch.object(modeling, "create_causal_mask", _no_mask))
        yield


def _no_mask(**_: Any) -> Tensor:
    """A tensor in place of the mask, for models that convert it."""
    return torch.zeros(1, 1, 1, 1)


def _bias(model: PreTrainedModel, module: Any) -> Tensor:
    """ALiBi's bias at every position of a key, by the model's own function; zero at the first."""
    modeling: Any = sys.modules[type(module).__module__]
    positions = max_length(model)
    if hasattr(modeling, "build_mpt_alibi_tensor"):
        max_bias = model.config.attn_config.alibi_bias_max
        bias = modeling.build_mpt_alibi_tensor(module.n_heads, positions, max_bias)
    else:
        mask = torch.ones(1, positions, dtype=torch.int64)
        bias = modeling.build_alibi_tensor(mask, module.num_heads, torch.float32)
    table: Tensor = bias.reshape(-1, positions)
    return (table - table[:, :1]).to(model.dtype)


def _gpt(module: Any, attend: Attend, _model: PreTrainedModel) -> Forward:
    scaling = None if module.scale else 1.0

    def attn(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> list[Tensor]:
        output = attend(module, query, key.transpose(2, 3), value, None, scaling=scaling)[0]
        return [output.transpose(1, 2)]

    return attn


def _gpt_neo(module: Any, attend: Attend, _model: PreTrainedModel) -> Forward:
    settings: dict[str, Any] = {"scaling": 1.0}
    if module.attention_type == "local":
        settings["sliding_window"] = module.config.window_size

    def attn(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        output = attend(module, query, key, value, None, **settings)[0]
        return output.transpose(1, 2), None

    return attn


def _gpt_j(module: Any, attend: Attend, _model: PreTrainedModel) -> Forward:
    def attn(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        output = attend(module, query, key, value, None, scaling=1 / module.scale_attn)[0]
        return output.transpose(1, 2), None

    return attn


def _xglm(module: Any, attend: Attend, _model: PreTrainedModel) -> Forward:
    def forward(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        projections = (module.q_proj, module.k_proj, module.v_proj)
        parts = [split_heads(project(hidden_states), module.num_heads) for project in projections]
        output = attend(module, *parts, None, scaling=module.scaling)[0]
        return module.out_proj(output.flatten(2)), None

    return forward


def _bloom(module: Any, attend: Attend, model: PreTrainedModel) -> Forward:
    alibi = _bias(model, module)

    def forward(hidden_states: Tensor, residual: Tensor, **_: Any) -> tuple[Tensor, None]:
        parts = module._reshape(module.query_key_value(hidden_states))
        output = attend(
            module, *parts, None, scaling=module.inv_norm_factor, alibi=module.beta * alibi
        )[0]
        return module.dense(output.flatten(2)) + residual, None

    return forward


def _mpt(module: Any, attend: Attend, model: PreTrainedModel) -> Forward:
    alibi = _bias(model, module)

    def forward(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        mixed = module.Wqkv(hidden_states)
        if module.clip_qkv:
            mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        parts = [split_heads(part, module.n_heads) for part in mixed.chunk(3, dim=2)]
        output = attend(module, *parts, None, scaling=module.softmax_scale, alibi=alibi)[0]
        return module.out_proj(output.flatten(2)), None

    return forward


def _falcon(module: Any, attend: Attend, _model: PreTrainedModel) -> Forward:
    """Without ALiBi, which transformers 5.23 adds twice under eager attention."""
    modeling: Any = sys.modules[type(module).__module__]

    def forward(
        hidden_states: Tensor,
        *_: Any,
        position_embeddings: tuple[Tensor, Tensor],
        **__: Any,
    ) -> tuple[Tensor, None]:
        batch, length = hidden_states.shape[:2]
        mixed = module.query_key_value(hidden_states)
        grouped = mixed.view(batch, length, module.num_kv_heads, -1, module.head_dim)
        parts = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
        query, key, value = (part.transpose(1, 2) for part in parts)
        query, key = modeling.apply_rotary_pos_emb(query, key, *position_embeddings)
        output = attend(module, query, key, value, None, scaling=module.inv_norm_factor)[0]
        return module.dense(output.flatten(2)), None

    return forward


# modeling file and class -> the method that attends, and what takes its place
_METHODS: Mapping[str, tuple[str, _Write]] = {
    "modeling_openai.Attention": ("_attn", _gpt),
    "modeling_gpt_neo.GPTNeoSelfAttention": ("_attn", _gpt_neo),
    "modeling_gptj.GPTJAttention": ("_attn", _gpt_j),
    "modeling_codegen.CodeGenAttention": ("_attn", _gpt_j),
    "modeling_xglm.XGLMAttention": ("forward", _xglm),
    "modeling_bloom.BloomAttention": ("forward", _bloom),
    "modeling_mpt.MptAttention": ("forward", _mpt),
    "modeling_falcon.FalconAttention": ("forward", _falcon),
    "modeling_longformer.LongformerModel": ("forward", encoders.longformer),
    "modeling_longformer.LongformerSelfAttention": ("forward", encoders.longformer_attention),
    "modeling_xlnet.XLNetModel": ("forward", encoders.xlnet),
    "modeling_xlnet.XLNetRelativeAttention": ("forward", encoders.xlnet_attention),
}
# modeling file and class -> the layers of weights that are plain parameters
_PRODUCTS: Mapping[str, Callable[[Any], nn.Module]] = {
    "modeling_xlnet.XLNetRelativeAttention": encoders.xlnet_products,
}
