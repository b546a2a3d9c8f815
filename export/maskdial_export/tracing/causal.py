"""Tracing causal models, and the layout of their KV cache."""

import inspect
import re
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial.bundle.manifest import KVLayout
from maskdial_export.errors import ExportError
from maskdial_export.tracing.attention import CausalAttention, attending
from maskdial_export.tracing.graph import gather_rows, to_onnx_ir, trunk
from maskdial_export.tracing.repeat import trace_by_layers
from maskdial_export.tracing.survey import Survey

# Layers of transformers that carry a state from token to token; most others have a convolution
_RECURRENT = re.compile(
    r"Mamba|SSM|Rwkv|xLSTM|Lightning|Recurrent|DeltaNet|DeltaAttention|ShortConv"
)

# Encoders that attend by code of their own, for which the graph's mask means something else: texts
# of other lengths in a batch change the answer
_UNMASKED = re.compile(r"BigBirdPegasus(Self|BlockSparse)Attention")


def check(model: PreTrainedModel) -> None:
    """Refuses models with layers that keep more than keys and values of the tokens before, or with
    encoders that attend by code of their own.

    Raises:
        ExportError: there is such a layer; the message names its class.
    """
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            continue
        if _UNMASKED.fullmatch(type(module).__name__):
            raise ExportError(
                f"{type(model).__name__} is not supported: its encoder does not attend through "
                f"transformers' attention interface ({name} is a {type(module).__name__}), so "
                "texts of different lengths cannot share a batch"
            )
        convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
        if convolves or _RECURRENT.search(type(module).__name__):
            raise ExportError(
                f"{type(model).__name__} keeps a state from token to token ({name} is a "
                f"{type(module).__name__}), so its layers cannot be given a KV cache"
            )


def kv_layout(survey: Survey, dtype: torch.dtype = torch.float32) -> KVLayout:
    """The KV cache that the exported graph of a ``dtype`` model reads and writes.

    Raises:
        ExportError: the model has no such cache, or its layers have caches of different shapes.
    """
    if not survey.causal:
        raise ExportError("each token of this model attends to later ones, so it cannot generate")
    shapes = {(layer.num_kv_heads, layer.head_dim) for layer in survey.layers}
    if not shapes:
        raise ExportError(
            "the layers of this model do not attend through transformers' attention interface, so "
            "they cannot be given a KV cache"
        )
    num_heads, head_dim = shapes.pop()
    if shapes:
        raise ExportError(
            "the layers of this model have keys of different shapes, but the KV cache has one "
            "shape for all"
        )
    if any(layer.value_dim > head_dim for layer in survey.layers):
        raise ExportError("the values of this model are larger than its keys, which have no cache")
    return KVLayout(
        num_layers=len(survey.layers),
        num_heads=num_heads,
        head_dim=head_dim,
        dtype="float16" if dtype == torch.float16 else "float32",
    )


class CausalGraph(nn.Module):
    """A causal model with the inputs and outputs that `maskdial.bundle.bundle` documents."""

    def __init__(self, model: PreTrainedModel, survey: Survey) -> None:
        super().__init__()
        self.model = model
        self.attention = CausalAttention(survey.layers)
        self.numbers_positions = "position_ids" in inspect.signature(model.forward).parameters

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        seqlens_k: Tensor,
        total_sequence_length: Tensor,
        rows: Tensor,
        past: list[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        self.attention.begin(past, seqlens_k, total_sequence_length)
        positions = {"position_ids": position_ids} if self.numbers_positions else {}
        with gather_rows(trunk(self.model), rows):
            output = self.model(input_ids=input_ids, **positions)
        return output.logits.squeeze(0).float(), self.attention.present


def trace(model: PreTrainedModel, survey: Survey) -> ir.Model:
    """Traces a causal model, float32 or float16, for any batch, length and cache size."""
    graph = CausalGraph(model, survey)
    layout = kv_layout(survey)
    with attending(model, survey, graph.attention):
        return trace_by_layers(
            model, survey, graph, lambda num_layers: _trace(graph, layout, num_layers)
        )


def _trace(graph: CausalGraph, layout: KVLayout, num_layers: int) -> ir.Model:
    batch, length, room = 2, 5, 11
    cache = (batch, layout.num_heads, room, layout.head_dim)
    empties = [torch.zeros(cache, dtype=graph.model.dtype) for _ in range(num_layers)]
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
        "past": [past_shape] * num_layers,
    }
    layers = range(num_layers)
    pasts = [name for i in layers for name in (f"past_key.{i}", f"past_value.{i}")]
    presents = [name for i in layers for name in (f"present_key.{i}", f"present_value.{i}")]
    input_names = [*list(inputs)[:-1], *pasts]
    return to_onnx_ir(graph, inputs, shapes, input_names, ["logits", *presents])
