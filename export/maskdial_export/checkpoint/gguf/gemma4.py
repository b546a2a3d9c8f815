"""Gemma 4: heads of two sizes, shared keys and values, inputs of layers, and experts."""

from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from maskdial_export.checkpoint.gguf.common import (
    DECODER,
    QK_NORMS,
    RMS,
    head_dim,
    num_heads,
    read_factors,
    shared,
)
from maskdial_export.checkpoint.gguf.gemma import GEMMA_NORMS
from maskdial_export.checkpoint.gguf.model import Config, Model
from maskdial_export.checkpoint.gguf.settings import Settings
from maskdial_export.errors import ExportError

_STILL = 1e29
"""What frequencies are divided by, or more, of columns that do not turn."""
LAYER_INPUTS: Mapping[str, str] = {
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
    "blk.{}.inp_gate": "layers.{}.per_layer_input_gate",
    "blk.{}.proj": "layers.{}.per_layer_projection",
    "blk.{}.post_norm": "layers.{}.post_per_layer_input_norm",
}
_EXPERTS: Mapping[str, str] = {
    "blk.{}.ffn_gate_inp": "layers.{}.router.proj",
    "blk.{}.ffn_gate_exps": "layers.{}.experts.*.gate_proj",
    "blk.{}.ffn_up_exps": "layers.{}.experts.*.up_proj",
    "blk.{}.ffn_down_exps": "layers.{}.experts.*.down_proj",
    "blk.{}.pre_ffw_norm_2": "layers.{}.pre_feedforward_layernorm_2",
    "blk.{}.post_ffw_norm_1": "layers.{}.post_feedforward_layernorm_1",
    "blk.{}.post_ffw_norm_2": "layers.{}.post_feedforward_layernorm_2",
}
_PARAMETERS: Mapping[str, str] = {
    "blk.{}.layer_output_scale.weight": "layers.{}.layer_scalar",
    "blk.{}.ffn_gate_inp.scale": "layers.{}.router.scale",
    "blk.{}.ffn_down_exps.scale": "layers.{}.router.per_expert_scale",
}


def gemma4(settings: Settings) -> Model:
    """Gemma 4, of E2B and E4B with inputs of layers, of 26B with experts."""
    count = min(settings.number(".block_count"), 2**16)
    slides = [bool(each) for each in by_layer(settings, ".attention.sliding_window_pattern", count)]
    num_shared = settings.number(".attention.shared_kv_layers", 0)
    kv_heads = by_layer(settings, ".attention.head_count_kv", count, num_heads(settings))
    widths = by_layer(settings, ".feed_forward_length", count)
    width, tensors = min(widths), settings.file.tensors
    wide = [each > width for each in widths]
    doubled = [index >= count - num_shared for index in range(count)]
    if any(wide) and (wide != doubled or max(widths) != 2 * width):
        _refuse(settings, ".feed_forward_length")
    whole, near = head_dim(settings), settings.number(".attention.key_length_swa")
    for key, size in ((".attention.value_length", whole), (".attention.value_length_swa", near)):
        if settings.number(key, size) != size:
            _refuse(settings, key)
    if settings.number(".rope.dimension_count_swa", near) != near:
        _refuse(settings, ".rope.dimension_count_swa")
    few = [heads for heads, each in zip(kv_heads, slides, strict=True) if each]
    inputs = settings.number(".embedding_length_per_layer_input", 0)
    values = [f"blk.{index}.attn_v.weight" in tensors for index in range(count - num_shared)]
    same = [not each for each, near_one in zip(values, slides, strict=False) if not near_one]
    config = shared(
        settings,
        num_kv_heads=few[0] if few else kv_heads[0],
        model_type="gemma4_text",
        intermediate_size=width,
        use_double_wide_mlp=any(wide),
        head_dim=near,
        per_layer_config={
            str(index): {"head_dim": whole, "num_key_value_heads": kv_heads[index]}
            for index in range(count)
            if not slides[index]
        },
        rms_norm_eps=settings.real(RMS),
        rope_parameters={
            "full_attention": _rope(settings, whole),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": settings.real(".rope.freq_base_swa", 10_000.0),
            },
        },
        sliding_window=settings.number(".attention.sliding_window"),
        layer_types=["sliding_attention" if each else "full_attention" for each in slides],
        final_logit_softcapping=settings.real(".final_logit_softcapping", 0.0) or None,
        num_kv_shared_layers=num_shared,
        attention_k_eq_v=any(same),
        hidden_size_per_layer_input=inputs,
    )
    names = {**DECODER, **QK_NORMS, **GEMMA_NORMS}
    if inputs:
        table = tensors.get("per_layer_token_embd.weight")
        if table is None:
            raise ExportError(f"{settings.file.path} has no tensor per_layer_token_embd.weight")
        config["vocab_size_per_layer_input"] = table.shape[0]
        names |= LAYER_INPUTS
    experts = settings.number(".expert_count", 0)
    if experts:
        config |= _experts(settings, experts)
        names |= _EXPERTS
    return Model("Gemma4ForCausalLM", config, names, parameters=_PARAMETERS, traceable=not experts)


def _experts(settings: Settings, count: int) -> Config:
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": settings.number(".expert_used_count"),
        "moe_intermediate_size": settings.number(".expert_feed_forward_length"),
    }


def by_layer(settings: Settings, key: str, count: int, default: int | None = None) -> list[int]:
    """A number of each layer, where the file has one for all or a list."""
    value = settings.find(key)
    if not isinstance(value, np.ndarray):
        return [settings.number(key, default)] * count
    if len(value) != count or not all(0 <= each < 2**31 for each in value.tolist()):
        _refuse(settings, key)
    return [int(each) for each in value.tolist()]


def _rope(settings: Settings, size: int) -> Config:
    """The first columns turn; the file has what their frequencies are divided by."""
    rope: Config = {
        "rope_type": "proportional",
        "rope_theta": settings.real(".rope.freq_base", 1_000_000.0),
        "partial_rotary_factor": 1.0,
    }
    if "rope_freqs.weight" not in settings.file.tensors:
        return rope
    factors = np.array(read_factors(settings, "rope_freqs.weight"))
    turning = int((factors == 1).sum())
    still = factors[turning:]
    if len(factors) != size // 2 or not (factors[:turning] == 1).all() or (still < _STILL).any():
        raise ExportError(
            f"rope_freqs.weight of {settings.file.path} divides frequencies in a way that is not "
            "that of Gemma 4, which is not supported"
        )
    return rope | {"partial_rotary_factor": turning / len(factors)}


def _refuse(settings: Settings, key: str) -> NoReturn:
    raise ExportError(
        f"{settings.architecture}{key} of {settings.file.path} is none of a Gemma 4; export the "
        "checkpoint that it was made from"
    )
