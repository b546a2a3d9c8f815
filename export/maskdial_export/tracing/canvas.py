"""Tracing block diffusion: a prompt and the canvas behind it, in one pass.

DiffusionGemma has an encoder that reads the prompt under the causal mask, and a decoder that reads
a canvas of tokens, which see each other and what the encoder has kept of the prompt. Both have the
same weights but for each layer's scale. No token of the prompt sees the canvas, so one graph
computes both parts: mask and scale are chosen token by token. Beside its tokens, a canvas has what
the pass before made of it, a mean of embeddings for each token (self-conditioning).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from maskdial_export.checkpoint.block_diffusion import CanvasModel
from maskdial_export.tracing.attention import MASKED_SCORE, join_heads
from maskdial_export.tracing.graph import to_onnx_ir
from maskdial_export.tracing.repeat import trace_by_layers
from maskdial_export.tracing.survey import Survey
from maskdial_export.tracing.swap import swapped


class CanvasAttention:
    """``com.microsoft::MultiHeadAttention`` over right-padded rows that end in a canvas.

    Each token of a prompt sees those before it; each token of a canvas sees all tokens. Where a
    layer has a window, the first token that the canvas sees is the one that its own first token
    sees.
    """

    _lengths: Tensor
    _starts: Tensor
    _longest: int

    def __init__(self) -> None:
        self._biases: dict[int | None, Tensor] = {}

    def begin(self, lengths: Tensor, starts: Tensor, longest: int) -> None:
        """Starts a forward pass.

        Args:
            lengths: tokens of each row, int32 (batch,).
            starts: where each row's canvas begins, int32 (batch,).
            longest: tokens of a row, padding included.
        """
        self._lengths, self._starts, self._longest = lengths, starts, longest
        self._biases.clear()

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """query, key, value: (batch, num_heads, length, head_dim)."""
        batch, num_heads, length, head_dim = query.shape
        shared = num_heads // key.shape[1]  # query heads per key head
        output = torch.onnx.ops.symbolic(
            "com.microsoft::MultiHeadAttention",
            [
                join_heads(query),
                join_heads(key, shared),
                join_heads(value, shared),
                None,
                self._lengths,
                self._bias(sliding_window),
            ],
            {"num_heads": num_heads, "scale": float(scaling)},
            dtype=query.dtype,
            shape=(batch, length, num_heads * head_dim),
            version=1,
        )
        return output.view(batch, length, num_heads, head_dim), None

    def _bias(self, window: int | None) -> Tensor:
        """What masks scores, (batch, 1, length, length); layers of one window share it."""
        if window not in self._biases:
            position = torch.arange(self._longest)
            starts = self._starts[:, None, None]
            query, key = position[None, :, None], position[None, None, :]
            hidden = (key > query) & (query < starts)
            if window is not None:
                hidden = hidden | (key <= torch.minimum(query, starts) - window)
            self._biases[window] = hidden[:, None].float() * MASKED_SCORE
        return self._biases[window]


class CanvasGraph(nn.Module):
    """Both parts with the inputs and output that `maskdial.bundle.bundle` documents."""

    def __init__(self, model: CanvasModel) -> None:
        super().__init__()
        self.model = model
        self.attention = CanvasAttention()

    def forward(
        self,
        input_ids: Tensor,
        lengths: Tensor,
        canvas: Tensor,
        rows: Tensor,
        soft: Tensor,
        temperatures: Tensor,
    ) -> Tensor:
        model, longest = self.model, input_ids.shape[1]
        starts = lengths - canvas
        self.attention.begin(lengths, starts, longest)
        position = torch.arange(longest)
        in_canvas = (position[None, :] >= starts[:, None])[..., None]
        embedded = model.embed_tokens(input_ids)
        batch, _, width = embedded.shape
        tokens = embedded.flatten(0, 1)
        conditioned = model.self_conditioning(tokens.index_select(0, rows), soft)
        states = tokens.index_put((rows,), conditioned).view(batch, longest, width)
        turns = {
            kind: model.rotary_emb(states, position[None, :], kind)
            for kind in sorted(set(model.config.layer_types))
        }
        with _scaled(model, in_canvas):
            for layer, kind in zip(model.layers, model.config.layer_types, strict=False):
                states = layer(states, position_embeddings=turns[kind])
        logits = model.logits(states.flatten(0, 1).index_select(0, rows))
        shares = (logits / temperatures[:, None]).softmax(-1)
        return torch.cat([logits, model.mean_embedding(shares)], dim=-1)


@contextmanager
def _scaled(model: CanvasModel, in_canvas: Tensor) -> Iterator[None]:
    """Lets each layer scale a token by the scale of the part that reads it, inside the block."""

    def scale(module: Any, _args: Any, output: Tensor) -> Tensor:
        return output * torch.where(in_canvas, module.canvas_scalar, module.prompt_scalar)

    with ExitStack() as hooks:
        for layer in model.layers:
            hook = layer.register_forward_hook(scale)
            hooks.callback(hook.remove)
        yield


def trace(model: CanvasModel, survey: Survey) -> ir.Model:
    """Traces a model, float32, for any batch, length and size of canvases."""
    graph = CanvasGraph(model)
    batch, length, width = 2, 5, model.config.hidden_size
    rows = torch.tensor([3, 4, 7])
    inputs: dict[str, Any] = {
        "input_ids": torch.ones(batch, length, dtype=torch.int64),
        "lengths": torch.tensor([length, length - 2], dtype=torch.int32),
        "canvas": torch.tensor([2, 1], dtype=torch.int32),
        "rows": rows,
        "soft": torch.zeros(len(rows), width),
        "temperatures": torch.ones(len(rows)),
    }
    dynamic = torch.export.Dim.DYNAMIC
    shapes: dict[str, Any] = {
        "input_ids": {0: dynamic, 1: dynamic},
        "lengths": {0: dynamic},
        "canvas": {0: dynamic},
        "rows": {0: dynamic},
        "soft": {0: dynamic},
        "temperatures": {0: dynamic},
    }
    with swapped(model, graph.attention), model.unscaled():
        return trace_by_layers(
            model,
            survey,
            graph,
            lambda _: to_onnx_ir(graph, inputs, shapes, list(inputs), ["logits"]),
        )
