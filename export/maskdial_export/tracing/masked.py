"""Tracing masked models: a whole text in one pass."""

import inspect
from contextlib import nullcontext
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial.bundle.manifest import TaskName
from maskdial_export.checkpoint.entity_heads import TokenHead, located
from maskdial_export.checkpoint.pooling import Pooler
from maskdial_export.errors import ExportError
from maskdial_export.tracing.attention import CausalAttention, MaskedAttention, attending
from maskdial_export.tracing.graph import gather_rows, to_onnx_ir
from maskdial_export.tracing.padding import cleared, summarized
from maskdial_export.tracing.recurrence import Recurrence, recurring
from maskdial_export.tracing.repeat import trace_by_layers
from maskdial_export.tracing.survey import Survey

TOKEN_TASKS: frozenset[TaskName] = frozenset(
    {
        "fill-mask",
        "token-classify",
        "entities",
        "extract",
        "question-answering",
        "embed-all",
        "embed-hybrid",
        "decide",
    }
)


class MaskedGraph(nn.Module):
    """A masked model with the inputs and output that `maskdial.bundle.bundle` documents."""

    def __init__(
        self, model: PreTrainedModel, survey: Survey, pooler: Pooler | None, *, typed: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.pooler = pooler
        self.attention = (CausalAttention if survey.causal else MaskedAttention)(survey.layers)
        self.recurrence = Recurrence()
        self.states = survey.states
        self.takes_token_types = typed and takes_token_types(model)
        self.pad_token_id = int(getattr(model.config, "pad_token_id", None) or 0)
        settings = None if pooler is None else pooler.embedding.multi_vector
        # Tokens that are not attended to may have vectors of their own
        self.keeps_padding = settings is not None and settings.hides_expansion

    def forward(
        self,
        input_ids: Tensor,
        lengths: Tensor,
        token_type_ids: Tensor,
        rows: Tensor | None = None,
        pairs: Tensor | None = None,
    ) -> Tensor:
        longest = input_ids.shape[1]
        if isinstance(self.attention, MaskedAttention):
            self.attention.begin(lengths, longest)
        else:
            self.attention.begin(None, lengths - 1, torch.full((), longest, dtype=torch.int32))
        valid = torch.arange(longest)[None, :] < lengths[:, None]
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": valid.to(torch.int64),
        }
        if self.states:  # zero before the first token
            zeros = [torch.zeros(input_ids.shape[0], *shape) for shape in self.states]
            self.recurrence.begin(zeros, lengths, longest)
            inputs["use_cache"] = False
        if not self.keeps_padding:
            # RoBERTa numbers positions over the tokens that are not padding
            inputs["input_ids"] = torch.where(valid, input_ids, self.pad_token_id)
        if self.takes_token_types:
            inputs["token_type_ids"] = token_type_ids
        with cleared(self.model, valid), summarized(self.model, lengths):
            return self._output(inputs, lengths, rows, pairs)

    def _output(
        self, inputs: dict[str, Any], lengths: Tensor, rows: Tensor | None, pairs: Tensor | None
    ) -> Tensor:
        if self.pooler is not None:
            hidden = self.model(**inputs)[0]
            if rows is not None:
                hidden = hidden.flatten(0, 1).index_select(0, rows)
            vectors: Tensor = self.pooler(hidden, lengths)
            return vectors
        if rows is not None:
            with gather_rows(self.model.base_model, rows), located(self.model, rows, pairs):
                return head_logits(self.model(**inputs)).squeeze(0).float()
        return head_logits(self.model(**inputs)).float()


def head_logits(output: Any) -> Tensor:
    """A head's logits; (..., 2) for question answering, start and end."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    logits: Tensor = output.logits
    return logits


def check(model: PreTrainedModel, survey: Survey, task: TaskName) -> None:
    """Refuses a classifier that cannot find the last token of a padded row.

    Raises:
        ExportError: it reads to the left only, and config.json names no padding token.
    """
    if (
        task in ("classify", "rerank")
        and survey.causal
        and getattr(model.config, "pad_token_id", None) is None
    ):
        raise ExportError(
            f"{type(model).__name__} finds the last token of a text by its padding, but "
            "config.json has no pad_token_id; add one that texts do not end with"
        )


def takes_token_types(model: PreTrainedModel) -> bool:
    """Whether the model tells the parts of a text pair apart by token types.

    XLNet has no table of them: it compares those of two tokens.
    """
    several = (getattr(model.config, "type_vocab_size", 0) or 0) > 1
    compares = model.config.model_type == "xlnet"
    return (several or compares) and "token_type_ids" in inspect.signature(model.forward).parameters


def trace(
    model: PreTrainedModel,
    survey: Survey,
    task: TaskName,
    pooler: Pooler | None = None,
    *,
    typed: bool = True,
) -> ir.Model:
    """Traces a masked model, float32 or float16. Token tasks run the head on ``rows`` only.

    Models whose layers attend by themselves are traced as they are. Unless ``typed``, the model
    gets no token types even if it takes some: its tokenizer sends none.
    """
    graph = MaskedGraph(model, survey, pooler, typed=typed)
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
    if isinstance(getattr(model, "head", None), TokenHead):
        inputs["pairs"] = torch.tensor([[1, 0], [2, 0], [0, 1], [2, 1], [1, 2]])
        shapes["pairs"] = {0: dynamic}
    output = "logits" if pooler is None else "embeddings"
    with (
        attending(model, survey, graph.attention) if survey.layers else nullcontext(),
        recurring(model, graph.recurrence) if survey.states else nullcontext(),
    ):
        return trace_by_layers(
            model,
            survey,
            graph,
            lambda _: to_onnx_ir(graph, inputs, shapes, list(inputs), [output]),
        )
