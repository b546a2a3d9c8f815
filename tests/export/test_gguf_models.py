"""GGUF files give the models that they were made from, and quantized ones their exact weights."""

import copy
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from maskdial_export.checkpoint.gguf.contents import read_contents
from maskdial_export.checkpoint.gguf.convert import convert
from maskdial_export.checkpoint.source import find
from maskdial_export.checks.parity import expected_output
from maskdial_export.errors import ExportError
from maskdial_export.model import load_checkpoint
from tests.export.fuzz_gguf import fuzz
from tests.export.gguf_files import (
    BYTE_LEVEL_SIZE,
    WORD_PIECES_SIZE,
    as_deepseek,
    as_experts,
    as_falcon_h1,
    as_gemma,
    as_gemma3n,
    as_gemma4,
    as_glm4_moe,
    as_gpt2,
    as_gpt_oss,
    as_granite_hybrid,
    as_granite_moe,
    as_lfm2,
    as_lfm2_moe,
    as_llama,
    as_nemotron_h,
    as_nomic,
    as_qwen3_next,
    as_qwen35,
    as_qwen35_moe,
    as_roberta,
    basics,
    byte_level,
    make_model,
    plain,
    word_pieces,
    write_gguf,
)

Writer = Any  # gguf.GGUFWriter has no types

SHAPE: dict[str, Any] = {
    "vocab_size": BYTE_LEVEL_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "bos_token_id": 258,
    "eos_token_id": 259,
    "pad_token_id": 260,
}
ENCODER = {key: SHAPE[key] for key in SHAPE if not key.endswith("_token_id")} | {
    "vocab_size": WORD_PIECES_SIZE,
    "pad_token_id": 0,
}
del ENCODER["num_key_value_heads"]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1 + each / 8 for each in range(8)],
    "long_factor": [4.0 + each for each in range(8)],
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 1.0,
}


GEMMA3N = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "head_dim": 16,
    "intermediate_size": [96] * 4,
    "num_kv_shared_layers": 2,
    "laurel_rank": 32,
    "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0],
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": BYTE_LEVEL_SIZE,
}
# As E2B: the last two layers read keys and values of others, and are twice as wide
GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 16,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": BYTE_LEVEL_SIZE,
    "final_logit_softcapping": 30.0,
}
# As 31B: values are those of keys where there is no window, and heads of both are fewer there
GEMMA4_KEYS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
    "head_dim": 16,
    "global_head_dim": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
}


def llama(writer: Writer, config: Any) -> None:
    basics(writer, config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def llama3(writer: Writer, config: Any) -> None:
    llama(writer, config)
    inverse, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    size = config.head_dim
    theta = config.rope_parameters["rope_theta"]
    unscaled = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
    writer.add_tensor("rope_freqs.weight", (unscaled / inverse).numpy())


def yarn(writer: Writer, config: Any) -> None:
    llama(writer, config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32)


def ministral3(writer: Writer, config: Any) -> None:
    llama(writer, config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(128)
    writer.add_rope_scaling_yarn_log_mul(1.0)
    writer.add_attn_temperature_scale(0.1)


def experts(writer: Writer, config: Any) -> None:
    llama(writer, config)
    count = getattr(config, "num_local_experts", None) or config.num_experts
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def qwen2(writer: Writer, config: Any) -> None:
    basics(writer, config)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def olmoe(writer: Writer, config: Any) -> None:
    qwen2(writer, config)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def qwen3_vl(writer: Writer, config: Any) -> None:
    qwen2(writer, config)
    writer.add_rope_dimension_sections([6, 5, 5, 0])
    writer.add_num_deepstack_layers(3)


def qwen3_vl_moe(writer: Writer, config: Any) -> None:
    experts(writer, config)
    writer.add_rope_dimension_sections([6, 5, 5, 0])
    writer.add_num_deepstack_layers(3)


def granite(writer: Writer, config: Any) -> None:
    qwen2(writer, config)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def exaone4(writer: Writer, config: Any) -> None:
    llama3(writer, config)
    writer.add_sliding_window(config.sliding_window)


def lfm2(writer: Writer, config: Any) -> None:
    qwen2(writer, config)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    attends = [kind == "full_attention" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads * each for each in attends])


def lfm2_moe(writer: Writer, config: Any) -> None:
    lfm2(writer, config)
    sparse(writer, config)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def sparse(writer: Writer, config: Any) -> None:
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def qwen35_moe(writer: Writer, config: Any) -> None:
    delta_net(writer, config)
    sparse(writer, config)


def qwen35(writer: Writer, config: Any) -> None:
    """With a layer more, which predicts further tokens."""
    delta_net(writer, config)
    writer.add_block_count(config.num_hidden_layers + 1)
    writer.add_nextn_predict_layers(1)
    further = f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight"
    writer.add_tensor(further, np.ones((4, 8), np.float32))


def delta_net(writer: Writer, config: Any) -> None:
    qwen2(writer, config)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(2)
    writer.add_rope_dimension_count(16)
    if "mrope_section" in config.rope_parameters:
        writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])


def granite_hybrid(writer: Writer, config: Any) -> None:
    granite(writer, config)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    attends = [kind in ("attention", "full_attention") for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads * each for each in attends])


def falcon_h1(writer: Writer, config: Any) -> None:
    qwen2(writer, config)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_ssm_inner_size(config.mamba_d_ssm)


def nemotron_h(writer: Writer, config: Any) -> None:
    basics(writer, config)
    kinds = config.layers_block_type
    has_experts = "moe" in kinds
    width = config.moe_intermediate_size if has_experts else config.intermediate_size
    writer.add_head_count_kv([2 * (kind == "full_attention") for kind in kinds])
    writer.add_feed_forward_length([width * (kind in ("mlp", "moe")) for kind in kinds])
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    if has_experts:
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)


def gpt_oss(writer: Writer, config: Any) -> None:
    qwen2(writer, config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])


def olmo3(writer: Writer, config: Any) -> None:
    basics(writer, config)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([each != "full_attention" for each in config.layer_types])


def granite_moe(writer: Writer, config: Any) -> None:
    granite(writer, config)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)


def glm4(writer: Writer, config: Any) -> None:
    qwen2(writer, config)
    writer.add_rope_dimension_count(config.head_dim // 2)


def glm4_moe(writer: Writer, config: Any) -> None:
    glm4(writer, config)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)


def latent(writer: Writer, config: Any) -> None:
    """As the first converter of DeepSeek 2 did, and that of MiniCPM 3 does."""
    basics(writer, config)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def minicpm3(writer: Writer, config: Any) -> None:
    latent(writer, config)
    for name in ("long", "short"):
        factors = np.array(config.rope_parameters[f"{name}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{name}.weight", factors)


def deepseek2(writer: Writer, config: Any) -> None:
    latent(writer, config)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.n_group is not None:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def youtu(writer: Writer, config: Any) -> None:
    latent(writer, config)
    absorbed(writer, config)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_expert_shared_count(0)
    writer.add_leading_dense_block_count(config.num_hidden_layers)


def absorbed(writer: Writer, config: Any) -> None:
    """As it is today: llama.cpp has the short rows as the only head of keys."""
    writer.add_head_count_kv(1)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)


def deepseek3(writer: Writer, config: Any) -> None:
    deepseek2(writer, config)
    absorbed(writer, config)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def gemma2(writer: Writer, config: Any) -> None:
    basics(writer, config)
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def gemma3(writer: Writer, config: Any) -> None:
    basics(writer, config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)


def gemma3n(writer: Writer, config: Any) -> None:
    basics(writer, config)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([each == "sliding_attention" for each in config.layer_types])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    shares, normal = config.activation_sparsity_pattern, statistics.NormalDist()
    deviations = [normal.inv_cdf(each) if each else -np.inf for each in shares]
    writer.add_activation_sparsity_scale(deviations)
    writer.add_rope_freq_base(1_000_000.0)


def gemma4(writer: Writer, config: Any) -> None:
    """As its converter, which writes lists of what differs between layers."""
    config = copy.deepcopy(config)
    config.allow_global_per_layer_attribute_access = True
    basics(writer, config)
    near = [each == "sliding_attention" for each in config.layer_types]
    heads = [config.per_layer_config[index] for index in range(len(near))]
    last = heads[-1]
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(near)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_key_length(last.head_dim)
    writer.add_value_length(last.head_dim)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_head_count_kv([each.num_key_value_heads for each in heads])
    writer.add_rope_dimension_count(last.head_dim)
    writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_rope_freq_base_swa(10_000.0)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.use_double_wide_mlp:
        first = len(near) - config.num_kv_shared_layers
        width = config.intermediate_size
        writer.add_feed_forward_length([width] * first + [2 * width] * (len(near) - first))
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    turning = last.head_dim // 8
    factors = [1.0] * turning + [1e30] * (last.head_dim // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def phi3(writer: Writer, config: Any) -> None:
    basics(writer, config)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_scaling_orig_ctx_len(32)
    writer.add_sliding_window(config.sliding_window)
    scale = config.max_position_embeddings / 32
    writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(32))))
    for name in ("long", "short"):
        factors = np.array(LONGROPE[f"{name}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{name}.weight", factors)


def starcoder2(writer: Writer, config: Any) -> None:
    qwen2(writer, config)
    writer.add_layer_norm_eps(config.norm_epsilon)


def gpt2(writer: Writer, config: Any) -> None:
    basics(writer, config)
    writer.add_feed_forward_length(4 * config.hidden_size)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def phi2(writer: Writer, config: Any) -> None:
    qwen2(writer, config)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads // 2)


def cohere(writer: Writer, config: Any) -> None:
    qwen2(writer, config)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_logit_scale(config.logit_scale)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def cohere2(writer: Writer, config: Any) -> None:
    cohere(writer, config)
    writer.add_sliding_window(config.sliding_window)


def encoder(writer: Writer, config: Any) -> None:
    basics(writer, config)
    writer.add_causal_attention(False)
    writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", None) or config.norm_eps)


def nomic(writer: Writer, config: Any) -> None:
    encoder(writer, config)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def modernbert(writer: Writer, config: Any) -> None:
    encoder(writer, config)
    writer.add_sliding_window(config.local_attention)
    writer.add_rope_freq_base(160_000.0)
    writer.add_rope_freq_base_swa(10_000.0)


def roberta(writer: Writer, config: Any) -> None:
    encoder(writer, config)
    writer.add_context_length(config.max_position_embeddings - 2)


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA_NET: dict[str, Any] = {
    "head_dim": 32,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
    },
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
DEEPSEEK: dict[str, Any] = LATENT | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
MSCALE = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
MAMBA_2: dict[str, Any] = {
    "layer_types": ["mamba", "attention"],
    "shared_intermediate_size": 64,
    "position_embedding_type": "nope",
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.5,
}
FALCON_H1: dict[str, Any] = {
    **{key: each for key, each in MAMBA_2.items() if key.startswith("mamba_")},
    "head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
}
NEMOTRON_H: dict[str, Any] = {
    "layers_block_type": ["mamba", "attention", "mlp"],
    "num_hidden_layers": 3,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
    "time_step_min": 1e-30,
}
NEMOTRON_H_MOE: dict[str, Any] = NEMOTRON_H | {
    "layers_block_type": ["mamba", "attention", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "moe_shared_expert_intermediate_size": 64,
}
GEMMA3 = {
    "num_hidden_layers": 7,
    "sliding_window": 16,
    "query_pre_attn_scalar": 16,
    "head_dim": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
GPT2 = {
    "vocab_size": BYTE_LEVEL_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 258,
    "eos_token_id": 259,
}
# name -> (llama.cpp's architecture, class, settings, metadata, what the converter does)
MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[..., None], Any]] = {
    "llama": ("llama", "LlamaForCausalLM", SHAPE | {"head_dim": 32}, llama, as_llama),
    "llama-bias": (
        "llama",
        "LlamaForCausalLM",
        SHAPE | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        llama,
        as_llama,
    ),
    "llama3": (
        "llama",
        "LlamaForCausalLM",
        SHAPE | {"rope_parameters": LLAMA3, "head_dim": 32},
        llama3,
        as_llama,
    ),
    "llama-yarn": ("llama", "LlamaForCausalLM", SHAPE | {"rope_parameters": YARN}, yarn, as_llama),
    "ministral3": (
        "mistral3",
        "Ministral3ForCausalLM",
        SHAPE
        | {"head_dim": 32}
        | {
            "rope_parameters": YARN
            | {"original_max_position_embeddings": 128, "llama_4_scaling_beta": 0.1}
            | {"mscale": 1.0, "mscale_all_dim": 1.0}
        },
        ministral3,
        as_llama,
    ),
    "mixtral": (
        "llama",
        "MixtralForCausalLM",
        SHAPE | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
        experts,
        as_llama,
    ),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", SHAPE, qwen2, plain),
    "qwen2-moe": (
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        SHAPE | MOE | {"shared_expert_intermediate_size": 48, "head_dim": 16},
        experts,
        as_experts,
    ),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", SHAPE | {"head_dim": 32}, qwen2, plain),
    "qwen3-moe": (
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        SHAPE | MOE | {"head_dim": 32, "norm_topk_prob": True},
        experts,
        as_experts,
    ),
    "granite": (
        "granite",
        "GraniteForCausalLM",
        SHAPE
        | {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        granite,
        as_llama,
    ),
    "smollm3": (
        "smollm3",
        "SmolLM3ForCausalLM",
        SHAPE | {"num_hidden_layers": 4},
        qwen2,
        as_llama,
    ),
    "olmo2": ("olmo2", "Olmo2ForCausalLM", SHAPE, qwen2, plain),
    "olmo3": (
        "olmo2",
        "Olmo3ForCausalLM",
        SHAPE
        | {
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        olmo3,
        plain,
    ),
    "olmoe": (
        "olmoe",
        "OlmoeForCausalLM",
        SHAPE | {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
        olmoe,
        as_experts,
    ),
    "qwen3-vl": (
        "qwen3vl",
        "Qwen3ForCausalLM",
        SHAPE | {"head_dim": 32},
        qwen3_vl,
        plain,
    ),
    "qwen3-vl-moe": (
        "qwen3vlmoe",
        "Qwen3MoeForCausalLM",
        SHAPE | MOE | {"head_dim": 32, "norm_topk_prob": True},
        qwen3_vl_moe,
        as_experts,
    ),
    "glm4": ("glm4", "Glm4ForCausalLM", SHAPE | {"head_dim": 32}, glm4, plain),
    "glm4-moe": (
        "glm4moe",
        "Glm4MoeForCausalLM",
        SHAPE
        | {"head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
        | {"use_qk_norm": True, "attention_bias": True},
        glm4_moe,
        as_glm4_moe,
    ),
    "deepseek2": (
        "deepseek2",
        "DeepseekV2ForCausalLM",
        SHAPE | DEEPSEEK | {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
        deepseek2,
        as_glm4_moe,
    ),
    "deepseek3": (
        "deepseek2",
        "DeepseekV3ForCausalLM",
        SHAPE | DEEPSEEK | {"rope_parameters": MSCALE},
        deepseek3,
        as_deepseek,
    ),
    "youtu": (
        "deepseek2",
        "YoutuForCausalLM",
        SHAPE | LATENT | {"pad_token_id": None},
        youtu,
        as_deepseek,
    ),
    "minicpm3": (
        "minicpm3",
        "MiniCPM3ForCausalLM",
        SHAPE | LATENT | {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 128}},
        minicpm3,
        plain,
    ),
    "exaone4": (
        "exaone4",
        "Exaone4ForCausalLM",
        SHAPE
        | {
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "rope_parameters": LLAMA3,
            "head_dim": 16,
        },
        exaone4,
        plain,
    ),
    "exaone4-small": (
        "exaone4",
        "Exaone4ForCausalLM",
        SHAPE | {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        qwen2,
        plain,
    ),
    "seed-oss": (
        "seed_oss",
        "SeedOssForCausalLM",
        SHAPE | {"head_dim": 32, "attention_out_bias": True},
        qwen2,
        plain,
    ),
    "lfm2": (
        "lfm2",
        "Lfm2ForCausalLM",
        SHAPE
        | {
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 3,
        },
        lfm2,
        as_lfm2,
    ),
    "qwen3.5": (
        "qwen35",
        "Qwen3_5ForCausalLM",
        SHAPE
        | {
            "head_dim": 32,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        qwen35,
        as_qwen35,
    ),
    "qwen3.5-moe": (
        "qwen35moe",
        "Qwen3_5MoeForCausalLM",
        SHAPE | DELTA_NET | MOE | {"shared_expert_intermediate_size": 24},
        qwen35_moe,
        as_qwen35_moe,
    ),
    "qwen3-next": (
        "qwen3next",
        "Qwen3NextForCausalLM",
        SHAPE | DELTA_NET | MOE | {"shared_expert_intermediate_size": 24},
        qwen35_moe,
        as_qwen3_next,
    ),
    "lfm2-moe": (
        "lfm2moe",
        "Lfm2MoeForCausalLM",
        SHAPE | MOE | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        lfm2_moe,
        as_lfm2_moe,
    ),
    "granite-hybrid": (
        "granitehybrid",
        "GraniteMoeHybridForCausalLM",
        SHAPE | MAMBA_2 | {"num_local_experts": 0, "num_experts_per_tok": 0},
        granite_hybrid,
        as_granite_hybrid,
    ),
    "falcon-h1": (
        "falcon-h1",
        "FalconH1ForCausalLM",
        SHAPE | FALCON_H1,
        falcon_h1,
        as_falcon_h1,
    ),
    "nemotron-h": (
        "nemotron_h",
        "NemotronHForCausalLM",
        SHAPE | NEMOTRON_H,
        nemotron_h,
        as_nemotron_h,
    ),
    "nemotron-h-moe": (
        "nemotron_h_moe",
        "NemotronHForCausalLM",
        SHAPE | NEMOTRON_H_MOE,
        nemotron_h,
        as_nemotron_h,
    ),
    "gemma": ("gemma", "GemmaForCausalLM", SHAPE | {"head_dim": 32}, basics, as_gemma),
    "gemma2": (
        "gemma2",
        "Gemma2ForCausalLM",
        SHAPE | {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32},
        gemma2,
        as_gemma,
    ),
    "gemma3": ("gemma3", "Gemma3ForCausalLM", SHAPE | GEMMA3, gemma3, as_gemma),
    "gemma3n": ("gemma3n", "Gemma3nForCausalLM", SHAPE | GEMMA3N, gemma3n, as_gemma3n),
    "gemma4": ("gemma4", "Gemma4ForCausalLM", SHAPE | GEMMA4, gemma4, as_gemma4),
    "gemma4-keys": ("gemma4", "Gemma4ForCausalLM", SHAPE | GEMMA4_KEYS, gemma4, as_gemma4),
    "phi3": (
        "phi3",
        "Phi3ForCausalLM",
        SHAPE
        | {
            "sliding_window": 31,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 32,
        },
        phi3,
        plain,
    ),
    "starcoder2": (
        "starcoder2",
        "Starcoder2ForCausalLM",
        SHAPE | {"sliding_window": None},
        starcoder2,
        plain,
    ),
    "gpt2": ("gpt2", "GPT2LMHeadModel", GPT2, gpt2, as_gpt2),
    "phi": (
        "phi2",
        "PhiForCausalLM",
        SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 2},
        phi2,
        plain,
    ),
    "cohere": ("command-r", "CohereForCausalLM", SHAPE | {"logit_scale": 0.3}, cohere, plain),
    "cohere2": (
        "cohere2",
        "Cohere2ForCausalLM",
        SHAPE | {"num_hidden_layers": 4, "sliding_window": 16, "logit_scale": 0.3},
        cohere2,
        plain,
    ),
    "bert": ("bert", "BertModel", ENCODER, encoder, plain),
    "roberta": (
        "bert",
        "RobertaModel",
        ENCODER
        | {"vocab_size": BYTE_LEVEL_SIZE, "pad_token_id": 1, "max_position_embeddings": 130},
        roberta,
        as_roberta,
    ),
    "nomic-bert": ("nomic-bert", "NomicBertModel", ENCODER, nomic, as_nomic),
    "modernbert": (
        "modern-bert",
        "ModernBertModel",
        ENCODER
        | {"num_hidden_layers": 4, "local_attention": 16, "cls_token_id": 2, "sep_token_id": 3},
        modernbert,
        plain,
    ),
}


# Files that are written directly alone: transformers' class has other names
DIRECT_MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[..., None], Any]] = {
    "gemma4-moe": (
        "gemma4",
        "Gemma4ForCausalLM",
        SHAPE
        | GEMMA4_KEYS
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"moe_intermediate_size": 32},
        gemma4,
        as_gemma4,
    ),
    "granite-hybrid-moe": (
        "granitehybrid",
        "GraniteMoeHybridForCausalLM",
        SHAPE | MAMBA_2 | {"num_local_experts": 4, "num_experts_per_tok": 2},
        granite_hybrid,
        as_granite_hybrid,
    ),
    "gpt-oss": (
        "gpt-oss",
        "GptOssForCausalLM",
        SHAPE
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16},
        gpt_oss,
        as_gpt_oss,
    ),
    "granite-moe": (
        "granitemoe",
        "GraniteMoeForCausalLM",
        SHAPE
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
        | {"logits_scaling": 3.0, "residual_multiplier": 0.5},
        granite_moe,
        as_granite_moe,
    ),
}


def write(name: str, path: Path, **options: Any) -> Any:
    """Writes a file of a model, which it returns."""
    architecture, model_class, settings, fill, rename = (MODELS | DIRECT_MODELS)[name]
    model = make_model(model_class, **settings)
    pieces = word_pieces if settings["vocab_size"] == WORD_PIECES_SIZE else byte_level

    def metadata(writer: Writer) -> None:
        pieces(writer)
        fill(writer, model.config)
        if name == "roberta":
            writer.add_pad_token_id(1)

    write_gguf(path, architecture, model, metadata, rename, **options)
    return model


def first_output(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(input_ids=ids)[0]
    return output


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_the_same(name: str, tmp_path: Path) -> None:
    """Every weight, but for the rounding of Gemma's norms, and what the model computes."""
    original = write(name, tmp_path / "model.gguf")
    folder = tmp_path / "restored"
    folder.mkdir()
    convert([tmp_path / "model.gguf"], folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.architectures == [type(original).__name__]
    restored, info = type(original).from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert all(each.startswith("pooler.") for each in info["missing_keys"])
    assert not info["unexpected_keys"]
    stored = restored.state_dict()
    for key, expected in original.state_dict().items():
        if key.startswith("pooler.") or (name == "roberta" and "position_embeddings" in key):
            continue
        shifted = name.startswith(("gemma", "qwen3.5", "qwen3-next"))
        room = 2e-7 if (shifted and "norm" in key) or key.endswith("A_log") else 0
        torch.testing.assert_close(stored[key], expected, rtol=0, atol=room, msg=key)
    original.set_attn_implementation("eager")
    size = original.config.vocab_size
    for length in (1, 20, 60):
        ids = torch.randint(5, size, (1, length), generator=torch.Generator().manual_seed(length))
        expected, found = (first_output(each, ids) for each in (original, restored.eval()))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "BF16"])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_quantized_weights_are_exact(kind: str, name: str, tmp_path: Path) -> None:
    """Rows of queries and keys come back in order, each expert is one matrix."""
    path = tmp_path / "model.gguf"
    ends = dict.fromkeys(["attn_q.weight", "attn_v.weight", "exps.weight", "ffn_up.weight"], kind)
    original = write(name, path, quantize=ends)
    weights = {each.name: each for each in read_contents([path]).weights}
    of = gguf.GGMLQuantizationType[kind]
    queries = original.state_dict()["model.layers.1.self_attn.q_proj.weight"].numpy()
    expected = gguf.quants.dequantize(gguf.quants.quantize(queries, of), of)
    weight = weights["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(weight.values(), expected)
    kinds = {
        name: {piece.tensor.type.name for piece in each.pieces} for name, each in weights.items()
    }
    quantized = [each for name, each in weights.items() if kinds[name] == {kind}]
    assert len(quantized) == (2 * 14 if name == "mixtral" else 2 * 3)
    for each in quantized:
        blocks = each.blocks()
        if kind == "BF16":
            assert blocks is None
        else:
            assert blocks is not None
            np.testing.assert_array_equal(blocks.dequantize(), each.values())


def test_query_key_and_value_in_one(tmp_path: Path) -> None:
    """Newer files may have them as one tensor, and Phi-3's as three."""
    path = tmp_path / "model.gguf"
    write("llama", path)
    expected = {each.name: each.values() for each in read_contents([path]).weights}

    def joined(name: str, values: Any, config: Any) -> Any:
        parts = held.setdefault(name.split(".self_attn")[0], {})
        if ".self_attn." not in name or ".o_proj." in name:
            yield name, values
            return
        ((_, parts[name.split(".")[-2]]),) = as_llama(name, values, config)
        if len(parts) == 3:
            rows = [parts[each] for each in ("q_proj", "k_proj", "v_proj")]
            layer = name.split(".")[2]
            yield f"blk.{layer}.attn_qkv.weight", np.concatenate(rows)

    held: dict[str, dict[str, Any]] = {}
    _, _, settings, fill, _ = MODELS["llama"]
    model = make_model("LlamaForCausalLM", **settings)
    together = tmp_path / "joined.gguf"

    def metadata(writer: Writer) -> None:
        byte_level(writer)
        fill(writer, model.config)

    write_gguf(together, "llama", model, metadata, joined)
    found = read_contents([together])
    assert "blk.1.attn_qkv.weight" in found.file.tensors
    assert {each.name for each in found.weights} == set(expected)
    for each in found.weights:
        np.testing.assert_array_equal(each.values(), expected[each.name])


def test_a_model_that_does_not_fit_its_weights(tmp_path: Path) -> None:
    """Refused before the model takes memory."""
    path = tmp_path / "model.gguf"
    architecture, model_class, settings, _, rename = MODELS["llama"]
    model = make_model(model_class, **settings)

    def refused(why: str, change: Callable[[Writer], None]) -> None:
        def metadata(writer: Writer) -> None:
            byte_level(writer)
            llama(writer, model.config)
            change(writer)

        path.unlink(missing_ok=True)  # the last one is still mapped
        write_gguf(path, architecture, model, metadata, rename)
        folder = tmp_path / "restored"
        folder.mkdir(exist_ok=True)
        with pytest.raises(ExportError, match=why):
            convert([path], folder)

    refused("describes 2,000,000,000 layers", lambda each: each.add_block_count(2 * 10**9))
    refused("describes a model where it has", lambda each: each.add_embedding_length(2**30))
    refused("feed_forward_length .* must be a number", bad_width)
    refused("has no heads", lambda each: each.add_head_count(0))
    refused("heads of the attention of .* have no width", lambda each: each.add_key_length(0))
    refused("differs between layers", lambda each: each.add_head_count_kv([2, 1]))
    refused("describes a model of .* parameters", million_experts)


def million_experts(writer: Writer) -> None:
    writer.add_expert_count(10**6)
    writer.add_expert_used_count(2)


def bad_width(writer: Writer) -> None:
    writer.add_string("llama.feed_forward_length", "wide")


def test_mutations_are_read_or_refused(tmp_path: Path) -> None:
    """By hand there are 10,000; see fuzz_gguf.py."""
    write("llama", tmp_path / "model.gguf")
    read, refused = fuzz(tmp_path / "model.gguf", 120)
    assert read > 5
    assert refused > 50


# The first numbers of llama.cpp's vectors (llama-cpp-python 0.3.36, float32, mean, normalized)
BOTH_WAYS = {
    "llama": [0.01823701, 0.1383908, 0.09874134, -0.12577453, -0.1614956, -0.01650546],
    "qwen2": [-0.08144292, 0.09846172, 0.14102089, -0.01882082, -0.11235285, 0.18470144],
    "qwen3": [0.02550884, -0.20786529, 0.14378559, 0.01025372, -0.09647156, 0.39823711],
}


def write_with(name: str, path: Path, further: Callable[[Writer], object]) -> Path:
    """Writes a file with entries that its model's description does not have."""
    architecture, model_class, settings, fill, rename = MODELS[name]
    model = make_model(model_class, **settings)

    def metadata(writer: Writer) -> None:
        byte_level(writer)
        fill(writer, model.config)
        further(writer)

    write_gguf(path, architecture, model, metadata, rename)
    return path


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_decoders_that_embed_may_read_both_ways(name: str, tmp_path: Path) -> None:
    def metadata(writer: Writer) -> None:
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        writer.add_causal_attention(False)

    path = write_with(name, tmp_path / "model.gguf", metadata)
    (tmp_path / "restored").mkdir()
    source = find(
        str(path), "auto", revision=None, allow_pickle=False, restored=tmp_path / "restored"
    )
    checkpoint = load_checkpoint(source)
    assert not checkpoint.survey.causal
    ids = torch.tensor([checkpoint.tokenizer.encode("the house by the sea").ids])
    vector = expected_output(checkpoint.model, checkpoint.pooler, {"input_ids": ids})
    np.testing.assert_allclose(vector[:6], BOTH_WAYS[name], atol=1e-6)


def test_parts_of_latent_attention_that_do_not_fit(tmp_path: Path) -> None:
    def refused(why: str, name: str, shape: tuple[int, ...] | None) -> None:
        def damaged(key: str, values: Any, config: Any) -> Any:
            for part, rows in as_deepseek(key, values, config):
                if not part.startswith("blk.1.attn_") or not part.endswith(name):
                    yield part, rows
                elif shape is not None:
                    yield part, np.ones(shape, np.float32)

        _, model_class, settings, fill, _ = MODELS["deepseek3"]
        model = make_model(model_class, **settings)

        def metadata(writer: Writer) -> None:
            byte_level(writer)
            fill(writer, model.config)

        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
        write_gguf(path, "deepseek2", model, metadata, damaged)
        restored = tmp_path / f"{path.name}.restored"
        restored.mkdir()
        with pytest.raises(ExportError, match=why):
            convert([path], restored)

    refused("attn_k_b.weight of .* needs a matrix of values of its width", "v_b.weight", None)
    refused("attn_k_b.weight of .* needs a matrix of values of its", "v_b.weight", (4, 16, 16))
    refused(r"attn_k_b.weight of .* has the shape \(3, 32, 16\)", "k_b.weight", (3, 32, 16))
    refused(r"attn_k_b.weight of .* has the shape \(128, 16\)", "k_b.weight", (128, 16))
    refused("attn_k_b.weight of .* has the shape", "k_b.weight", (4, 32, 24))


def test_a_scaling_without_a_type_is_linear(tmp_path: Path) -> None:
    """llama.cpp's default; its logits were within 0.001, the rounding of its cache."""
    path = write_with(
        "llama", tmp_path / "model.gguf", lambda each: each.add_rope_scaling_factor(4)
    )
    assert read_contents([path]).model.config["rope_parameters"] == {
        "rope_type": "linear",
        "rope_theta": 10_000.0,
        "factor": 4.0,
    }


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("attention.causal", False, "llama.attention.causal of .* is False"),
        ("rope.scaling.attn_factor", 1.5, "llama.rope.scaling.attn_factor of .* is 1.5"),
        ("attention.value_length", 16, "llama.attention.value_length of .* is 16"),
        ("attention.sliding_window", 64, "llama.attention.sliding_window of .* is 64"),
        ("rope.scaling.yarn_ext_factor", 1.0, "llama.rope.scaling.yarn_ext_factor of .* is 1.0"),
        ("logit_scale", 0.5, "llama.logit_scale of .* is 0.5"),
        ("attention.new_kind", [1, 2], r"llama.attention.new_kind of .* is \[1, 2\]"),
    ],
)
def test_entries_that_nobody_reads_are_refused(
    key: str, value: Any, named: str, tmp_path: Path
) -> None:
    def metadata(writer: Writer) -> None:
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_array)(f"llama.{key}", value)

    path = write_with("llama", tmp_path / "model.gguf", metadata)
    with pytest.raises(ExportError, match=f"{named}, which is not supported as GGUF"):
        read_contents([path])


def test_entries_that_say_nothing_are_not_refused(tmp_path: Path) -> None:
    def metadata(writer: Writer) -> None:
        writer.add_causal_attention(True)
        writer.add_value_length(32)
        writer.add_sliding_window(0)
        writer.add_logit_scale(1.0)
        writer.add_rope_scaling_attn_factors(1.0)
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_tensor_data_layout("Meta AI original pth")
        writer.add_layer_norm_eps(1e-5)  # beside the one that its norms have
        writer.add_rope_scaling_factor(1.0)
        writer.add_rope_scaling_yarn_beta_fast(32.0)
        writer.add_rope_scaling_yarn_beta_slow(1.0)

    read_contents([write_with("llama", tmp_path / "model.gguf", metadata)])


def test_yarn_may_say_that_it_extrapolates(tmp_path: Path) -> None:
    path = write_with(
        "llama-yarn",
        tmp_path / "model.gguf",
        lambda each: each.add_rope_scaling_yarn_ext_factor(1.0),
    )
    rope = read_contents([path]).model.config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 4.0)


@pytest.mark.parametrize("num_layers", [7, 34])
def test_gemma_3_of_ollama(num_layers: int, tmp_path: Path) -> None:
    """Its names for the bases, its default for the softcapping, and no scaling."""
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 2_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
    }
    shape = SHAPE | GEMMA3 | {"num_hidden_layers": num_layers, "rope_parameters": rope}
    model = make_model("Gemma3ForCausalLM", **shape)

    def metadata(writer: Writer) -> None:
        byte_level(writer)
        basics(writer, model.config)
        writer.add_sliding_window(16)
        writer.add_float32("gemma3.rope.global.freq_base", 2_000_000.0)
        writer.add_float32("gemma3.rope.local.freq_base", 20_000.0)
        writer.add_float32("gemma3.final_logit_softcapping", 30.0)
        writer.add_uint32("gemma3.mm.tokens_per_image", 256)

    write_gguf(tmp_path / "model.gguf", "gemma3", model, metadata, as_gemma)
    config = read_contents([tmp_path / "model.gguf"]).model.config
    assert config["final_logit_softcapping"] is None
    if num_layers == 34:
        rope["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    assert config["rope_parameters"] == rope
