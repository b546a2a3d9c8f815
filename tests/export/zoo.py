"""The zoo: a tiny configuration of every architecture that the tests prove.

``docs/supported-models.md`` is generated from it. `make test` exports the quick ones, which stand
for all mechanisms; `make test-zoo` exports all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

Settings = Mapping[str, Any]

SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
# A head has the same body as its fill-mask model, so one layer of it is enough
SMALL = SHAPE | {"num_hidden_layers": 1}
# Two query heads to one key head, of a size (16) that the operator rotates
GROUPED = SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
WIDE = SHAPE | {"hidden_size": 64, "num_attention_heads": 2}
GPT: dict[str, Any] = {
    "vocab_size": 101,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
BLOOM: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "n_layer": 2,
    "n_head": 2,
    "seq_length": 128,
    "pad_token_id": 0,
}
# Windows are smaller than the texts of the tests
LOCAL_GLOBAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
EXPERTS = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL_EXPERTS = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = GROUPED | {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
GEMMA4 = GROUPED | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "global_head_dim": 32,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 101,
}
# A layer with a state, and one with keys and values
DELTA_NET = GROUPED | {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA_2 = GROUPED | {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
STATE_SPACE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
ROBERTA = SHAPE | {"pad_token_id": 1, "bos_token_id": 0, "type_vocab_size": 1}
# Windows of 4 tokens to either side, smaller than the texts of the tests
LONGFORMER = ROBERTA | {"attention_window": 8, "sep_token_id": 3}
XLM: dict[str, Any] = {
    "vocab_size": 101,
    "emb_dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "max_position_embeddings": 128,
    "pad_index": 0,
    "pad_token_id": 0,
    "mask_index": 4,
}
MODERN = SHAPE | {
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "local_attention": 8,
    "global_attn_every_n_layers": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
ULTRA = SHAPE | {
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "sliding_window": 4,
    "prediction_head_size": 32,
}
DEBERTA = SHAPE | {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
}
DEBERTA_V2 = DEBERTA | {
    "position_buckets": 8,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
}
XLNET: dict[str, Any] = {
    "vocab_size": 101,
    "d_model": 32,
    "n_layer": 2,
    "n_head": 2,
    "d_inner": 48,
    "pad_token_id": 0,
}
DISTILLED: dict[str, Any] = {
    "vocab_size": 101,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "max_position_embeddings": 128,
}
T5: dict[str, Any] = {
    "vocab_size": 101,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 2,
    "n_positions": 128,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "pad_token_id": 0,
    "eos_token_id": 3,
    "decoder_start_token_id": 0,
}
BART: dict[str, Any] = {
    "vocab_size": 101,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 3,
    "forced_eos_token_id": 3,
}
SPREAD_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [4.0] * 8,
}
GEMMA3N = (
    GROUPED
    | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"sliding_window": 6, "intermediate_size": [48] * 4, "laurel_rank": 4}
    | {"activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0], "num_kv_shared_layers": 2}
    | {"vocab_size_per_layer_input": 101, "hidden_size_per_layer_input": 8}
)
LABELS = {0: "negative", 1: "neutral", 2: "positive"}
TAGS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}


@dataclass(frozen=True, slots=True)
class Specimen:
    """A class of transformers with a configuration; ``note`` says what is special about it."""

    architecture: str
    settings: Settings
    note: str = ""
    quick: bool = False
    batch_invariant: bool = True


def marked(zoo: Mapping[str, Specimen]) -> list[Any]:
    """The names as parameters of a test; those that are not quick are marked."""
    return [
        pytest.param(name, marks=() if specimen.quick else pytest.mark.zoo)
        for name, specimen in zoo.items()
    ]


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    """Settings of scaled rotary positions."""
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0} | parameters}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LATENT = SHAPE | {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
}
CAUSAL: Mapping[str, Specimen] = {
    "gpt2": Specimen("GPT2LMHeadModel", GPT, quick=True),
    "opt": Specimen("OPTForCausalLM", SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": 16}),
    "gpt-neox": Specimen(
        "GPTNeoXForCausalLM", WIDE | {"rotary_pct": 0.5}, "rotates half of a head", quick=True
    ),
    "llama": Specimen(
        "LlamaForCausalLM", GROUPED | {"tie_word_embeddings": True}, "grouped queries", quick=True
    ),
    "mistral": Specimen("MistralForCausalLM", GROUPED | {"sliding_window": 5}, "sliding window"),
    "qwen2": Specimen("Qwen2ForCausalLM", GROUPED),
    "qwen3": Specimen("Qwen3ForCausalLM", GROUPED | {"num_attention_heads": 4}, quick=True),
    "phi3": Specimen(
        "Phi3ForCausalLM",
        GROUPED
        | {"sliding_window": 7, "max_position_embeddings": 256, "rope_parameters": SPREAD_ROPE}
        | {"original_max_position_embeddings": 128},
        "sliding window, longrope",
    ),
    "gemma2": Specimen(
        "Gemma2ForCausalLM",
        GROUPED
        | {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 24}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        "sliding window, capped scores",
        quick=True,
    ),
    "openai-gpt": Specimen("OpenAIGPTLMHeadModel", GPT),
    "ctrl": Specimen("CTRLLMHeadModel", GPT | {"dff": 48}),
    "bloom": Specimen("BloomForCausalLM", BLOOM, "ALiBi", quick=True),
    "gemma3": Specimen(
        "Gemma3ForCausalLM",
        GROUPED | LOCAL_GLOBAL | {"query_pre_attn_scalar": 24},
        "local and global layers with rotary tables of their own",
    ),
    "cohere2": Specimen(
        "Cohere2ForCausalLM",
        GROUPED | LOCAL_GLOBAL,
        "interleaved rotation, global layers without it",
    ),
    "mixtral": Specimen("MixtralForCausalLM", LOCAL_EXPERTS, "mixture of experts"),
    "gpt-neo": Specimen(
        "GPTNeoForCausalLM",
        SHAPE
        | {"num_layers": 2, "num_heads": 2, "window_size": 6}
        | {"attention_types": [[["global", "local"], 1]]},
        "local and global layers",
    ),
    "gptj": Specimen("GPTJForCausalLM", GPT | {"rotary_dim": 4}),
    "codegen": Specimen("CodeGenForCausalLM", GPT | {"rotary_dim": 4}),
    "gpt-bigcode": Specimen("GPTBigCodeForCausalLM", GPT, "one key head"),
    "xglm": Specimen(
        "XGLMForCausalLM",
        SHAPE | {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 2},
    ),
    "biogpt": Specimen("BioGptForCausalLM", SHAPE),
    "mpt": Specimen(
        "MptForCausalLM",
        {"vocab_size": 101, "d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 128}
        | {"expansion_ratio": 2},
        "ALiBi",
    ),
    "falcon": Specimen(
        "FalconForCausalLM",
        SHAPE
        | {"num_attention_heads": 2, "alibi": False, "new_decoder_architecture": True}
        | {"num_kv_heads": 1},
        "grouped queries",
    ),
    "falcon-multi-query": Specimen(
        "FalconForCausalLM", SHAPE | {"alibi": False, "multi_query": True}, "one key head"
    ),
    "llama-dynamic-rope": Specimen(
        "LlamaForCausalLM", GROUPED | rope("dynamic", factor=2.0), "dynamic NTK rope"
    ),
    "llama-yarn": Specimen(
        "LlamaForCausalLM",
        GROUPED | rope("yarn", factor=2.0, original_max_position_embeddings=64),
        "YaRN",
    ),
    "ministral": Specimen(
        "MinistralForCausalLM", GROUPED | LOCAL_GLOBAL, "local and global layers"
    ),
    "ministral3": Specimen("Ministral3ForCausalLM", GROUPED),
    "phi": Specimen(
        "PhiForCausalLM", WIDE | {"partial_rotary_factor": 0.5}, "rotates half of a head"
    ),
    "gemma": Specimen("GemmaForCausalLM", GROUPED),
    "vaultgemma": Specimen(
        "VaultGemmaForCausalLM", GROUPED | LOCAL_GLOBAL, "local and global layers"
    ),
    "smollm3": Specimen(
        "SmolLM3ForCausalLM", GROUPED | {"no_rope_layers": [1, 0]}, "layers without rotation"
    ),
    "stablelm": Specimen(
        "StableLmForCausalLM",
        WIDE | {"partial_rotary_factor": 0.5, "num_key_value_heads": 2},
        "rotates half of a head",
    ),
    "granite": Specimen(
        "GraniteForCausalLM", GROUPED | {"embedding_multiplier": 2.0, "logits_scaling": 3.0}
    ),
    "olmo": Specimen("OlmoForCausalLM", GROUPED | {"clip_qkv": 1.5}),
    "olmo2": Specimen("Olmo2ForCausalLM", GROUPED),
    "olmo3": Specimen("Olmo3ForCausalLM", GROUPED | LOCAL_GLOBAL, "local and global layers"),
    "cohere": Specimen(
        "CohereForCausalLM", GROUPED | {"use_qk_norm": True}, "interleaved rotation"
    ),
    "helium": Specimen("HeliumForCausalLM", GROUPED, "interleaved rotation"),
    "ernie4-5": Specimen("Ernie4_5ForCausalLM", GROUPED, "interleaved rotation"),
    "glm": Specimen(
        "GlmForCausalLM", GROUPED | {"head_dim": 32}, "interleaved rotation of half a head"
    ),
    "glm4": Specimen(
        "Glm4ForCausalLM", GROUPED | {"head_dim": 32}, "interleaved rotation of half a head"
    ),
    "starcoder2": Specimen(
        "Starcoder2ForCausalLM", GROUPED | {"sliding_window": 6}, "sliding window"
    ),
    "nemotron": Specimen(
        "NemotronForCausalLM",
        WIDE | {"partial_rotary_factor": 0.5, "num_key_value_heads": 1},
        "rotates half of a head",
    ),
    "arcee": Specimen("ArceeForCausalLM", GROUPED),
    "exaone4": Specimen(
        "Exaone4ForCausalLM", GROUPED | LOCAL_GLOBAL, "global layers without rotation"
    ),
    "hunyuan": Specimen("HunYuanDenseV1ForCausalLM", GROUPED, "norms after the rotation"),
    "seed-oss": Specimen("SeedOssForCausalLM", GROUPED),
    "apertus": Specimen("ApertusForCausalLM", GROUPED),
    "bitnet": Specimen("BitNetForCausalLM", GROUPED, "not the packed weights"),
    "cwm": Specimen("CwmForCausalLM", GROUPED | LOCAL_GLOBAL, "local and global layers"),
    "hyperclovax": Specimen("HyperCLOVAXForCausalLM", GROUPED),
    "jais2": Specimen("Jais2ForCausalLM", GROUPED),
    "modernbert-decoder": Specimen(
        "ModernBertDecoderForCausalLM",
        MODERN | {"num_hidden_layers": 2, "global_attn_every_n_layers": 2},
        "local and global layers",
    ),
    "nanochat": Specimen("NanoChatForCausalLM", GROUPED),
    "persimmon": Specimen("PersimmonForCausalLM", WIDE),
    "bert-decoder": Specimen("BertLMHeadModel", SHAPE | {"is_decoder": True}, "`is_decoder`"),
    "bert-generation": Specimen(
        "BertGenerationDecoder", SHAPE | {"is_decoder": True}, "`is_decoder`"
    ),
    "qwen2-moe": Specimen(
        "Qwen2MoeForCausalLM",
        EXPERTS | {"shared_expert_intermediate_size": 24, "decoder_sparse_step": 2},
        "mixture of experts",
    ),
    "qwen3-moe": Specimen("Qwen3MoeForCausalLM", EXPERTS, "mixture of experts"),
    "olmoe": Specimen("OlmoeForCausalLM", EXPERTS, "mixture of experts"),
    "flex-olmo": Specimen("FlexOlmoForCausalLM", EXPERTS, "mixture of experts"),
    "granitemoe": Specimen("GraniteMoeForCausalLM", LOCAL_EXPERTS, "mixture of experts"),
    "granitemoeshared": Specimen(
        "GraniteMoeSharedForCausalLM",
        LOCAL_EXPERTS | {"shared_intermediate_size": 24},
        "mixture of experts",
    ),
    "gpt-oss": Specimen(
        "GptOssForCausalLM", LOCAL_EXPERTS | LOCAL_GLOBAL, "mixture of experts, attention sinks"
    ),
    "phimoe": Specimen("PhimoeForCausalLM", LOCAL_EXPERTS, "mixture of experts"),
    "ernie4-5-moe": Specimen(
        "Ernie4_5_MoeForCausalLM",
        GROUPED
        | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}
        | {"moe_layer_start_index": 0, "moe_num_shared_experts": 1},
        "mixture of experts",
    ),
    "glm4-moe": Specimen("Glm4MoeForCausalLM", ROUTED, "mixture of experts"),
    "dots1": Specimen("Dots1ForCausalLM", ROUTED | {"n_shared_experts": 1}, "mixture of experts"),
    "hunyuan-moe": Specimen(
        "HunYuanMoEV1ForCausalLM",
        GROUPED | {"num_experts": 4, "moe_topk": 2},
        "mixture of experts",
    ),
    "jetmoe": Specimen("JetMoeForCausalLM", LOCAL_EXPERTS, "mixture of experts"),
    "granitemoehybrid": Specimen(
        "GraniteMoeHybridForCausalLM",
        LOCAL_EXPERTS
        | {"layer_types": ["attention", "attention"], "shared_intermediate_size": 24}
        | {"mamba_n_heads": 4, "mamba_d_head": 16},
        "mixture of experts; attention layers only",
    ),
    "deepseek-v3": Specimen(
        "DeepseekV3ForCausalLM",
        SHAPE
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1}
        | {"topk_group": 1, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
        | {"q_lora_rank": 16, "kv_lora_rank": 16},
        "latent attention, mixture of experts",
    ),
    "deepseek-v2": Specimen(
        "DeepseekV2ForCausalLM",
        SHAPE
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1}
        | {"topk_group": 1, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
        | {"q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 16},
        "latent attention, mixture of experts, rotation by complex numbers",
    ),
    "llama4": Specimen(
        "Llama4ForCausalLM",
        GROUPED
        | {"num_local_experts": 4, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2}
        | {"no_rope_layers": [1, 0], "attention_chunk_size": 128},
        "texts of one chunk; mixture of experts, rotation by complex numbers, layers without it",
    ),
    "minicpm3": Specimen(
        "MiniCPM3ForCausalLM",
        SHAPE
        | {"num_key_value_heads": 4, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
        | {"v_head_dim": 16, "q_lora_rank": 16, "kv_lora_rank": 16},
        "latent attention",
    ),
    "minimax-m2": Specimen("MiniMaxM2ForCausalLM", LOCAL_EXPERTS, "mixture of experts"),
    "gemma4": Specimen(
        "Gemma4ForCausalLM",
        GEMMA4,
        "local and global layers with heads of different sizes, shared keys and values",
    ),
    "lfm2": Specimen(
        "Lfm2ForCausalLM",
        GROUPED | {"layer_types": ["conv", "full_attention"]},
        "short convolutions",
        quick=True,
    ),
    "lfm2-moe": Specimen(
        "Lfm2MoeForCausalLM",
        EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        "short convolutions, mixture of experts",
    ),
    "lfm3": Specimen(
        "Lfm3ForCausalLM",
        GROUPED | {"layer_types": ["conv", "full_attention"]},
        "short convolutions",
    ),
    "qwen3.5": Specimen("Qwen3_5ForCausalLM", DELTA_NET, "gated delta nets", quick=True),
    "qwen3.5-moe": Specimen(
        "Qwen3_5MoeForCausalLM",
        EXPERTS | DELTA_NET | {"shared_expert_intermediate_size": 24},
        "gated delta nets, mixture of experts",
    ),
    "qwen3-next": Specimen(
        "Qwen3NextForCausalLM",
        EXPERTS | DELTA_NET | {"shared_expert_intermediate_size": 24},
        "gated delta nets, mixture of experts",
    ),
    "olmo-hybrid": Specimen("OlmoHybridForCausalLM", DELTA_NET, "gated delta nets"),
    "kimi-linear": Specimen(
        "KimiLinearForCausalLM",
        SHAPE
        | {"num_key_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]}
        | {"linear_num_heads": 2, "linear_head_dim": 16, "kv_lora_rank": 16}
        | {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        "Kimi delta attention, latent attention, mixture of experts",
    ),
    "granite-hybrid": Specimen(
        "GraniteMoeHybridForCausalLM",
        MAMBA_2
        | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 48}
        | {"num_local_experts": 0},
        "Mamba 2",
        quick=True,
    ),
    "falcon-h1": Specimen(
        "FalconH1ForCausalLM", MAMBA_2 | {"mamba_d_ssm": 64}, "Mamba 2 beside attention"
    ),
    "bamba": Specimen("BambaForCausalLM", MAMBA_2 | {"attn_layer_indices": [1]}, "Mamba 2"),
    "nemotron-h": Specimen(
        "NemotronHForCausalLM",
        GROUPED
        | {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "n_groups": 2}
        | {"mamba_head_dim": 16, "ssm_state_size": 16, "conv_kernel": 4, "chunk_size": 8},
        "Mamba 2",
    ),
    "zamba2": Specimen(
        "Zamba2ForCausalLM",
        SHAPE
        | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]}
        | {"mamba_d_state": 16, "mamba_headdim": 16, "n_mamba_heads": 4, "mamba_ngroups": 2}
        | {"mamba_expand": 2, "chunk_size": 8, "num_mem_blocks": 1}
        | {"attention_head_dim": 16, "attention_hidden_size": 64},
        "Mamba 2, shared attention",
    ),
    "mamba2": Specimen(
        "Mamba2ForCausalLM",
        STATE_SPACE | {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
        "Mamba 2 only",
    ),
    "mamba": Specimen("MambaForCausalLM", STATE_SPACE, "Mamba only", quick=True),
    "falcon-mamba": Specimen("FalconMambaForCausalLM", STATE_SPACE, "Mamba only"),
    "jamba": Specimen(
        "JambaForCausalLM",
        GROUPED
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}
        | {"num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 4},
        "Mamba, mixture of experts",
        batch_invariant=False,
    ),
    "exaone-moe": Specimen(
        "ExaoneMoeForCausalLM",
        EXPERTS | LOCAL_GLOBAL | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        "mixture of experts, local and global layers",
    ),
    "solar-open": Specimen("SolarOpenForCausalLM", ROUTED, "mixture of experts"),
    "afmoe": Specimen(
        "AfmoeForCausalLM",
        EXPERTS | LOCAL_GLOBAL | {"num_dense_layers": 1, "n_group": 1, "topk_group": 1},
        "mixture of experts, local and global layers",
    ),
    "glm4-moe-lite": Specimen(
        "Glm4MoeLiteForCausalLM",
        LATENT | {"first_k_dense_replace": 1, "mlp_layer_types": ["dense", "sparse"]},
        "GLM 4.7 Flash: latent attention, mixture of experts",
    ),
    "youtu": Specimen("YoutuForCausalLM", LATENT, "latent attention"),
    "llama-linear-rope": Specimen(
        "LlamaForCausalLM", GROUPED | rope("linear", factor=2.0), "linear rope"
    ),
    "llama3-rope": Specimen(
        "LlamaForCausalLM",
        GROUPED | rope("llama3", factor=2.0, original_max_position_embeddings=64, **LLAMA3),
        "llama3 rope",
    ),
    "gemma3n-text": Specimen(
        "Gemma3nForCausalLM", GEMMA3N, "sparse activations, embeddings of layers, shared keys"
    ),
}

# A tower of any vision encoder; each reads what it knows of it
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 8,
}
QWEN_TOWER: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 8,
}


def wrapped(text: Settings, tower: Settings = TOWER, **others: Any) -> dict[str, Any]:
    """Settings of a wrapper around a text model; token 1 stands for an image."""
    tokens = {"image_token_id": 1, "image_token_index": 1}
    parts = {"text_config": text, "vision_config": tower, "tie_word_embeddings": False}
    return parts | tokens | others


def m_rope(*sections: int) -> dict[str, Any]:
    """Settings of rotary positions in time, height and width."""
    return rope("default", mrope_section=list(sections))


HALF_M_ROPE = rope("default", mrope_section=[2, 3, 3], partial_rotary_factor=0.5)
WRAPPED: Mapping[str, Specimen] = {
    "gemma3-vision": Specimen(
        "Gemma3ForConditionalGeneration",
        wrapped(
            GROUPED | LOCAL_GLOBAL | {"query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0},
            mm_tokens_per_image=4,
            tie_word_embeddings=True,
        ),
        "local and global layers",
        quick=True,
    ),
    "qwen3-vl": Specimen(
        "Qwen3VLForConditionalGeneration",
        wrapped(
            GROUPED | m_rope(3, 3, 2),
            QWEN_TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            video_token_id=1,
        ),
        "positions in time, height and width",
    ),
    "qwen3.5-vision": Specimen(
        "Qwen3_5ForConditionalGeneration",
        wrapped(
            DELTA_NET | m_rope(3, 3, 2),
            QWEN_TOWER | {"num_position_embeddings": 16},
            video_token_id=1,
        ),
        "gated delta nets",
    ),
    "qwen3.5-moe-vision": Specimen(
        "Qwen3_5MoeForConditionalGeneration",
        wrapped(
            EXPERTS | DELTA_NET | m_rope(3, 3, 2) | {"shared_expert_intermediate_size": 24},
            QWEN_TOWER | {"num_position_embeddings": 16},
            video_token_id=1,
        ),
        "gated delta nets, mixture of experts",
    ),
    "gemma4-vision": Specimen(
        "Gemma4ForConditionalGeneration",
        wrapped(GEMMA4, TOWER | {"model_type": "gemma4_vision", "head_dim": 16}, audio_config=None),
        "heads of different sizes, shared keys and values",
    ),
    "mistral3": Specimen(
        "Mistral3ForConditionalGeneration",
        wrapped(GROUPED | {"model_type": "ministral3"}, TOWER | {"model_type": "pixtral"}),
        "Ministral 3",
    ),
    "mistral3-mistral": Specimen(
        "Mistral3ForConditionalGeneration",
        wrapped(GROUPED | {"model_type": "mistral"}, TOWER | {"model_type": "pixtral"}),
        "Mistral Small 3",
    ),
    "qwen2-vl": Specimen(
        "Qwen2VLForConditionalGeneration", wrapped(GROUPED | m_rope(2, 3, 3), QWEN_TOWER)
    ),
    "qwen2-5-vl": Specimen(
        "Qwen2_5_VLForConditionalGeneration", wrapped(GROUPED | m_rope(2, 3, 3), QWEN_TOWER)
    ),
    "qwen3-vl-moe": Specimen(
        "Qwen3VLMoeForConditionalGeneration",
        wrapped(
            EXPERTS | m_rope(3, 3, 2),
            QWEN_TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        ),
        "mixture of experts",
    ),
    "smolvlm": Specimen(
        "SmolVLMForConditionalGeneration", wrapped(GROUPED | {"model_type": "llama"})
    ),
    "idefics3": Specimen(
        "Idefics3ForConditionalGeneration", wrapped(GROUPED | {"model_type": "llama"})
    ),
    "idefics2": Specimen(
        "Idefics2ForConditionalGeneration",
        wrapped(
            GROUPED | {"model_type": "mistral"},
            perceiver_config={"hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1}
            | {"resampler_n_heads": 2, "resampler_head_dim": 16, "num_key_value_heads": 1},
        ),
    ),
    "internvl": Specimen(
        "InternVLForConditionalGeneration",
        wrapped(
            GROUPED | {"model_type": "qwen3"},
            TOWER | {"model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [8, 8]},
        ),
    ),
    "llava": Specimen(
        "LlavaForConditionalGeneration",
        wrapped(GROUPED | {"model_type": "llama"}, TOWER | {"model_type": "clip_vision_model"}),
    ),
    "llava-next": Specimen(
        "LlavaNextForConditionalGeneration",
        wrapped(GROUPED | {"model_type": "mistral"}, TOWER | {"model_type": "clip_vision_model"}),
    ),
    "llava-onevision": Specimen(
        "LlavaOnevisionForConditionalGeneration",
        wrapped(GROUPED | {"model_type": "qwen2"}, TOWER | {"model_type": "siglip_vision_model"}),
    ),
    "llama4-vision": Specimen(
        "Llama4ForConditionalGeneration",
        wrapped(
            GROUPED
            | {"num_local_experts": 4, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2}
            | {"no_rope_layers": [1, 0], "attention_chunk_size": 128},
            TOWER
            | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        ),
        "texts of one chunk",
    ),
    "glm4v": Specimen(
        "Glm4vForConditionalGeneration",
        wrapped(GROUPED | {"head_dim": 32} | HALF_M_ROPE, QWEN_TOWER | {"image_size": 16}),
    ),
    "glm4-6v": Specimen(
        "Glm46VForConditionalGeneration",
        wrapped(
            GROUPED | {"head_dim": 32, "model_type": "glm4v_text"} | HALF_M_ROPE,
            QWEN_TOWER | {"image_size": 16, "model_type": "glm4v_vision"},
        ),
    ),
    "glm4v-moe": Specimen(
        "Glm4vMoeForConditionalGeneration",
        wrapped(ROUTED | {"head_dim": 32} | HALF_M_ROPE, QWEN_TOWER | {"image_size": 16}),
        "mixture of experts",
    ),
    "ernie4-5-vl": Specimen(
        "Ernie4_5_VLMoeForConditionalGeneration",
        wrapped(
            GROUPED
            | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [24, 24]}
            | {"moe_num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]}
            | m_rope(3, 3, 2),
            QWEN_TOWER,
        ),
        "mixture of experts",
    ),
    "gemma3n": Specimen(
        "Gemma3nForConditionalGeneration",
        wrapped(
            GEMMA3N,
            {"hidden_size": 32, "vocab_size": 8, "vocab_offset": 101},
            audio_config={"hidden_size": 32, "vocab_size": 8, "vocab_offset": 109},
        ),
    ),
    "aya-vision": Specimen(
        "AyaVisionForConditionalGeneration",
        wrapped(
            GROUPED | LOCAL_GLOBAL | {"model_type": "cohere2"},
            TOWER | {"model_type": "siglip_vision_model"},
        ),
    ),
    "paligemma": Specimen(
        "PaliGemmaForConditionalGeneration",
        wrapped(GROUPED | {"model_type": "gemma"}, TOWER | {"model_type": "siglip_vision_model"}),
    ),
    "kimi-k2-5": Specimen(
        "Kimi_K25ForConditionalGeneration",
        wrapped(
            SHAPE
            | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
            | {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1}
            | {"topk_group": 1, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
            | {"q_lora_rank": 16, "kv_lora_rank": 16, "model_type": "deepseek_v3"},
            TOWER,
        ),
        "latent attention, mixture of experts",
    ),
    "voxtral": Specimen(
        "VoxtralForConditionalGeneration",
        {
            "text_config": GROUPED | {"model_type": "llama"},
            "audio_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
            | {"intermediate_size": 48},
        },
        "sound",
    ),
}

FILL_MASK: Mapping[str, Specimen] = {
    "bert": Specimen("BertForMaskedLM", SHAPE, quick=True),
    "roberta": Specimen(
        "RobertaForMaskedLM", SHAPE | {"pad_token_id": 1, "bos_token_id": 0}, quick=True
    ),
    "albert": Specimen("AlbertForMaskedLM", SHAPE | {"embedding_size": 16}, quick=True),
    "distilbert": Specimen("DistilBertForMaskedLM", DISTILLED),
    "electra": Specimen("ElectraForMaskedLM", SHAPE | {"embedding_size": 16}),
    "xlm-roberta": Specimen(
        "XLMRobertaForMaskedLM", SHAPE | {"pad_token_id": 1, "bos_token_id": 0}
    ),
    "modernbert": Specimen("ModernBertForMaskedLM", MODERN, "local and global layers", quick=True),
    "ultrabert": Specimen("UltrabertForMaskedLM", ULTRA, "local and global layers"),
    "deberta-v2": Specimen("DebertaV2ForMaskedLM", DEBERTA_V2, "relative positions", quick=True),
    "mpnet": Specimen("MPNetForMaskedLM", ROBERTA, "relative positions"),
    "bert-pretraining": Specimen(
        "BertForPreTraining", SMALL, "`--task classify` for its next-sentence head"
    ),
    "mobilebert-pretraining": Specimen(
        "MobileBertForPreTraining",
        SHAPE | {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    ),
    "camembert": Specimen("CamembertForMaskedLM", ROBERTA),
    "xlm-roberta-xl": Specimen("XLMRobertaXLForMaskedLM", ROBERTA),
    "roberta-prelayernorm": Specimen("RobertaPreLayerNormForMaskedLM", ROBERTA),
    "data2vec-text": Specimen("Data2VecTextForMaskedLM", ROBERTA),
    "xmod": Specimen(
        "XmodForMaskedLM", ROBERTA | {"default_language": "en_XX"}, "one default language"
    ),
    "deberta": Specimen("DebertaForMaskedLM", DEBERTA, "relative positions"),
    "megatron-bert": Specimen("MegatronBertForMaskedLM", SHAPE),
    "squeezebert": Specimen(
        "SqueezeBertForMaskedLM",
        SHAPE
        | {"embedding_size": 32, "q_groups": 2, "k_groups": 2, "v_groups": 2}
        | {"intermediate_groups": 2, "output_groups": 2},
        batch_invariant=False,
    ),
    "mobilebert": Specimen(
        "MobileBertForMaskedLM",
        SHAPE | {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    ),
    "rembert": Specimen(
        "RemBertForMaskedLM",
        SHAPE | {"input_embedding_size": 16, "output_embedding_size": 24},
    ),
    "luke": Specimen(
        "LukeForMaskedLM",
        ROBERTA | {"entity_vocab_size": 7, "entity_emb_size": 8},
        "words, no entities",
    ),
    "ibert": Specimen("IBertForMaskedLM", ROBERTA, "not its integer mode"),
    "roformer": Specimen("RoFormerForMaskedLM", SHAPE | {"embedding_size": 32}),
    "convbert": Specimen(
        "ConvBertForMaskedLM",
        SHAPE | {"embedding_size": 16, "conv_kernel_size": 3, "num_groups": 1},
        batch_invariant=False,
    ),
    "xlm": Specimen("XLMWithLMHeadModel", XLM, "one language"),
    "flaubert": Specimen("FlaubertWithLMHeadModel", XLM),
    "ernie": Specimen("ErnieForMaskedLM", SHAPE),
    "esm": Specimen(
        "EsmForMaskedLM",
        SHAPE | {"mask_token_id": 4, "position_embedding_type": "rotary", "token_dropout": True},
    ),
    "nomic-bert": Specimen("NomicBertForMaskedLM", SHAPE | {"num_attention_heads": 2}),
    "eurobert": Specimen("EuroBertForMaskedLM", GROUPED),
    "gte": Specimen("GteForMaskedLM", SHAPE | {"num_attention_heads": 2}),
    "jina-embeddings-v3": Specimen(
        "JinaEmbeddingsV3ForMaskedLM", SHAPE | {"num_attention_heads": 2}
    ),
    "big-bird": Specimen(
        "BigBirdForMaskedLM", SHAPE | {"attention_type": "original_full"}, "full attention only"
    ),
    "layoutlm": Specimen("LayoutLMForMaskedLM", SHAPE, "text, no boxes"),
    "roc-bert": Specimen("RoCBertForMaskedLM", SHAPE),
    "tapas": Specimen("TapasForMaskedLM", SHAPE, "text, no tables"),
    "longformer": Specimen("LongformerForMaskedLM", LONGFORMER, "sliding window", quick=True),
    "longformer-windows": Specimen(
        "LongformerForMaskedLM",
        LONGFORMER | {"attention_window": [4, 8]},
        "a window for each layer",
    ),
}

CLASSIFY: Mapping[str, Specimen] = {
    "bert-classify": Specimen(
        "BertForSequenceClassification", SHAPE | {"id2label": LABELS}, quick=True
    ),
    "roberta-classify": Specimen("RobertaForSequenceClassification", SHAPE | {"pad_token_id": 1}),
    "modernbert-classify": Specimen(
        "ModernBertForSequenceClassification",
        MODERN | {"classifier_pooling": "mean"},
        quick=True,
    ),
    "distilbert-classify": Specimen(
        "DistilBertForSequenceClassification", DISTILLED | {"n_layers": 1}
    ),
    "albert-classify": Specimen("AlbertForSequenceClassification", SMALL | {"embedding_size": 16}),
    "electra-classify": Specimen(
        "ElectraForSequenceClassification", SMALL | {"embedding_size": 16}
    ),
    "deberta-v2-classify": Specimen(
        "DebertaV2ForSequenceClassification",
        DEBERTA_V2 | {"num_hidden_layers": 1, "problem_type": "multi_label_classification"},
    ),
    "bert-next-sentence": Specimen("BertForNextSentencePrediction", SMALL),
    "llama-classify": Specimen(
        "LlamaForSequenceClassification",
        SMALL | GROUPED | {"id2label": LABELS},
        "causal backbone",
        quick=True,
    ),
    "llama-reward": Specimen(
        "LlamaForSequenceClassification",
        SMALL | GROUPED | {"id2label": {0: "LABEL_0"}},
        "causal backbone",
    ),
    "longformer-classify": Specimen(
        "LongformerForSequenceClassification",
        LONGFORMER | {"id2label": LABELS},
        "sliding window, the first token global",
    ),
    "xlnet-classify": Specimen(
        "XLNetForSequenceClassification",
        XLNET | {"id2label": LABELS},
        "relative positions and segments",
    ),
    "xlnet-classify-mean": Specimen(
        "XLNetForSequenceClassification",
        XLNET | {"id2label": LABELS, "summary_type": "mean"},
        "also by the mean of the tokens",
    ),
    "qwen3-classify": Specimen(
        "Qwen3ForSequenceClassification", GROUPED | {"id2label": LABELS}, "causal backbone"
    ),
    "mistral-classify": Specimen(
        "MistralForSequenceClassification",
        GROUPED | {"sliding_window": 6, "id2label": LABELS},
        "causal backbone, sliding window",
    ),
    "gemma3-classify": Specimen(
        "Gemma3TextForSequenceClassification",
        GROUPED | LOCAL_GLOBAL | {"query_pre_attn_scalar": 24, "id2label": LABELS},
        "causal backbone, local and global layers",
    ),
    "gpt-oss-classify": Specimen(
        "GptOssForSequenceClassification",
        LOCAL_EXPERTS | LOCAL_GLOBAL | {"id2label": LABELS},
        "causal backbone, attention sinks, mixture of experts",
    ),
    "qwen2-classify": Specimen(
        "Qwen2ForSequenceClassification", GROUPED | {"id2label": LABELS}, "causal backbone"
    ),
    "gpt2-classify": Specimen(
        "GPT2ForSequenceClassification", GPT | {"id2label": LABELS}, "causal backbone"
    ),
    "opt-classify": Specimen(
        "OPTForSequenceClassification",
        SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": 32, "id2label": LABELS},
        "causal backbone",
    ),
    "gemma2-classify": Specimen(
        "Gemma2ForSequenceClassification",
        GROUPED | {"sliding_window": 6, "id2label": LABELS},
        "causal backbone, sliding window",
    ),
    "bloom-classify": Specimen(
        "BloomForSequenceClassification",
        BLOOM | {"id2label": LABELS},
        "causal backbone, ALiBi",
    ),
    "qwen3.5-classify": Specimen(
        "Qwen3_5TextForSequenceClassification", DELTA_NET | {"id2label": LABELS}, "gated delta nets"
    ),
    "jamba-classify": Specimen(
        "JambaForSequenceClassification",
        GROUPED
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}
        | {"num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "id2label": LABELS},
        "Mamba",
    ),
}

# Reads a text in its encoder and in its decoder
TWICE = BART | {"id2label": LABELS, "forced_eos_token_id": None}
CLASSIFY = {
    **CLASSIFY,
    "bart-classify": Specimen(
        "BartForSequenceClassification", TWICE, "the text in the encoder and decoder"
    ),
    "mbart-classify": Specimen("MBartForSequenceClassification", TWICE, "also in the decoder"),
    "plbart-classify": Specimen("PLBartForSequenceClassification", TWICE, "also in the decoder"),
    "t5-classify": Specimen(
        "T5ForSequenceClassification", T5 | {"id2label": LABELS}, "also in the decoder"
    ),
    "mt5-classify": Specimen(
        "MT5ForSequenceClassification", T5 | {"id2label": LABELS}, "also in the decoder"
    ),
    "umt5-classify": Specimen(
        "UMT5ForSequenceClassification", T5 | {"id2label": LABELS}, "also in the decoder"
    ),
}

TOKEN_CLASSIFY: Mapping[str, Specimen] = {
    "bert-token-classify": Specimen(
        "BertForTokenClassification", SMALL | {"id2label": TAGS}, quick=True
    ),
    "xlm-roberta-token-classify": Specimen(
        "XLMRobertaForTokenClassification",
        SMALL | {"pad_token_id": 1, "id2label": TAGS},
    ),
    "modernbert-token-classify": Specimen(
        "ModernBertForTokenClassification",
        MODERN | {"num_hidden_layers": 1, "id2label": TAGS},
    ),
    "deberta-v2-token-classify": Specimen(
        "DebertaV2ForTokenClassification",
        DEBERTA_V2 | {"num_hidden_layers": 1, "id2label": TAGS},
    ),
    "electra-detect": Specimen(
        "ElectraForPreTraining", SMALL | {"embedding_size": 16}, "replaced tokens"
    ),
    "roberta-token-classify": Specimen(
        "RobertaForTokenClassification", SMALL | {"pad_token_id": 1, "id2label": TAGS}
    ),
    "camembert-token-classify": Specimen(
        "CamembertForTokenClassification", ROBERTA | {"id2label": TAGS}
    ),
    "longformer-token-classify": Specimen(
        "LongformerForTokenClassification", LONGFORMER | {"id2label": TAGS}, "sliding window"
    ),
    "xlnet-token-classify": Specimen(
        "XLNetForTokenClassification",
        XLNET | {"id2label": TAGS, "clamp_len": 5},
        "relative positions and segments",
    ),
    "privacy-filter": Specimen(
        "OpenAIPrivacyFilterForTokenClassification",
        LOCAL_EXPERTS
        | {"sliding_window": 6, "id2label": TAGS, "num_hidden_layers": 1}
        | rope("default"),
        "sliding window both ways, attention sinks, mixture of experts",
        quick=True,
    ),
    "llama-token-classify": Specimen(
        "LlamaForTokenClassification", GROUPED | {"id2label": TAGS}, "causal backbone"
    ),
}

QUESTION_ANSWERING: Mapping[str, Specimen] = {
    "roberta-question-answering": Specimen(
        "RobertaForQuestionAnswering", SMALL | {"pad_token_id": 1}
    ),
    "distilbert-question-answering": Specimen(
        "DistilBertForQuestionAnswering", DISTILLED | {"n_layers": 1}
    ),
    "albert-question-answering": Specimen(
        "AlbertForQuestionAnswering", SMALL | {"embedding_size": 16}, quick=True
    ),
    "modernbert-question-answering": Specimen(
        "ModernBertForQuestionAnswering", MODERN | {"num_hidden_layers": 1}
    ),
    "longformer-question-answering": Specimen(
        "LongformerForQuestionAnswering",
        LONGFORMER,
        "sliding window, the question's tokens global",
    ),
    "xlnet-question-answering": Specimen(
        "XLNetForQuestionAnsweringSimple", XLNET, "relative positions and segments"
    ),
    "bert-question-answering": Specimen("BertForQuestionAnswering", SMALL),
    "deberta-v2-question-answering": Specimen(
        "DebertaV2ForQuestionAnswering", DEBERTA_V2, "relative positions"
    ),
    "xlm-roberta-question-answering": Specimen(
        "XLMRobertaForQuestionAnswering", SMALL | {"pad_token_id": 1}
    ),
    "llama-question-answering": Specimen("LlamaForQuestionAnswering", GROUPED, "causal backbone"),
}

MULTIPLE_CHOICE: Mapping[str, Specimen] = {
    "bert-multiple-choice": Specimen("BertForMultipleChoice", SMALL, quick=True),
    "roberta-multiple-choice": Specimen("RobertaForMultipleChoice", SMALL | {"pad_token_id": 1}),
    "albert-multiple-choice": Specimen("AlbertForMultipleChoice", SMALL | {"embedding_size": 16}),
    "deberta-v2-multiple-choice": Specimen(
        "DebertaV2ForMultipleChoice", DEBERTA_V2 | {"num_hidden_layers": 1}
    ),
    "distilbert-multiple-choice": Specimen(
        "DistilBertForMultipleChoice", DISTILLED | {"n_layers": 1}
    ),
    "electra-multiple-choice": Specimen("ElectraForMultipleChoice", SMALL | {"embedding_size": 16}),
    "modernbert-multiple-choice": Specimen(
        "ModernBertForMultipleChoice", MODERN | {"num_hidden_layers": 1}
    ),
    "longformer-multiple-choice": Specimen(
        "LongformerForMultipleChoice", LONGFORMER, "sliding window, the choice's tokens global"
    ),
    "mpnet-multiple-choice": Specimen("MPNetForMultipleChoice", ROBERTA, "relative positions"),
    "xlm-roberta-multiple-choice": Specimen(
        "XLMRobertaForMultipleChoice", SMALL | {"pad_token_id": 1}
    ),
    "xlnet-multiple-choice": Specimen(
        "XLNetForMultipleChoice", XLNET, "relative positions and segments"
    ),
}

EMBED: Mapping[str, Specimen] = {
    "bert-embed": Specimen("BertModel", SMALL, quick=True),
    "xlm-roberta-embed": Specimen("XLMRobertaModel", SMALL | {"pad_token_id": 1}),
    "modernbert-embed": Specimen("ModernBertModel", MODERN | {"num_hidden_layers": 1}, quick=True),
    "ultrabert-embed": Specimen("UltrabertModel", ULTRA, "local and global layers"),
    "mpnet-embed": Specimen("MPNetModel", ROBERTA, "relative positions"),
    "longformer-embed": Specimen("LongformerModel", LONGFORMER, "sliding window"),
    "xlnet-embed": Specimen("XLNetModel", XLNET, "relative positions and segments"),
    "qwen3-embed": Specimen("Qwen3Model", GROUPED, "causal backbone"),
    "qwen2-embed": Specimen("Qwen2Model", GROUPED, "causal backbone"),
    "qwen2-both-ways-embed": Specimen(
        "Qwen2Model", GROUPED | {"is_causal": False}, "`is_causal: false`"
    ),
    "mistral-embed": Specimen("MistralModel", GROUPED, "causal backbone"),
    "nomic-embed": Specimen("NomicBertModel", SHAPE | {"num_attention_heads": 2}),
    "gte-embed": Specimen("GteModel", SHAPE | {"num_attention_heads": 2}),
    "eurobert-embed": Specimen("EuroBertModel", GROUPED),
    "jina-v3-embed": Specimen("JinaEmbeddingsV3Model", SHAPE | {"num_attention_heads": 2}),
    "gemma3-embed": Specimen(
        "Gemma3TextModel",
        GROUPED | LOCAL_GLOBAL | {"query_pre_attn_scalar": 24, "use_bidirectional_attention": True},
        "`use_bidirectional_attention`",
    ),
    "embedding-gemma2-embed": Specimen(
        "EmbeddingGemma2TextModel",
        GROUPED
        | LOCAL_GLOBAL
        | {"global_head_dim": 32, "hidden_size_per_layer_input": 8, "embedding_dim": 24},
        "sliding window both ways, layers of different head sizes, a signal per layer",
    ),
    "t5-embed": Specimen(
        "T5EncoderModel",
        {"vocab_size": 101, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2}
        | {"num_heads": 2, "n_positions": 128, "pad_token_id": 0},
        "relative positions; the encoder alone",
    ),
    "qwen3.5-embed": Specimen("Qwen3_5TextModel", DELTA_NET, "gated delta nets"),
    "lfm2-embed": Specimen(
        "Lfm2Model", GROUPED | {"layer_types": ["conv", "full_attention"]}, "short convolutions"
    ),
}

# As T5's own checkpoints have them
TASK_PARAMS: dict[str, dict[str, Any]] = {
    "summarization": {
        "early_stopping": True,
        "length_penalty": 2.0,
        "max_length": 14,
        "min_length": 5,
        "no_repeat_ngram_size": 3,
        "num_beams": 4,
        "prefix": "summarize: ",
    },
    "translation_en_to_de": {"max_length": 9, "num_beams": 2, "prefix": "to German: "},
    "translation_en_to_fr": {"max_length": 9, "num_beams": 3, "prefix": "to French: "},
}
TEXT_TO_TEXT: Mapping[str, Specimen] = {
    "t5": Specimen(
        "T5ForConditionalGeneration",
        T5 | {"task_specific_params": TASK_PARAMS},
        "relative positions",
        quick=True,
    ),
    "t5-gated": Specimen(
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "T5 1.1 and FLAN-T5: gated feed-forward",
    ),
    "umt5": Specimen(
        "UMT5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu"},
        "relative positions in every layer",
    ),
    "mt5": Specimen("MT5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}),
    "bart": Specimen("BartForConditionalGeneration", BART | {"forced_bos_token_id": 2}, quick=True),
    "mbart": Specimen("MBartForConditionalGeneration", BART | {"scale_embedding": True}),
    "pegasus": Specimen("PegasusForConditionalGeneration", BART, "sinusoidal positions"),
    "marian": Specimen(
        "MarianMTModel",
        BART
        | {"pad_token_id": 100, "decoder_start_token_id": 100, "bad_words_ids": [[100]]}
        | {"share_encoder_decoder_embeddings": True},
        "sinusoidal positions; starts from the padding token",
    ),
    "m2m-100": Specimen("M2M100ForConditionalGeneration", BART, "M2M-100 and NLLB"),
    "plbart": Specimen("PLBartForConditionalGeneration", BART),
    "blenderbot": Specimen("BlenderbotForConditionalGeneration", BART),
    "blenderbot-small": Specimen("BlenderbotSmallForConditionalGeneration", BART),
}

ZOO: Mapping[str, Mapping[str, Specimen]] = {
    "generate": CAUSAL,
    "generate, the text part": WRAPPED,
    "generate, with an encoder": TEXT_TO_TEXT,
    "fill-mask": FILL_MASK,
    "classify": CLASSIFY,
    "token-classify": TOKEN_CLASSIFY,
    "question-answering": QUESTION_ANSWERING,
    "multiple-choice": MULTIPLE_CHOICE,
    "embed": EMBED,
}

# Checkpoints that are refused, and words of the sentence that says so
REFUSED: Mapping[str, tuple[Specimen, str]] = {
    "recurrent-gemma": (
        Specimen(
            "RecurrentGemmaForCausalLM",
            GROUPED | {"num_hidden_layers": 3, "attention_window_size": 8, "lru_width": 32},
        ),
        "which the exported graph cannot carry",
    ),
    "gpt-neox-japanese": (
        Specimen("GPTNeoXJapaneseForCausalLM", SHAPE),
        "cannot be given a KV cache",
    ),
    "xlnet": (Specimen("XLNetLMHeadModel", XLNET), "attends to later ones, so it cannot generate"),
    "xlnet-left": (Specimen("XLNetModel", XLNET | {"attn_type": "uni"}), "attn_type 'uni'"),
    "funnel": (
        Specimen(
            "FunnelForMaskedLM",
            {"vocab_size": 101, "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 48}
            | {"block_sizes": [1, 1], "num_decoder_layers": 1, "pad_token_id": 0},
        ),
        "pools neighboring tokens, padding among them",
    ),
    "bros": (Specimen("BrosForTokenClassification", SMALL), "cannot run on token ids alone"),
    "fnet": (Specimen("FNetForMaskedLM", SMALL), "disagree on a ragged batch"),
}
