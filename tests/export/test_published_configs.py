"""What config.json of published checkpoints says beside the shapes.

The entries were written down without the files at hand; the shapes are small.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from maskdial_export.checkpoint.own_code import own_code
from maskdial_export.direct import encoders
from maskdial_export.direct.decoder import NotDirectError
from maskdial_export.direct.families import read_decoder

_DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0",
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
    "initializer_range": 0.02,
    "attention_probs_dropout_prob": 0.1,
    "hidden_dropout_prob": 0.1,
    "position_embedding_type": "absolute",
}
_FACTORS = {"type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8}
_GENERATES: dict[str, Any] = {  # as older versions of transformers wrote it
    "bad_words_ids": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "length_penalty": 1.0,
    "max_length": 20,
    "num_beams": 1,
    "pruned_heads": {},
    "task_specific_params": None,
    "temperature": 1.0,
    "top_k": 50,
    "typical_p": 1.0,
}
_DEEPSEEK: dict[str, Any] = {
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "hidden_act": "silu",
    "kv_lora_rank": 32,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 32,
        "type": "yarn",
    },
    "seq_aux": True,
    "tie_word_embeddings": False,
    "v_head_dim": 16,
}
_DECODERS: dict[str, dict[str, Any]] = {
    "Phi-3.5-mini-instruct": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "attention_bias": False,
        "embd_pdrop": 0.0,
        "hidden_act": "silu",
        "original_max_position_embeddings": 128,
        "pad_token_id": 5,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-5,
        "rope_scaling": _FACTORS,
        "sliding_window": 262144,
        "tie_word_embeddings": False,
    },
    "Phi-4-mini-instruct": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "attention_bias": False,
        "embd_pdrop": 0.0,
        "full_attn_mod": 1,
        "hidden_act": "silu",
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "mlp_bias": False,
        "original_max_position_embeddings": 128,
        "pad_token_id": 5,
        "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {**_FACTORS, "long_factor": [1.0] * 24, "short_factor": [1.0] * 24},
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
    },
    "DeepSeek-R1-Distill-Qwen-1.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "max_window_layers": 21,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "unsloth/Llama-3.2-1B-Instruct": {
        "_attn_implementation_autoset": True,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "hidden_act": "silu",
        "mlp_bias": False,
        "pad_token_id": 5,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "unsloth_fixed": True,
        "unsloth_version": "2025.1.5",
    },
    "a fine-tuned Mistral 7B": {
        **_GENERATES,
        "_model_name_or_path": "as transformers names what it restored from GGUF",
        "_name_or_path": "mistralai/Mistral-7B-v0.1",
        "unk_token_id": 0,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
    "DeepSeek-V2-Lite-Chat": {
        **_DEEPSEEK,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "n_group": 1,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
    },
    "DeepSeek-R1, in 16 bits": {
        **_DEEPSEEK,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "n_group": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 32,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 2,
        "topk_method": "noaux_tc",
    },
    "GLM-4.7-Flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "kv_lora_rank": 32,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 5,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "routed_scaling_factor": 1.8,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 64,
    },
    "MiniCPM3-4B": {
        "architectures": ["MiniCPM3ForCausalLM"],
        "model_type": "minicpm3",
        "attention_bias": False,
        "dim_model_base": 32,
        "hidden_act": "silu",
        "kv_lora_rank": 32,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {**_FACTORS, "original_max_position_embeddings": 512},
        "scale_depth": 1.4,
        "scale_emb": 12,
    },
    "gemma-2-2b-it": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "attention_bias": False,
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * 4,
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0],
        "pad_token_id": 5,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "starcoder2-3b": {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "activation_function": "gelu",
        "attention_softmax_in_fp32": True,
        "embedding_dropout": 0.1,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_epsilon": 1e-5,
        "mlp_type": "default",
        "norm_epsilon": 1e-5,
        "norm_type": "layer_norm",
        "residual_dropout": 0.1,
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
        "sliding_window": 4096,
        "use_bias": True,
    },
}
_ENCODERS: dict[str, dict[str, Any]] = {
    "bert-base-multilingual-uncased-sentiment": {
        "_num_labels": 2,
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "directionality": "bidi",
        "finetuning_task": "sentiment-analysis",
        "id2label": {"0": "1 star", "1": "2 stars"},
        "label2id": {"1 star": 0, "2 stars": 1},
        "output_past": True,
        "pooler_fc_size": 768,
        "pooler_num_attention_heads": 12,
        "pooler_num_fc_layers": 3,
        "pooler_size_per_head": 128,
        "pooler_type": "first_token_transform",
    },
    "ms-marco-MiniLM-L6-v2": {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "gradient_checkpointing": False,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
    },
    "deberta-v3-base-prompt-injection-v2": {
        "architectures": ["DebertaV2ForSequenceClassification"],
        "model_type": "deberta-v2",
        "id2label": {"0": "SAFE", "1": "INJECTION"},
        "label2id": {"SAFE": 0, "INJECTION": 1},
        "legacy": True,
        "max_relative_positions": -1,
        "norm_rel_ebd": "layer_norm",
        "pooler_dropout": 0,
        "pooler_hidden_act": "gelu",
        "pooler_hidden_size": 64,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "position_buckets": 256,
        "problem_type": "single_label_classification",
        "relative_attention": True,
        "share_att_key": True,
        "type_vocab_size": 0,
    },
}


@pytest.mark.parametrize("name", _DECODERS)
def test_a_decoder_is_known(name: str) -> None:
    assert read_decoder(name, {**_DECODER, **_DECODERS[name]}).hidden_size == 64


@pytest.mark.parametrize("name", _ENCODERS)
def test_an_encoder_is_known(name: str) -> None:
    values = {**_ENCODER, **_ENCODERS[name]}
    assert encoders.read_encoder(values, sends_types=None, limit=None).hidden_size == 64


@pytest.mark.parametrize(
    ("name", "entry", "value"),
    [
        ("Phi-4-mini-instruct", "full_attn_mod", 2),
        ("Phi-4-mini-instruct", "attention_bias", True),
        ("DeepSeek-R1-Distill-Qwen-1.5B", "use_mrope", True),
        ("gemma-2-2b-it", "hidden_act", "relu"),
        # transformers 5 masks both ways then
        ("unsloth/Llama-3.2-1B-Instruct", "is_causal", None),
        ("starcoder2-3b", "norm_type", "rms_norm"),
        ("a fine-tuned Mistral 7B", "top_k", 10),
        ("SmolLM3-3B", "foo_scaling", 2.0),
        # transformers passes it over, and DeepSeek's own code does not
        ("DeepSeek-V2-Lite-Chat", "norm_topk_prob", True),
        ("DeepSeek-V2-Lite-Chat", "num_key_value_heads", 2),
        ("DeepSeek-R1, in 16 bits", "n_group", 3),
        ("DeepSeek-R1, in 16 bits", "scoring_func", "softmax"),
        ("GLM-4.7-Flash", "first_k_dense_replace", 2),
        ("MiniCPM3-4B", "v_head_dim", 64),
    ],
)
def test_what_else_they_say_is_refused(name: str, entry: str, value: object) -> None:
    with pytest.raises(NotDirectError, match=f"{entry} .* is not known to the direct path"):
        read_decoder(name, {**_DECODER, **_DECODERS[name], entry: value})


def _maps(model_type: str, name: str) -> dict[str, Any]:
    return {"model_type": model_type, "auto_map": {"AutoModelForCausalLM": name}}


def test_code_that_transformers_has_taken_over(tmp_path: Path) -> None:
    """Phi's own class is transformers'; the class of gte-Qwen2 has the name of Qwen2's, and reads
    in both directions."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    for name in ("modeling_phi3.Phi3ForCausalLM", "org/Phi-4--modeling_phi3.Phi3ForCausalLM"):
        assert own_code("m", tmp_path, _maps("phi3", name)) is None
    for other in (
        _maps("phi3", "modeling_other.Phi3ForCausalLM"),
        _maps("qwen2", "modeling_qwen.Qwen2ForCausalLM"),
        _maps("llama", "modeling_phi3.Phi3ForCausalLM"),
        {"model_type": "phi3", "auto_map": "modeling_other.Phi3ForCausalLM"},
        {"model_type": "phi3", "auto_map": 1},
    ):
        assert "brings code of its own" in str(own_code("m", tmp_path, other))
