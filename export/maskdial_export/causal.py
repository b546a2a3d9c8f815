"""Tracing causal models, and the layout of their KV cache."""

from contextlib import nullcontext
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial.models.bundle import KVLayout
from maskdial_export.attention import CausalAttention, not_rotated, rotated, swapped
from maskdial_export.graph import gather_rows, to_onnx_ir

# Rotary embeddings that depend on the text's length. Up to the length of the first training they
# equal the plain ones, so such models are limited to it.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def max_length(config: Any) -> int:
    """The longest sequence in tokens, prompt and generated text together."""
    positions = int(config.max_position_embeddings)
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        beside: int = getattr(config, "original_max_position_embeddings", positions)
        return min(positions, int(rope.get("original_max_position_embeddings", beside)))
    return positions


def kv_layout(config: Any, dtype: torch.dtype = torch.float32) -> KVLayout:
    """The KV cache that the exported graph of a ``dtype`` model reads and writes."""
    num_heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return KVLayout(
        num_layers=int(config.num_hidden_layers),
        num_heads=int(getattr(config, "num_key_value_heads", None) or num_heads),
        head_dim=int(head_dim),
        dtype="float16" if dtype == torch.float16 else "float32",
    )


def rotary_tables(model: PreTrainedModel) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines for the rotary operators, (max_length, rotary_dim / 2) each.

    None if the model has no rotary positions, or head sizes that GroupQueryAttention cannot rotate;
    the model then rotates by itself.
    """
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None:
        return None
    positions = torch.arange(max_length(model.config))[None, :]
    cos, sin = rotary(torch.zeros(1), position_ids=positions)
    half = cos.shape[-1] // 2  # the second half repeats the first
    if half % 8 or kv_layout(model.config).head_dim % 16:  # GroupQueryAttention's conditions
        return None
    cos, sin = (table[0, :, :half].to(model.dtype).contiguous() for table in (cos, sin))
    return cos, sin


class CausalGraph(nn.Module):
    """A causal model with the inputs and outputs that `maskdial.models.bundle` documents."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.attention = CausalAttention()
        tables = rotary_tables(model)
        self.has_rotary = tables is not None
        if tables is not None:
            self.register_buffer("cos", tables[0], persistent=False)
            self.register_buffer("sin", tables[1], persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        seqlens_k: Tensor,
        total_sequence_length: Tensor,
        rows: Tensor,
        past: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        tables = (self.cos, self.sin) if self.has_rotary else None
        self.attention.begin(past, seqlens_k, total_sequence_length, tables)
        with gather_rows(self.model.get_decoder(), rows):
            output = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        return output.logits.squeeze(0).float(), self.attention.present


def trace(model: PreTrainedModel) -> ir.Model:
    """Traces a causal model, float32 or float16, for any batch, length and cache size."""
    graph = CausalGraph(model)
    layout = kv_layout(model.config)
    batch, length, room = 2, 5, 11
    cache = (batch, layout.num_heads, room, layout.head_dim)
    empties = [torch.zeros(cache, dtype=model.dtype) for _ in range(layout.num_layers)]
    inputs: dict[str, Any] = {
        "input_ids": torch.ones(batch, length, dtype=torch.int64),
        "position_ids": torch.arange(length).expand(batch, length),
        "seqlens_k": torch.full((batch,), length - 1, dtype=torch.int32),
        "total_sequence_length": torch.tensor(length, dtype=torch.int32),
        "rows": torch.tensor([4, 8, 9]),
        "past": [(empty, empty.clone()) for empty in empties],
    }
    dynamic = torch.export.Dim.DYNAMIC
    past_shape = ({0: dynamic, 2: dynamic}, {0: dynamic, 2: dynamic})
    shapes: dict[str, Any] = {
        "input_ids": {0: dynamic, 1: dynamic},
        "position_ids": {0: dynamic, 1: dynamic},
        "seqlens_k": {0: dynamic},
        "total_sequence_length": {},
        "rows": {0: dynamic},
        "past": [past_shape] * layout.num_layers,
    }
    layers = range(layout.num_layers)
    pasts = [name for i in layers for name in (f"past_key.{i}", f"past_value.{i}")]
    presents = [name for i in layers for name in (f"present_key.{i}", f"present_value.{i}")]
    rotary = rotated(model, not_rotated) if graph.has_rotary else nullcontext()
    with swapped(model, graph.attention), rotary:
        input_names = [*list(inputs)[:-1], *pasts]
        return to_onnx_ir(graph, inputs, shapes, input_names, ["logits", *presents])
