"""Encoders that write out an attention of their own kind: Longformer and XLNet.

Their base models pad texts, or compute masks, in a way that cannot be traced. So these, too, get
another forward function, around the model's own layers.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial_export.errors import ExportError
from maskdial_export.tracing.products import linear

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


def xlnet(module: Any, _attend: Attend, _model: PreTrainedModel) -> Forward:
    """The base model with the batch first, and without a memory of earlier texts.

    Raises:
        ExportError: its tokens attend to the left only.
    """
    modeling: Any = sys.modules[type(module).__module__]
    if module.attn_type != "bi":
        raise ExportError(
            f"XLNet with attn_type {module.attn_type!r} in config.json is not supported; 'bi' is, "
            "where tokens attend to both sides"
        )

    def forward(input_ids: Tensor, token_type_ids: Tensor | None = None, **_: Any) -> Any:
        hidden = module.word_embedding(input_ids)
        length = input_ids.shape[1]
        distances = (length - torch.arange(2 * length)).float()  # of a query from a key
        if module.clamp_len > 0:
            distances = distances.clamp(-module.clamp_len, module.clamp_len)
        exponents = torch.arange(0, module.d_model, 2).float() / module.d_model
        positions = module.positional_embedding(distances, 1 / torch.pow(10000, exponents))
        positions = positions.transpose(0, 1).to(hidden.dtype)
        apart = None
        if token_type_ids is not None:
            apart = token_type_ids[:, :, None] != token_type_ids[:, None, :]
        for layer in module.layer:
            hidden = layer(hidden, None, None, None, positions, apart)[0]
        return modeling.XLNetModelOutput(last_hidden_state=hidden)

    return forward


def xlnet_products(module: Any) -> nn.ModuleDict:
    """The layers of its weights, which are (hidden_size, num_heads, head_dim) each."""
    weights = {name: getattr(module, name).flatten(1) for name in "qkvor"}
    return nn.ModuleDict(
        {name: linear(each.T if name == "o" else each) for name, each in weights.items()}
    )


def xlnet_attention(module: Any, attend: Attend, _model: PreTrainedModel) -> Forward:
    """Attention to content, distance and segment (Yang et al., arXiv:1906.08237).

    The score of the segment is the difference to that of the query's own: what is the same for all
    keys has no weight.
    """

    def project(states: Tensor, name: str) -> Tensor:
        return split_heads(module.products[name](states), module.n_head)

    def forward(
        hidden: Tensor,
        _query_stream: None,
        _mask: None,
        _query_mask: None,
        positions: Tensor,
        apart: Tensor | None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        query, key, value = (project(hidden, name) for name in "qkv")
        distant = project(positions, "r").transpose(2, 3)
        scores = (query + module.r_r_bias[:, None]) @ distant
        scores = module.rel_shift_bnij(scores, hidden.shape[1])
        if apart is not None:
            step = (module.seg_embed[1] - module.seg_embed[0])[:, None]
            segment = ((query + module.r_s_bias[:, None]) * step).sum(-1, keepdim=True)
            scores = scores + torch.where(apart[:, None], segment, 0)
        output = attend(
            module,
            query + module.r_w_bias[:, None],
            key,
            value,
            None,
            scaling=module.scale,
            position_bias=scores * module.scale,
        )[0]
        output = module.products["o"](output.flatten(2))
        return module.layer_norm(output + hidden), None

    return forward
