"""The layer that predicts the token after the next one (multi-token prediction), as a causal model.

With h the main model's hidden state after its last norm (DeepSeek-V3, arXiv:2412.19437, section
2.2; transformers' `MtpModel`)::

    h' = norm(Layer(W [norm_e(embedding of token t + 1) ; norm_h(h of token t)]))
    logits of token t + 2 = head(h')

Embedding and head are the main model's. It counts its own tokens from 0, where transformers counts
from 1: rotary attention depends on distances alone.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from maskdial_export.tracing.draft_head import DraftHead
from maskdial_export.tracing.hidden import HiddenStates
from maskdial_export.tracing.survey import survey


class _Trunk(nn.Module):
    """The layer and what stands before it, by the main model's names where both have it."""

    def __init__(self, mtp: Any) -> None:
        super().__init__()
        self.embed_tokens = mtp.embed_tokens
        self.rotary_emb = mtp.rotary_emb
        self.mtp = mtp.layers[0]
        types = getattr(mtp.config, "layer_types", None) if mtp.has_per_layer_rope else None
        self.kind = {} if types is None else {"layer_type": types[0]}
        self.masks = mtp.create_masks_for_mtp_layer

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        previous_hidden: Tensor | None = None,
    ) -> BaseModelOutput:
        embeds = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        states = self.mtp(
            embeds,
            embeds if previous_hidden is None else previous_hidden,
            position_embeddings=self.rotary_emb(embeds, position_ids=position_ids, **self.kind),
            position_ids=position_ids,
            past_key_values=None,
            **self.masks(0, embeds, None, position_ids),
        )
        return BaseModelOutput(last_hidden_state=states)


class _Head(PreTrainedModel):  # type: ignore[misc]
    """It with the head, as a model that `survey` and `causal.trace` take."""

    base_model_prefix = "model"

    def __init__(self, mtp: Any) -> None:
        super().__init__(mtp.config)
        self.model = _Trunk(mtp)
        self.lm_head = mtp.shared_head

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens  # type: ignore[no-any-return]

    def get_decoder(self) -> nn.Module:
        return self.model

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        previous_hidden: Tensor | None = None,
    ) -> CausalLMOutput:
        states = self.model(input_ids, position_ids, previous_hidden).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(states))


def mtp_head(main: PreTrainedModel, mtp: MtpModel) -> DraftHead:
    """A checkpoint's layer for multi-token prediction, of which the first is taken.

    Args:
        main: the model that it belongs to.
        mtp: transformers' own form of it.
    """
    # Functions to replace while a model is traced are looked for in its class's module.
    head = type("_Head", (_Head,), {"__module__": type(main).__module__})
    model = head(mtp).eval()

    def reference(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        read = main.base_model(input_ids=ids[:, :-1]).last_hidden_state
        numbers = torch.arange(1, ids.shape[1])[None]
        states = mtp.forward_layer(0, read, numbers, None, input_ids=ids[:, 1:])
        return read[0], model.lm_head(states)[0], states[0]

    config: Any = main.config
    return DraftHead(
        "mtp",
        model,
        survey(model),
        HiddenStates(),
        HiddenStates(),
        config.hidden_size,
        reference,
    )
