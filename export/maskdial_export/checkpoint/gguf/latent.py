"""Models with latent attention: DeepSeek 2 and 3 and their kin, MiniCPM 3."""

from maskdial_export.checkpoint.gguf.common import (
    DECODER,
    RMS,
    longrope,
    num_heads,
    read_rope,
    shared,
    width,
)
from maskdial_export.checkpoint.gguf.decoders import CORRECTION, GLM_EXPERTS
from maskdial_export.checkpoint.gguf.model import Config, Model
from maskdial_export.checkpoint.gguf.settings import Settings
from maskdial_export.errors import ExportError

_SOFTMAX, _SIGMOID = 1, 2  # of how experts are chosen
_GLM_FLASH = 154_880
"""The vocabulary of GLM-4.7-Flash, whose first files do not say how experts are chosen."""
_NAMES = {
    **{key: name for key, name in DECODER.items() if key not in ("blk.{}.attn_k", "blk.{}.attn_v")},
    "blk.{}.attn_q_a": "layers.{}.self_attn.q_a_proj",
    "blk.{}.attn_q_a_norm": "layers.{}.self_attn.q_a_layernorm",
    "blk.{}.attn_q_b": "layers.{}.self_attn.q_b_proj",
    "blk.{}.attn_kv_a_mqa": "layers.{}.self_attn.kv_a_proj_with_mqa",
    "blk.{}.attn_kv_a_norm": "layers.{}.self_attn.kv_a_layernorm",
    "blk.{}.attn_kv_b": "layers.{}.self_attn.kv_b_proj",
}


def deepseek2(settings: Settings) -> Model:
    """DeepSeek 2, and 3 with its kin: R1, Kimi K2, GLM-4.7-Flash, and Youtu, without experts.

    A layer that predicts further tokens is left out. Norms of the short rows have the models' own
    epsilon, where llama.cpp takes that of the others.
    """
    further = settings.number(".nextn_predict_layers", 0)
    config = _attention(
        settings,
        settings.number(".attention.value_length"),
        num_hidden_layers=settings.number(".block_count") - further,
        rope_parameters=_rope(settings),
    )
    if not settings.number(".expert_count", 0):
        for key in (".expert_feed_forward_length", ".leading_dense_block_count"):
            settings.find(key)  # of experts that no layer has
        # transformers makes zeros of the row of this token when it loads a checkpoint
        config |= {"model_type": "youtu", "pad_token_id": None}
        return Model("YoutuForCausalLM", config, _NAMES)
    config |= {
        "moe_intermediate_size": settings.number(".expert_feed_forward_length"),
        "n_routed_experts": settings.number(".expert_count"),
        "num_experts_per_tok": settings.number(".expert_used_count"),
        "n_shared_experts": settings.number(".expert_shared_count"),
        "first_k_dense_replace": settings.number(".leading_dense_block_count", 0),
        "routed_scaling_factor": settings.real(".expert_weights_scale", 1.0),
        "norm_topk_prob": settings.flag(".expert_weights_norm", False),
        "n_group": settings.number(".expert_group_count", 1),
        "topk_group": settings.number(".expert_group_used_count", 1),
    }
    usual = _SIGMOID if config["vocab_size"] == _GLM_FLASH else _SOFTMAX
    scores = settings.number(".expert_gating_func", usual)
    names = {**_NAMES, **GLM_EXPERTS}
    if scores == _SIGMOID:
        config["model_type"] = "deepseek_v3"
        return Model("DeepseekV3ForCausalLM", config, names, parameters=CORRECTION)
    if scores != _SOFTMAX:
        raise ExportError(
            f"{settings.file.path} chooses experts in a way that DeepSeek does not, which is not "
            "supported as GGUF; export the checkpoint that it was made from"
        )
    config["model_type"] = "deepseek_v2"
    limited = config["n_group"] > 1
    config["topk_method"] = "group_limited_greedy" if limited else "greedy"
    return Model("DeepseekV2ForCausalLM", config, names)


def minicpm3(settings: Settings) -> Model:
    """MiniCPM 3, whose factors are the model's own: files do not have them."""
    rope = read_rope(settings)
    if "rope_factors_long.weight" in settings.file.tensors:
        rope |= longrope(settings)
    usual = settings.number(".embedding_length") // num_heads(settings)
    config = _attention(
        settings,
        settings.number(".attention.value_length", usual),
        model_type="minicpm3",
        rope_parameters=rope,
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=256,
    )
    return Model("MiniCPM3ForCausalLM", config, _NAMES)


def _attention(settings: Settings, value_size: int, **config: object) -> Config:
    """``value_size``: where nothing says that of the heads apart."""
    heads = num_heads(settings)
    key_size = settings.number(".attention.key_length")
    settings.find(".attention.head_count_kv")  # 1 where llama.cpp has the short rows as keys
    turning = settings.number(".rope.dimension_count")
    key_size = settings.number(".attention.key_length_mla", key_size)
    if not 0 < turning < key_size:
        raise ExportError(
            f"{turning:,} of {key_size:,} columns of the heads of {settings.file.path} turn with "
            "the position, which cannot be"
        )
    return shared(
        settings,
        num_kv_heads=heads,
        intermediate_size=width(settings),
        rms_norm_eps=settings.real(RMS),
        q_lora_rank=settings.number(".attention.q_lora_rank", 0) or None,
        kv_lora_rank=settings.number(".attention.kv_lora_rank"),
        qk_rope_head_dim=turning,
        qk_nope_head_dim=key_size - turning,
        v_head_dim=settings.number(".attention.value_length_mla", value_size),
    ) | dict(config)


def _rope(settings: Settings) -> Config:
    """YaRN as llama.cpp's converter has it: a tenth of the factor of the logarithm."""
    rope = read_rope(settings)
    if rope["rope_type"] == "yarn":
        tenth = settings.real(".rope.scaling.yarn_log_multiplier", 0.0)
        times = round(10 * tenth, 6)  # of a float32
        rope |= {"mscale": times, "mscale_all_dim": times} if times else {}
    return rope
