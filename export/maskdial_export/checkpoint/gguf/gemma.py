"""Gemma 1 to 3 and EmbeddingGemma."""

from collections.abc import Mapping
from typing import Any

from maskdial_export.checkpoint.gguf.common import (
    DECODER,
    QK_NORMS,
    RMS,
    head_dim,
    num_heads,
    read_pooling,
    read_rope,
    shared,
    width,
    window_pattern,
)
from maskdial_export.checkpoint.gguf.model import Model
from maskdial_export.checkpoint.gguf.settings import Settings

GEMMA_NORMS: Mapping[str, str] = {
    "blk.{}.post_attention_norm": "layers.{}.post_attention_layernorm",
    "blk.{}.ffn_norm": "layers.{}.pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm": "layers.{}.post_feedforward_layernorm",
}
_OLLAMAS_SOFTCAPPING = 30.0
_SCALED = (34, 48, 62)
"""The layers of Gemma 3 of 4B, 12B and 27B, whose positions are divided by 8."""


def gemma(settings: Settings) -> Model:
    """Gemma 1."""
    config = shared(
        settings,
        model_type="gemma",
        intermediate_size=width(settings),
        head_dim=head_dim(settings),
        rms_norm_eps=settings.real(RMS),
        rope_parameters=read_rope(settings),
    )
    return Model("GemmaForCausalLM", config, DECODER, shifted=True)


def _query_scale(settings: Settings, layers_of_27b: int) -> int:
    """By whose root queries are divided: the width of a head, but for the 27B models."""
    if settings.number(".block_count") == layers_of_27b:
        return settings.number(".embedding_length") // num_heads(settings)
    return head_dim(settings)


def gemma2(settings: Settings) -> Model:
    """Gemma 2."""
    config = shared(
        settings,
        model_type="gemma2",
        intermediate_size=width(settings),
        head_dim=head_dim(settings),
        rms_norm_eps=settings.real(RMS),
        rope_parameters=read_rope(settings),
        query_pre_attn_scalar=_query_scale(settings, 46),
        sliding_window=settings.number(".attention.sliding_window", 4096),
        attn_logit_softcapping=settings.real(".attn_logit_softcapping", 50.0),
        final_logit_softcapping=settings.real(".final_logit_softcapping", 30.0),
    )
    return Model("Gemma2ForCausalLM", config, {**DECODER, **GEMMA_NORMS}, shifted=True)


def gemma3(settings: Settings, **config: Any) -> Model:
    """Gemma 3."""
    num_layers = min(settings.number(".block_count"), 2**16)
    window = settings.number(".attention.sliding_window", 0)
    pattern = window_pattern(settings, num_layers, 6) if window else [False] * num_layers
    local_base = settings.real(".rope.local.freq_base", 10_000.0)
    local = {
        "rope_type": "default",
        "rope_theta": settings.real(".rope.freq_base_swa", local_base),
    }
    rope = read_rope(settings, settings.real(".rope.global.freq_base", 1_000_000.0))
    softcapping = settings.real(".final_logit_softcapping", 0.0)
    if settings.find(".rope.global.freq_base") is not None:  # of Ollama's first converter
        # It wrote a default that no Gemma 3 has, and left out the scaling of the larger ones
        softcapping = 0.0 if softcapping == _OLLAMAS_SOFTCAPPING else softcapping
        if num_layers in _SCALED and rope["rope_type"] == "default":
            rope |= {"rope_type": "linear", "factor": 8.0}
    config = shared(
        settings,
        model_type="gemma3_text",
        intermediate_size=width(settings),
        head_dim=head_dim(settings),
        rms_norm_eps=settings.real(RMS),
        rope_parameters={
            "full_attention": rope,
            "sliding_attention": local,
        },
        query_pre_attn_scalar=_query_scale(settings, 62),
        sliding_window=window or 4096,
        layer_types=["sliding_attention" if each else "full_attention" for each in pattern],
        final_logit_softcapping=softcapping or None,
        **config,
    )
    names = {**DECODER, **QK_NORMS, **GEMMA_NORMS}
    return Model("Gemma3ForCausalLM", config, names, shifted=True)


def embedding_gemma(settings: Settings) -> Model:
    """EmbeddingGemma."""
    causal = gemma3(settings, use_bidirectional_attention=True)
    return Model(
        "Gemma3TextModel",
        causal.config,
        causal.names,
        prefix="",
        shifted=True,
        pooling=read_pooling(settings) or "mean_tokens",
    )
