"""EAGLE-3 heads (Li et al., 2025, arXiv:2503.01840), in torch.

With h_i the target's hidden states before its layer i, and e the embedding::

    f at t = W [h_low at t ; h_middle at t ; h_high at t]
    a = Layer([norm_e(e(token at t + 1)) ; norm_f(f at t)])
    logits of the token at t + 2 = head(norm(a))

Where the target has not computed f yet, a takes its place. The layer's queries, keys and values
read both halves, and its residual path has f alone. The variants of the speculators package and of
EAGLE 3.1 normalize f before the residual path, or the hidden states before W, or write norm(a)
where others write a.

The target's graph computes f, so that the head reads as many columns as it writes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel, LlamaRMSNorm

from maskdial_export.errors import ExportError


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """A head's shape.

    Attributes:
        layer: of its layer; ``vocab_size`` is the target's.
        draft_vocab_size: the columns of its logits.
        target_size: the columns of the target's hidden states.
        places: the target's layers before which hidden states are read.
        norm_before_residual: whether the residual path begins after the norm.
        norm_before_fc: whether the hidden states are normalized together before they are projected.
        fc_norm: whether each of them is.
        norm_output: whether the head goes on from its own hidden states after the last norm.
        fc_bias: whether the projection has one.
    """

    layer: LlamaConfig
    draft_vocab_size: int
    target_size: int
    places: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False


class _Layer(LlamaDecoderLayer):  # type: ignore[misc]
    """Reads (batch, length, 2 * hidden_size), embeddings and features; returns hidden states."""

    def __init__(self, config: EagleConfig) -> None:
        layer = config.layer
        super().__init__(layer, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow: nn.Linear = getattr(self.self_attn, name)
            has_bias = narrow.bias is not None
            wide = nn.Linear(2 * layer.hidden_size, narrow.out_features, bias=has_bias)
            setattr(self.self_attn, name, wide)
        self.hidden_norm = LlamaRMSNorm(layer.hidden_size, layer.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(self, hidden_states: Tensor, **settings: Any) -> Tensor:
        embeds, features = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(features)
        both = torch.cat([self.input_layernorm(embeds), normed], -1)
        attended, _ = self.self_attn(hidden_states=both, **settings)
        states = (normed if self.norm_before_residual else features) + attended
        made: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return made


class Features(nn.Module):
    """What the head reads, (..., hidden_size), of the target's hidden states side by side."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        size, count, layer = config.target_size, len(config.places), config.layer
        self.size = size
        self.input_norm = (
            LlamaRMSNorm(count * size, layer.rms_norm_eps) if config.norm_before_fc else None
        )
        norms = [LlamaRMSNorm(size, layer.rms_norm_eps) for _ in range(count)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = nn.Linear(count * size, layer.hidden_size, bias=config.fc_bias)

    def forward(self, states: Tensor) -> Tensor:
        if self.fc_norm is not None:
            parts = torch.split(states, self.size, -1)
            states = torch.cat([norm(p) for norm, p in zip(self.fc_norm, parts, strict=True)], -1)
        if self.input_norm is not None:
            states = self.input_norm(states)
        made: Tensor = self.fc(states)
        return made


class _Trunk(nn.Module):
    """The layer between embeddings and last norm; the target has no modules of these names."""

    def __init__(self, config: EagleConfig, table: nn.Embedding) -> None:
        super().__init__()
        layer, vocab_size = config.layer, config.layer.vocab_size
        self.embed_tokens = table
        layer.vocab_size = 1  # its own table would be as large as the target's
        self.eagle = LlamaModel(layer)
        layer.vocab_size = vocab_size
        del self.eagle.embed_tokens
        self.eagle.layers[0] = _Layer(config)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        previous_hidden: Tensor | None = None,
    ) -> BaseModelOutput:
        embeds = self.embed_tokens(input_ids)
        features = embeds if previous_hidden is None else previous_hidden
        states = self.eagle(
            inputs_embeds=torch.cat([embeds, features], -1),
            position_ids=position_ids,
            use_cache=False,
        )
        return BaseModelOutput(last_hidden_state=states.last_hidden_state)


class EagleHead(PreTrainedModel):  # type: ignore[misc]
    """A head, without the projection, as a causal model.

    Args:
        config: its shape.
        table: the embeddings that it reads, (vocab_size, hidden_size).
    """

    base_model_prefix = "model"

    def __init__(self, config: EagleConfig, table: nn.Embedding) -> None:
        super().__init__(config.layer)
        self.model = _Trunk(config, table)
        self.eagle_head = nn.Linear(config.layer.hidden_size, config.draft_vocab_size, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_decoder(self) -> nn.Module:
        return self.model

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        previous_hidden: Tensor | None = None,
    ) -> CausalLMOutput:
        states = self.model(input_ids, position_ids, previous_hidden).last_hidden_state
        return CausalLMOutput(logits=self.eagle_head(states))


# Functions to replace while a model is traced are looked for in its class's module.
EagleHead.__module__ = LlamaModel.__module__


@dataclass(frozen=True, slots=True)
class Eagle:
    """A loaded head.

    Attributes:
        config: its shape.
        head: the head.
        features: what makes of the target's hidden states what it reads.
        token_ids: int64 (draft_vocab_size,), the target's tokens that its logits stand for; None
            for all.
        source: the name of its checkpoint.
    """

    config: EagleConfig
    head: EagleHead
    features: Features
    token_ids: NDArray[np.int64] | None
    source: str


def layers_of(main: PreTrainedModel) -> nn.ModuleList:
    """The layers of a target.

    Raises:
        ExportError: it is not known which they are.
    """
    config: Any = main.config
    for module in main.base_model.modules():  # experts of a layer come after the layers
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers:
            return module
    raise ExportError(
        f"{type(main).__name__} has no list of layers, whose hidden states an EAGLE-3 head could "
        "read"
    )
