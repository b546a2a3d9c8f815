"""Tracing masked models."""

from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial.models.bundle import Embedding, Task
from maskdial_export.attention import MaskedAttention, swapped
from maskdial_export.embedding import pool
from maskdial_export.graph import gather_rows, to_onnx_ir

_OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta"})


def max_length(config: Any) -> int:
    """The longest text in tokens. RoBERTa's positions start after the padding token's id."""
    positions = int(config.max_position_embeddings)
    if config.model_type in _OFFSET_POSITIONS:
        return positions - (int(config.pad_token_id) + 1)
    return positions


TOKEN_TASKS: frozenset[Task] = frozenset({"fill-mask", "token-classify", "question-answering"})


class MaskedGraph(nn.Module):
    """A masked model with the inputs and output that `maskdial.models.bundle` documents."""

    def __init__(self, model: PreTrainedModel, embedding: Embedding | None) -> None:
        super().__init__()
        self.model = model
        self.embedding = embedding
        self.attention = MaskedAttention()
        self.takes_token_types = (getattr(model.config, "type_vocab_size", 0) or 0) > 1
        self.pad_token_id = int(model.config.pad_token_id or 0)

    def forward(
        self, input_ids: Tensor, lengths: Tensor, token_type_ids: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        self.attention.begin(lengths, input_ids.shape[1])
        valid = torch.arange(input_ids.shape[1])[None, :] < lengths[:, None]
        inputs = {
            # RoBERTa numbers positions over the tokens that are not padding
            "input_ids": torch.where(valid, input_ids, self.pad_token_id),
            "attention_mask": valid.to(torch.int64),
        }
        if self.takes_token_types:
            inputs["token_type_ids"] = token_type_ids
        if rows is not None:
            with gather_rows(self.model.base_model, rows):
                return head_logits(self.model(**inputs)).squeeze(0).float()
        if self.embedding is not None:
            return pool(self.model(**inputs)[0], lengths, self.embedding)
        return head_logits(self.model(**inputs)).float()


def head_logits(output: Any) -> Tensor:
    """A head's logits; (..., 2) for question answering, start and end."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    logits: Tensor = output.logits
    return logits


def trace(model: PreTrainedModel, task: Task, embedding: Embedding | None = None) -> ir.Model:
    """Traces a masked model, float32 or float16. Token tasks run the head on ``rows`` only."""
    graph = MaskedGraph(model, embedding)
    batch, length = 2, 5
    inputs: dict[str, Any] = {
        "input_ids": torch.ones(batch, length, dtype=torch.int64),
        "lengths": torch.tensor([length, length - 2], dtype=torch.int32),
        "token_type_ids": torch.zeros(batch, length, dtype=torch.int64),
    }
    dynamic = torch.export.Dim.DYNAMIC
    shapes: dict[str, Any] = {
        "input_ids": {0: dynamic, 1: dynamic},
        "lengths": {0: dynamic},
        "token_type_ids": {0: dynamic, 1: dynamic},
    }
    if task in TOKEN_TASKS:
        inputs["rows"] = torch.tensor([1, 3, 7])
        shapes["rows"] = {0: dynamic}
    output = "logits" if embedding is None else "embeddings"
    with swapped(model, graph.attention):
        return to_onnx_ir(graph, inputs, shapes, list(inputs), [output])
