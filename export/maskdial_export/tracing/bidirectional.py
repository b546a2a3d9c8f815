"""Causal models under the full mask: masked next-token prediction.

Models that were also trained this way (GPT-BERT, Charpentier & Samuel 2024; LLM2Vec, BehnamGhader
et al. 2024) fill masks with the weights they generate with. Every token attends to the whole text,
and the token at a position is predicted one position before it, as in generation.
"""

from typing import Any

import onnx_ir as ir
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial_export.errors import ExportError
from maskdial_export.tracing.attention import MaskedAttention, attending
from maskdial_export.tracing.graph import gather_rows, to_onnx_ir, trunk
from maskdial_export.tracing.repeat import trace_by_layers
from maskdial_export.tracing.survey import Survey


def check(config: Any, max_length: int, tokenizer: Tokenizer) -> None:
    """Refuses models that cannot be run under the full mask.

    Raises:
        ExportError: attention needs more than a mask, or texts do not start with a special token.
    """
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise ExportError(
            f"{config.model_type} caps its attention scores, which the full-mask operator does "
            "not support; use --mask causal"
        )
    if _slides(config, max_length):
        raise ExportError(
            f"this {config.model_type} model attends through a window of {config.sliding_window} "
            "tokens; the full mask needs a model that attends to the whole text"
        )
    begun = tokenizer.encode("a").special_tokens_mask
    if not begun or not begun[0]:
        raise ExportError(
            "under the full mask each token is predicted from the one before it, so the tokenizer "
            "must begin every text with a special token; add a template to tokenizer.json"
        )


def _slides(config: Any, max_length: int) -> bool:
    """Whether some layer's window is smaller than the longest text."""
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None) or ["sliding_attention"]
    return window is not None and window < max_length and "sliding_attention" in layers


def read_both_ways(model: PreTrainedModel) -> None:
    """Hooks a causal torch model so that calling it runs it under the full mask.

    The logits at a position are then those for the token there; at the first position they are
    meaningless. ``model.forward`` is unchanged.

    Raises:
        ExportError: the model takes no mask of queries by keys.
    """

    def add_mask(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch, length = kwargs["input_ids"].shape
        given = {
            "attention_mask": torch.zeros(batch, 1, length, length, dtype=model.dtype),
            "position_ids": torch.arange(length)[None, :],
            "use_cache": False,
        }
        return args, kwargs | given

    def shift(_module: nn.Module, _args: Any, output: Any) -> Any:
        output["logits"] = output.logits.roll(1, dims=1)
        return output

    model.register_forward_pre_hook(add_mask, with_kwargs=True)
    model.register_forward_hook(shift)
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    except Exception as error:  # models raise any type
        raise ExportError(
            f"{type(model).__name__} does not take a mask of queries by keys, so it cannot be run "
            "under the full mask; use --mask causal"
        ) from error


class BidirectionalGraph(nn.Module):
    """A causal model with the inputs and output of a fill-mask graph."""

    def __init__(self, model: PreTrainedModel, survey: Survey) -> None:
        super().__init__()
        self.model = model
        self.attention = MaskedAttention(survey.layers)

    def forward(self, input_ids: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        self.attention.begin(lengths, input_ids.shape[1])
        positions = torch.arange(input_ids.shape[1])[None, :]
        with gather_rows(trunk(self.model), rows - 1):
            # not self.model(...), which `read_both_ways` hooks
            output = self.model.forward(
                input_ids=input_ids, position_ids=positions, use_cache=False
            )
        logits: Tensor = output.logits.squeeze(0).float()
        return logits


def trace(model: PreTrainedModel, survey: Survey) -> ir.Model:
    """Traces a causal model under the full mask, float32 or float16, with its head on ``rows``."""
    batch, length = 2, 5
    inputs: dict[str, Any] = {
        "input_ids": torch.ones(batch, length, dtype=torch.int64),
        "lengths": torch.tensor([length, length - 2], dtype=torch.int32),
        "rows": torch.tensor([1, 3, 7]),
    }
    dynamic = torch.export.Dim.DYNAMIC
    shapes: dict[str, Any] = {
        "input_ids": {0: dynamic, 1: dynamic},
        "lengths": {0: dynamic},
        "rows": {0: dynamic},
    }
    graph = BidirectionalGraph(model, survey)
    with attending(model, survey, graph.attention):
        return trace_by_layers(
            model,
            survey,
            graph,
            lambda _: to_onnx_ir(graph, inputs, shapes, list(inputs), ["logits"]),
        )
