"""The layer that predicts the token after the next one (multi-token prediction), as a causal model.

With h the main model's hidden state after its last norm (DeepSeek-V3, arXiv:2412.19437, section
2.2; transformers' `MtpModel`)::

    h' = norm(Layer(W [norm_e(embedding of token t + 1) ; norm_h(h of token t)]))
    logits of token t + 2 = head(h')

Embedding and head are the main model's. It counts its own tokens from 0, where transformers counts
from 1: rotary attention depends on distances alone.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from maskdial.bundle.manifest import KVLayout
from maskdial_export.errors import ExportError
from maskdial_export.session import CausalSession, Floats, Graph
from maskdial_export.tracing import causal
from maskdial_export.tracing.survey import Survey, survey

_LENGTH, _CHUNK = 23, 9
_SEED = 20240229


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


@dataclass(frozen=True, slots=True)
class Mtp:
    """A checkpoint's layer for multi-token prediction, of which the first is taken.

    Attributes:
        main: the model that it belongs to.
        reference: transformers' own form of it.
        model: the same as a causal model.
        survey: of that.
    """

    main: PreTrainedModel
    reference: MtpModel
    model: PreTrainedModel
    survey: Survey

    @classmethod
    def of(cls, main: PreTrainedModel, reference: MtpModel) -> "Mtp":
        # Functions to replace while a model is traced are looked for in its class's module.
        head = type("_Head", (_Head,), {"__module__": type(main).__module__})
        model = head(reference).eval()
        return cls(main, reference, model, survey(model))

    @property
    def hidden_size(self) -> int:
        config: Any = self.main.config
        size: int = config.hidden_size
        return size

    @property
    def kv(self) -> KVLayout:
        """The layer's own KV cache."""
        return causal.kv_layout(self.survey)

    def trace(self) -> ir.Model:
        """Traces it; `maskdial.bundle.bundle` documents inputs and outputs."""
        size = self.hidden_size
        return causal.trace(self.model, self.survey, gives_hidden=True, hidden_size=size)

    def check(self, graph: Graph, layout: KVLayout, head: Path, tolerance: float) -> None:
        """Compares the fp32 graphs with torch: the hidden states of one text, and what the layer
        makes of these, in two pieces over its cache.

        Raises:
            ExportError: they differ by more than the tolerance, which grows with the logits.
        """
        config: Any = self.main.config
        ids = np.random.default_rng(_SEED).integers(1, config.vocab_size, _LENGTH)
        with torch.no_grad():
            base = self.main.base_model(input_ids=torch.from_numpy(ids[None, :-1]))
            states = self.reference.forward_layer(
                0,
                base.last_hidden_state,
                torch.arange(1, _LENGTH)[None],
                None,
                input_ids=torch.from_numpy(ids[None, 1:]),
            )
            logits = self.model.lm_head(states)
        session = CausalSession(graph, layout, 1, _LENGTH)
        session.run(0, [ids[:-1]])
        own = CausalSession(head, self.kv, 1, _LENGTH)
        found, last = [], []
        for piece in (slice(_CHUNK), slice(_CHUNK, _LENGTH - 1)):
            found += own.run(0, [ids[1:][piece]], previous_hidden=session.hidden[piece])
            last.append(own.hidden)
        for what, expected, actual in (
            ("the hidden states", base.last_hidden_state, session.hidden),
            ("what the layer for multi-token prediction predicts", logits, np.concatenate(found)),
            ("the hidden states of that layer", states, np.concatenate(last)),
        ):
            _compare(what, expected[0].numpy(), actual, tolerance)


def _compare(what: str, expected: Floats, actual: Floats, tolerance: float) -> None:
    difference = float(np.abs(expected - actual).max())
    if not difference <= tolerance * max(1.0, float(np.abs(expected).max()) / 10):
        raise ExportError(
            f"ONNX Runtime and torch disagree on {what}: they differ by up to {difference:.2g}"
        )
