"""Encoders that write out an attention of their own kind: Longformer's windows with global tokens.

They pad, or order their tensors, in a way that cannot be traced, so the base model's forward
function has another one in its place, too, around the model's own layers.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

Attend = Callable[..., tuple[Tensor, None]]
Forward = Callable[..., Any]


def split_heads(joined: Tensor, num_heads: int) -> Tensor:
    """(batch, length, num_heads * head_dim) to (batch, num_heads, length, head_dim)."""
    batch, length, _ = joined.shape
    return joined.view(batch, length, num_heads, -1).transpose(1, 2)


def longformer(module: Any, _attend: Attend, _model: PreTrainedModel) -> Forward:
    """The base model, without its padding to whole windows."""
    modeling: Any = sys.modules[type(module).__module__]

    def forward(
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **_: Any,
    ) -> Any:
        hidden = module.embeddings(input_ids, token_type_ids)
        masks = {
            "is_index_masked": None if attention_mask is None else attention_mask == 0,
            "is_index_global_attn": None
            if global_attention_mask is None
            else global_attention_mask == 1,
        }
        for layer in module.encoder.layer:
            hidden = layer(hidden, **masks)[0]
        return modeling.LongformerBaseModelOutputWithPooling(
            last_hidden_state=hidden,
            pooler_output=None if module.pooler is None else module.pooler(hidden),
        )

    return forward


def longformer_attention(module: Any, attend: Attend, model: PreTrainedModel) -> Forward:
    """Attention through a window, beyond which all tokens see the global ones.

    Global tokens see all tokens, by projections of their own. A classifier's only global token is
    the first one.
    """
    window = module.one_sided_attn_window_size + 1
    first_only = type(model).__name__.endswith("ForSequenceClassification")

    def forward(
        hidden_states: Tensor,
        is_index_masked: Tensor | None = None,
        is_index_global_attn: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor]:
        projections = module.query, module.key, module.value
        parts = [split_heads(project(hidden_states), module.num_heads) for project in projections]
        output = attend(
            module, *parts, None, sliding_window=window, seen_by_all=is_index_global_attn
        )[0].flatten(2)
        if is_index_global_attn is None:
            return (output,)
        if first_only:
            # Twice: ONNX Runtime multiplies a single row in an order that depends on the padding
            rows = hidden_states[:, :1].expand(-1, 2, -1)
            everywhere = _attend_everywhere(module, rows, hidden_states, is_index_masked)
            return (torch.cat([everywhere[:, :1], output[:, 1:]], dim=1),)
        everywhere = _attend_everywhere(module, hidden_states, hidden_states, is_index_masked)
        return (torch.where(is_index_global_attn[:, :, None], everywhere, output),)

    return forward


def _attend_everywhere(
    module: Any, rows: Tensor, hidden_states: Tensor, padding: Tensor | None
) -> Tensor:
    """The attention of global tokens, (batch, num_rows, hidden_size); ``padding``: (batch, length).

    Not through ``attend``, which attends from as many tokens as to.
    """
    query = split_heads(module.query_global(rows), module.num_heads)
    key = split_heads(module.key_global(hidden_states), module.num_heads)
    value = split_heads(module.value_global(hidden_states), module.num_heads)
    scores = query @ key.transpose(2, 3) / module.head_dim**0.5
    if padding is not None:
        scores = scores.masked_fill(padding[:, None, None, :], torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    output: Tensor = weights @ value
    return output.transpose(1, 2).flatten(2)
