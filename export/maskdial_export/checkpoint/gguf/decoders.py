"""Models that generate: Llama, Qwen, Phi, StarCoder 2, GPT-2, Cohere and others."""

from collections.abc import Mapping
from typing import Any

from maskdial_export.checkpoint.gguf.common import (
    DECODER,
    NORM,
    QK_NORMS,
    RMS,
    embedding,
    head_dim,
    longrope,
    num_heads,
    ranks_by_rows,
    read_rope,
    shared,
    width,
    window_pattern,
)
from maskdial_export.checkpoint.gguf.model import Config, Model
from maskdial_export.checkpoint.gguf.settings import Settings
from maskdial_export.errors import ExportError

_NORMS_AFTER: Mapping[str, str] = {
    "blk.{}.post_attention_norm": "layers.{}.post_attention_layernorm",
    "blk.{}.post_ffw_norm": "layers.{}.post_feedforward_layernorm",
}
_SIGMOID = 2  # of how experts are chosen
QWEN_EXPERTS: Mapping[str, str] = {
    "blk.{}.ffn_gate_inp": "layers.{}.mlp.gate",
    "blk.{}.ffn_gate_exps": "layers.{}.mlp.experts.*.gate_proj",
    "blk.{}.ffn_up_exps": "layers.{}.mlp.experts.*.up_proj",
    "blk.{}.ffn_down_exps": "layers.{}.mlp.experts.*.down_proj",
    "blk.{}.ffn_gate_inp_shexp": "layers.{}.mlp.shared_expert_gate",
    "blk.{}.ffn_gate_shexp": "layers.{}.mlp.shared_expert.gate_proj",
    "blk.{}.ffn_up_shexp": "layers.{}.mlp.shared_expert.up_proj",
    "blk.{}.ffn_down_shexp": "layers.{}.mlp.shared_expert.down_proj",
}

GLM_EXPERTS: Mapping[str, str] = {
    **QWEN_EXPERTS,
    **{
        f"blk.{{}}.ffn_{part}_shexp": f"layers.{{}}.mlp.shared_experts.{part}_proj"
        for part in ("gate", "up", "down")
    },
}
CORRECTION = {"blk.{}.exp_probs_b.bias": "layers.{}.mlp.gate.e_score_correction_bias"}


def llama(settings: Settings) -> Model:
    """Llama, Mistral and Mixtral."""
    size = settings.number(".rope.dimension_count", head_dim(settings))
    config = shared(
        settings,
        intermediate_size=width(settings),
        head_dim=size,
        rms_norm_eps=settings.real(RMS),
        rope_parameters=read_rope(settings),
    )
    experts = settings.number(".expert_count", 0)
    if experts:
        config |= {
            "model_type": "mixtral",
            "num_local_experts": experts,
            "num_experts_per_tok": settings.number(".expert_used_count"),
            "sliding_window": None,
        }
        names = {
            "blk.{}.ffn_gate_inp": "layers.{}.block_sparse_moe.gate",
            "blk.{}.ffn_gate_exps": "layers.{}.block_sparse_moe.experts.*.w1",
            "blk.{}.ffn_down_exps": "layers.{}.block_sparse_moe.experts.*.w2",
            "blk.{}.ffn_up_exps": "layers.{}.block_sparse_moe.experts.*.w3",
        }
        return Model("MixtralForCausalLM", config, {**DECODER, **names}, permuted=True)
    tensors = settings.file.tensors
    config |= {
        "model_type": "llama",
        "attention_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    architecture, prefix, pooling = embedding(settings, "Llama", config)
    return Model(
        architecture,
        config,
        DECODER,
        prefix,
        permuted=True,
        pooling=pooling,
    )


def mistral3(settings: Settings) -> Model:
    """The text part of Mistral 3: Ministral 3, and Mistral Small 3, which scales no queries."""
    size, rope = head_dim(settings), read_rope(settings, 1_000_000.0)
    config = shared(
        settings,
        model_type="mistral",
        intermediate_size=width(settings),
        head_dim=settings.number(".rope.dimension_count", size),
        rms_norm_eps=settings.real(RMS),
        rope_parameters=rope,
        sliding_window=None,
    )
    beta = settings.real(".attention.temperature_scale", 0.0)
    if not beta:
        return Model("MistralForCausalLM", config, DECODER, permuted=True)
    config["model_type"] = "ministral3"
    multiplier = settings.real(".rope.scaling.yarn_log_multiplier", 0.0)
    rope |= {"llama_4_scaling_beta": beta, "mscale": multiplier, "mscale_all_dim": multiplier}
    return Model("Ministral3ForCausalLM", config, DECODER, permuted=True)


def qwen2(settings: Settings) -> Model:
    """Qwen 2."""
    config = shared(
        settings,
        model_type="qwen2",
        intermediate_size=width(settings),
        rms_norm_eps=settings.real(RMS),
        rope_parameters=read_rope(settings),
    )
    architecture, prefix, pooling = embedding(settings, "Qwen2", config)
    return Model(architecture, config, DECODER, prefix, pooling=pooling)


def qwen3(settings: Settings) -> Model:
    """Qwen 3."""
    config = shared(
        settings,
        model_type="qwen3",
        intermediate_size=width(settings),
        head_dim=head_dim(settings),
        rms_norm_eps=settings.real(RMS),
        rope_parameters=read_rope(settings),
    )
    names, ranks = {**DECODER, **QK_NORMS}, ranks_by_rows(settings)
    if ranks is not None:
        names = {key: f"model.{name}" for key, name in names.items() if key != "output"}
        names["cls.output"] = "score"
        head = "Qwen3ForSequenceClassification"
        return Model(head, config | ranks, names, prefix="", traceable=False)
    architecture, prefix, pooling = embedding(settings, "Qwen3", config)
    return Model(architecture, config, names, prefix, pooling=pooling)


def qwen3_vl(settings: Settings) -> Model:
    """The text part of Qwen3-VL: on text, Qwen 3, as the three positions of a token are one."""
    _read_vision(settings)
    return qwen3(settings)


def qwen3_vl_moe(settings: Settings) -> Model:
    """The text part of Qwen3-VL with experts."""
    _read_vision(settings)
    return qwen3_moe(settings)


def _read_vision(settings: Settings) -> None:
    settings.numbers(".rope.dimension_sections", 4)
    settings.find(".n_deepstack_layers")  # of layers that images are added to, too


def _qwen_experts(settings: Settings, kind: str, **config: Any) -> Config:
    dense = [
        layer
        for layer in range(min(settings.number(".block_count"), 2**16))
        if f"blk.{layer}.ffn_gate.weight" in settings.file.tensors
    ]
    return shared(
        settings,
        model_type=kind,
        intermediate_size=width(settings),
        rms_norm_eps=settings.real(RMS),
        rope_parameters=read_rope(settings),
        num_experts=settings.number(".expert_count"),
        num_experts_per_tok=settings.number(".expert_used_count"),
        mlp_only_layers=dense,
        decoder_sparse_step=1,
        **config,
    )


def qwen2_moe(settings: Settings) -> Model:
    """Qwen 2 with experts."""
    common = settings.number(".expert_shared_feed_forward_length", width(settings))
    config = _qwen_experts(
        settings,
        "qwen2_moe",
        moe_intermediate_size=settings.number(".expert_feed_forward_length", 0)
        or width(settings) // max(settings.number(".expert_used_count"), 1),
        shared_expert_intermediate_size=common,
        norm_topk_prob=False,
    )
    return Model("Qwen2MoeForCausalLM", config, {**DECODER, **QWEN_EXPERTS})


def qwen3_moe(settings: Settings) -> Model:
    """Qwen 3 with experts."""
    config = _qwen_experts(
        settings,
        "qwen3_moe",
        moe_intermediate_size=settings.number(".expert_feed_forward_length"),
        head_dim=head_dim(settings),
        norm_topk_prob=True,
    )
    names = {**DECODER, **QK_NORMS, **QWEN_EXPERTS}
    return Model("Qwen3MoeForCausalLM", config, names)


def olmoe(settings: Settings) -> Model:
    """OLMoE."""
    config = shared(
        settings,
        model_type="olmoe",
        intermediate_size=settings.number(".expert_feed_forward_length", width(settings)),
        rms_norm_eps=settings.real(RMS),
        rope_parameters=read_rope(settings),
        num_experts=settings.number(".expert_count"),
        num_experts_per_tok=settings.number(".expert_used_count"),
        norm_topk_prob=False,
    )
    return Model("OlmoeForCausalLM", config, {**DECODER, **QK_NORMS, **QWEN_EXPERTS})


def phi3(settings: Settings) -> Model:
    """Phi-3, Phi-3.5 and Phi-4."""
    size = settings.number(".embedding_length") // num_heads(settings)
    rope = read_rope(settings)
    if "rope_factors_long.weight" in settings.file.tensors:
        rope |= longrope(settings)
        del rope["factor"]  # of positions, which Phi-3 computes itself
    partial = settings.number(".rope.dimension_count", size) / max(size, 1)
    positions = settings.number(".context_length")
    config = shared(
        settings,
        model_type="phi3",
        intermediate_size=width(settings),
        rms_norm_eps=settings.real(RMS),
        rope_parameters=rope | {"partial_rotary_factor": partial},
        original_max_position_embeddings=settings.number(
            ".rope.scaling.original_context_length", positions
        ),
        sliding_window=settings.number(".attention.sliding_window", 0) or None,
    )
    names = {
        **DECODER,
        "blk.{}.attn_qkv": "layers.{}.self_attn.qkv_proj",
        "blk.{}.ffn_up": "layers.{}.mlp.gate_up_proj",
    }
    return Model("Phi3ForCausalLM", config, names)


def starcoder2(settings: Settings) -> Model:
    """StarCoder 2."""
    config = shared(
        settings,
        model_type="starcoder2",
        intermediate_size=width(settings),
        norm_epsilon=settings.real(NORM),
        rope_parameters=read_rope(settings),
        sliding_window=None,
        use_bias="blk.0.attn_q.bias" in settings.file.tensors
        or "blk.0.attn_qkv.bias" in settings.file.tensors,
    )
    names = {
        **DECODER,
        "blk.{}.ffn_up": "layers.{}.mlp.c_fc",
        "blk.{}.ffn_down": "layers.{}.mlp.c_proj",
    }
    return Model("Starcoder2ForCausalLM", config, names)


def phi2(settings: Settings) -> Model:
    """Phi-1, Phi-1.5 and Phi-2."""
    size = settings.number(".embedding_length") // num_heads(settings)
    rope = read_rope(settings)
    rope["partial_rotary_factor"] = settings.number(".rope.dimension_count", size) / max(size, 1)
    config = shared(
        settings,
        model_type="phi",
        intermediate_size=width(settings),
        layer_norm_eps=settings.real(NORM),
        rope_parameters=rope,
    )
    names = {
        **DECODER,
        "output_norm": "final_layernorm",
        "blk.{}.attn_output": "layers.{}.self_attn.dense",
        "blk.{}.ffn_up": "layers.{}.mlp.fc1",
        "blk.{}.ffn_down": "layers.{}.mlp.fc2",
    }
    return Model("PhiForCausalLM", config, names)


def command_r(settings: Settings) -> Model:
    """Cohere's first: Command R and Aya."""
    return Model("CohereForCausalLM", _cohere(settings, "cohere", 500_000.0), DECODER)


def cohere2(settings: Settings) -> Model:
    """Command R7B and Command A, which attend within a window in three of four layers."""
    num_layers = min(settings.number(".block_count"), 2**16)
    sliding = window_pattern(settings, num_layers, 4)
    config = _cohere(settings, "cohere2", 10_000.0) | {
        "sliding_window": settings.number(".attention.sliding_window"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in sliding],
    }
    return Model("Cohere2ForCausalLM", config, DECODER)


def _cohere(settings: Settings, kind: str, theta: float) -> Config:
    return shared(
        settings,
        model_type=kind,
        intermediate_size=width(settings),
        layer_norm_eps=settings.real(NORM),
        rope_parameters=read_rope(settings, theta),
        logit_scale=settings.real(".logit_scale"),
        attention_bias="blk.0.attn_q.bias" in settings.file.tensors,
    )


def gpt2(settings: Settings) -> Model:
    """GPT-2, whose matrices transformers has as inputs by outputs."""
    usual = shared(settings)
    config = {
        "model_type": "gpt2",
        "vocab_size": usual["vocab_size"],
        "n_embd": usual["hidden_size"],
        "n_layer": usual["num_hidden_layers"],
        "n_head": usual["num_attention_heads"],
        "n_positions": usual["max_position_embeddings"],
        "n_inner": width(settings),
        "layer_norm_epsilon": settings.real(NORM),
        "bos_token_id": usual["bos_token_id"],
        "eos_token_id": usual["eos_token_id"],
        "tie_word_embeddings": usual["tie_word_embeddings"],
    }
    names = {
        "token_embd": "wte",
        "position_embd": "wpe",
        "output_norm": "ln_f",
        "output": "lm_head",
        "blk.{}.attn_norm": "h.{}.ln_1",
        "blk.{}.attn_qkv": "h.{}.attn.c_attn",
        "blk.{}.attn_output": "h.{}.attn.c_proj",
        "blk.{}.ffn_norm": "h.{}.ln_2",
        "blk.{}.ffn_up": "h.{}.mlp.c_fc",
        "blk.{}.ffn_down": "h.{}.mlp.c_proj",
    }
    return Model(
        "GPT2LMHeadModel",
        config,
        names,
        "transformer.",
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    )


def granite(settings: Settings) -> Model:
    """Granite 3: Llama with multipliers."""
    config = shared(
        settings,
        model_type="granite",
        intermediate_size=width(settings),
        rms_norm_eps=settings.real(RMS),
        rope_parameters=read_rope(settings),
        attention_multiplier=settings.real(".attention.scale", head_dim(settings) ** -0.5),
        embedding_multiplier=settings.real(".embedding_scale", 1.0),
        residual_multiplier=settings.real(".residual_scale", 1.0),
        logits_scaling=settings.real(".logit_scale", 1.0),
    )
    return Model("GraniteForCausalLM", config, DECODER, permuted=True)


def smollm3(settings: Settings) -> Model:
    """SmolLM3: Llama of which every fourth layer has no positions."""
    config = shared(
        settings,
        model_type="smollm3",
        intermediate_size=width(settings),
        rms_norm_eps=settings.real(RMS),
        rope_parameters=read_rope(settings),
        no_rope_layer_interval=4,
    )
    return Model("SmolLM3ForCausalLM", config, DECODER, permuted=True)


def olmo2(settings: Settings) -> Model:
    """OLMo 2, and OLMo 3, which has the same name and a window."""
    window = settings.number(".attention.sliding_window", 0)
    num_layers = min(settings.number(".block_count"), 2**16)
    rope = read_rope(settings)
    config = shared(
        settings,
        model_type="olmo2",
        intermediate_size=width(settings),
        rms_norm_eps=settings.real(RMS),
        rope_parameters=rope,
    )
    names = {**DECODER, **QK_NORMS, **_NORMS_AFTER}
    if not window:
        return Model("Olmo2ForCausalLM", config, names)
    sliding = window_pattern(settings, num_layers, 4)
    near = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    config |= {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in sliding],
        "rope_parameters": {"full_attention": rope, "sliding_attention": near},
    }
    return Model("Olmo3ForCausalLM", config, names)


def granite_moe(settings: Settings) -> Model:
    """Granite 3 with experts."""
    dense = granite(settings)
    config = dense.config | {
        "model_type": "granitemoe",
        "num_local_experts": settings.number(".expert_count"),
        "num_experts_per_tok": settings.number(".expert_used_count"),
    }
    names = {
        **DECODER,
        "blk.{}.ffn_gate_inp": "layers.{}.block_sparse_moe.router.layer",
        "blk.{}.ffn_gate_exps": "layers.{}.block_sparse_moe.experts.*.gate_proj",
        "blk.{}.ffn_up_exps": "layers.{}.block_sparse_moe.experts.*.up_proj",
        "blk.{}.ffn_down_exps": "layers.{}.block_sparse_moe.experts.*.down_proj",
    }
    return Model("GraniteMoeForCausalLM", config, names, permuted=True, traceable=False)


def glm4(settings: Settings) -> Model:
    """GLM-4-0414."""
    size = head_dim(settings)
    rope = read_rope(settings)
    rope["partial_rotary_factor"] = settings.number(".rope.dimension_count", size // 2) / size
    config = shared(
        settings,
        model_type="glm4",
        intermediate_size=width(settings),
        head_dim=size,
        rms_norm_eps=settings.real(RMS),
        rope_parameters=rope,
        attention_bias="blk.0.attn_q.bias" in settings.file.tensors,
    )
    names = {
        **DECODER,
        "blk.{}.post_attention_norm": "layers.{}.post_self_attn_layernorm",
        "blk.{}.post_ffw_norm": "layers.{}.post_mlp_layernorm",
        "blk.{}.ffn_up": "layers.{}.mlp.gate_up_proj",
    }
    return Model("Glm4ForCausalLM", config, names)


def glm4_moe(settings: Settings) -> Model:
    """GLM-4.5. A layer that predicts further tokens is left out."""
    size, tensors = head_dim(settings), settings.file.tensors
    rope = read_rope(settings)
    rope["partial_rotary_factor"] = settings.number(".rope.dimension_count", size // 2) / size
    further = settings.number(".nextn_predict_layers", 0)
    if settings.number(".expert_gating_func", _SIGMOID) != _SIGMOID:
        raise ExportError(
            f"{settings.file.path} chooses experts in a way that GLM-4.5 does not, which is not "
            "supported as GGUF; export the checkpoint that it was made from"
        )
    config = shared(
        settings,
        model_type="glm4_moe",
        num_hidden_layers=settings.number(".block_count") - further,
        intermediate_size=width(settings),
        head_dim=size,
        rms_norm_eps=settings.real(RMS),
        rope_parameters=rope,
        attention_bias="blk.0.attn_q.bias" in tensors,
        use_qk_norm="blk.0.attn_q_norm.weight" in tensors,
        moe_intermediate_size=settings.number(".expert_feed_forward_length"),
        n_routed_experts=settings.number(".expert_count"),
        num_experts_per_tok=settings.number(".expert_used_count"),
        n_shared_experts=settings.number(".expert_shared_count", 1),
        first_k_dense_replace=settings.number(".leading_dense_block_count"),
        routed_scaling_factor=settings.real(".expert_weights_scale", 1.0),
        norm_topk_prob=settings.flag(".expert_weights_norm", True),
    )
    names = {
        **DECODER,
        **QK_NORMS,
        **GLM_EXPERTS,
        "blk.{}.post_attention_norm": "layers.{}.post_attention_layernorm",
    }
    return Model("Glm4MoeForCausalLM", config, names, parameters=CORRECTION)


def exaone4(settings: Settings) -> Model:
    """EXAONE 4, of which the larger one attends within a window in three of four layers."""
    num_layers = min(settings.number(".block_count"), 2**16)
    window = settings.number(".attention.sliding_window", 0)
    pattern = window_pattern(settings, num_layers, 4) if window else [False] * num_layers
    config = shared(
        settings,
        model_type="exaone4",
        intermediate_size=width(settings),
        head_dim=head_dim(settings),
        rms_norm_eps=settings.real(RMS),
        rope_parameters=read_rope(settings),
        sliding_window=window or None,
        layer_types=["sliding_attention" if each else "full_attention" for each in pattern],
    )
    return Model("Exaone4ForCausalLM", config, {**DECODER, **QK_NORMS, **_NORMS_AFTER})


def seed_oss(settings: Settings) -> Model:
    """Seed-OSS."""
    tensors = settings.file.tensors
    config = shared(
        settings,
        model_type="seed_oss",
        intermediate_size=width(settings),
        head_dim=head_dim(settings),
        rms_norm_eps=settings.real(RMS),
        rope_parameters=read_rope(settings),
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_out_bias="blk.0.attn_output.bias" in tensors,
    )
    norm = {"blk.{}.post_attention_norm": "layers.{}.post_attention_layernorm"}
    return Model("SeedOssForCausalLM", config, {**DECODER, **norm})


def gpt_oss(settings: Settings) -> Model:
    """gpt-oss. llama.cpp rounds the edges of its YaRN; the model was trained without that."""
    num_layers = min(settings.number(".block_count"), 2**16)
    pattern = window_pattern(settings, num_layers, 2)
    rope = read_rope(settings, 150_000.0)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    config = shared(
        settings,
        model_type="gpt_oss",
        intermediate_size=settings.number(".expert_feed_forward_length"),
        head_dim=head_dim(settings),
        rms_norm_eps=settings.real(RMS),
        rope_parameters=rope,
        sliding_window=settings.number(".attention.sliding_window"),
        layer_types=["sliding_attention" if each else "full_attention" for each in pattern],
        num_local_experts=settings.number(".expert_count"),
        num_experts_per_tok=settings.number(".expert_used_count"),
    )
    settings.find(".feed_forward_length")  # of experts, as above
    names = {
        **DECODER,
        "blk.{}.post_attention_norm": "layers.{}.post_attention_layernorm",
        "blk.{}.ffn_gate_inp": "layers.{}.mlp.router",
        "blk.{}.ffn_gate_exps": "layers.{}.mlp.experts.*.gate_proj",
        "blk.{}.ffn_up_exps": "layers.{}.mlp.experts.*.up_proj",
        "blk.{}.ffn_down_exps": "layers.{}.mlp.experts.*.down_proj",
    }
    sinks = {"blk.{}.attn_sinks.weight": "layers.{}.self_attn.sinks"}
    return Model("GptOssForCausalLM", config, names, parameters=sinks, traceable=False)
