"""Encoders whose code stands on the Hub and not in transformers: their config.json, as it is
published, in the words of the family that computes the same.

That code is never run. What it computes is described from what others found in it: vLLM's
``bert_with_rope.py``, text-embeddings-inference's ``gte.rs``, ``nomic.rs`` and ``jina.rs``.
"""

from collections.abc import Callable, Mapping
from typing import Any

from maskdial_export.direct.config import Config

Values = Mapping[str, Any]

_GATED = {"swiglu": "silu", "geglu": "gelu"}
NEOBERT_CLASSES = {"NeoBERT": "NeoBERTModel", "NeoBERTLMHead": "NeoBERTForMaskedLM"}
"""Their names as transformers would have them."""
_JINA_CODE = "jinaai/jina-bert-v2-qk-post-norm"
# Nomic's, in the words of GPT-2
_NOMIC = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "layer_norm_epsilon": "layer_norm_eps",
}
# Of training and of how it is computed, not of what
_NOMIC_SILENT = (
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "moe_resid_pdrop", "use_flash_attn"),
    *("fused_bias_fc", "fused_dropout_add_ln", "use_xentropy", "dense_seq_output", "moe_impl"),
    *("last_layer_subset", "pad_vocab_size_multiple", "router_aux_loss_coef", "ffn_div"),
    *("reorder_and_upcast_attn", "max_position_embeddings", "expert_dropout"),
)
_NOMIC_USUAL: Mapping[str, Any] = {
    "add_pooling_layer": False,
    "causal": False,
    "expert_choice_router": False,
    "moe_normalize_expert_weights": False,
    "num_shared_experts": 0,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "use_rms_norm": False,
}


def kind_of(values: Values) -> str:
    """The family that computes what a configuration describes: mostly its ``model_type``."""
    kind = str(values.get("model_type"))
    if kind == "bert" and values.get("position_embedding_type") == "alibi":
        return "jina_bert"
    return kind


def without_code(values: Values) -> dict[str, Any]:
    """A configuration without the code that it names; of Jina's two kinds it says which one."""
    found = dict(values)
    code = str(found.pop("auto_map", None))
    if kind_of(values) == "jina_bert" and _JINA_CODE in code:
        found["_name_or_path"] = _JINA_CODE
    return found


def translated(values: Values) -> Values:
    """The configuration in the words of its family; most are as they are.

    Raises:
        NotDirectError: an entry is not known.
    """
    translate = _TRANSLATIONS.get(kind_of(values))
    return values if translate is None else translate(values)


def _new(values: Values) -> Values:
    """gte v1.5's, whose fixed NTK scaling by s turns as base times s, each angle divided by
    ``s ** (2 / head_dim)`` (https://kexue.fm/archives/9706)."""
    config, found = Config(values), dict(values)
    config.expect(
        layer_norm_type="layer_norm",
        logn_attention_clip1=False,
        logn_attention_scale=False,
        pack_qkv=True,
        position_embedding_type="rope",
    )
    for key in (
        *("layer_norm_type", "logn_attention_clip1", "logn_attention_scale", "pack_qkv"),
        *("position_embedding_type", "unpad_inputs", "use_memory_efficient_attention"),
    ):
        found.pop(key, None)
    scaling = config.part("rope_scaling")
    if scaling is not None:
        scaling.one_of("type", ("ntk",), "ntk")
        factor, theta = scaling.real("factor"), config.real("rope_theta", 10_000.0)
        scaling.finish()
        if factor < 1:  # their code turns as if there were none
            config.refuse("rope_scaling")
        size = config.count("hidden_size") / config.count("num_attention_heads")
        found["rope_theta"] = theta * factor
        found["rope_scaling"] = {"type": "linear", "factor": factor ** (2 / size)}
    return found


def _nomic(values: Values) -> Values:
    """Nomic's in the words of GPT-2; the same in transformers' words is as it is.

    Positions beyond those of the training would turn by other angles, so texts end there.
    """
    if "n_embd" not in values:
        return values
    config = Config(values)
    config.expect(**_NOMIC_USUAL)
    if config.take("rotary_emb_scale_base") is not None:
        config.refuse("rotary_emb_scale_base")
    silent = {*_NOMIC, *_NOMIC_USUAL, *_NOMIC_SILENT, "rotary_emb_scale_base"}
    found = {key: value for key, value in values.items() if key not in silent}
    found |= {ours: values[theirs] for theirs, ours in _NOMIC.items() if theirs in values}
    kinds = (*_GATED, "gelu")
    activation = config.one_of("activation_function", kinds, "gelu")
    found["hidden_act"] = _GATED.get(activation, activation)
    found["gated"] = activation in _GATED
    positions = config.count("n_positions")
    found["max_position_embeddings"] = min(positions, config.count("max_trained_positions", 2048))
    biases = {config.flag(f"{name}_bias", True) for name in ("qkv_proj", "mlp_fc1", "mlp_fc2")}
    if len(biases) > 1:
        config.refuse("qkv_proj_bias")
    found["attention_bias"] = biases.pop()
    found["rope_theta"] = config.real("rotary_emb_base", 10_000.0)
    if config.part("rope_parameters") is not None:  # transformers 5 adds its own
        found["rope_parameters"] = {"rope_theta": found.pop("rope_theta")}
    for key in (
        *("activation_function", "n_positions", "max_trained_positions", "rotary_emb_base"),
        *("rotary_scaling_factor", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"),
    ):
        found.pop(key, None)
    return found


def _jina(values: Values) -> Values:
    """jina-embeddings-v2's, whose pooling sentence-transformers' modules repeat."""
    config, found = Config(values), dict(values)
    config.one_of("feed_forward_type", ("geglu",), "geglu")
    config.one_of("hidden_act", ("gelu",), "gelu")
    found["qk_norms"] = values.get("_name_or_path") == _JINA_CODE
    for key in (
        *("attn_implementation", "emb_pooler", "feed_forward_type", "model_max_length"),
        "position_embedding_type",
    ):
        found.pop(key, None)
    return found


def _neobert(values: Values) -> Values:
    """NeoBERT's in the words of a decoder that reads ahead; its MLP has two thirds of the width."""
    config = Config(values)
    silent = (
        *("classifier_init_range", "decoder_init_range", "dim_head", "embedding_init_range"),
        *("kwargs", "max_length", "norm_eps", "pretrained_model_name_or_path"),
        *("trust_remote_code", "encoder_init_range"),
    )
    found = {key: value for key, value in values.items() if key not in silent}
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if hidden % heads or config.count("dim_head", hidden // heads) != hidden // heads:
        config.refuse("dim_head")
    width = 2 * config.count("intermediate_size") // 3
    return found | {
        "intermediate_size": -(-width // 8) * 8,
        "rms_norm_eps": config.real("norm_eps", 1e-6),
        "max_position_embeddings": config.count("max_length", 1024),
        "is_causal": False,
    }


def _eurobert(values: Values) -> Values:
    """EuroBERT's, which says nothing of the direction: it is a Llama that reads both ways."""
    silent = ("hidden_dropout", "mask_token", "pad_token")
    found = {key: value for key, value in values.items() if key not in silent}
    if values.get("architectures") != ["EuroBertForSequenceClassification"]:
        found.pop("clf_pooling", None)
    return {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, **found, "is_causal": False}


_TRANSLATIONS: Mapping[str, Callable[[Values], Values]] = {
    "eurobert": _eurobert,
    "jina_bert": _jina,
    "neobert": _neobert,
    "new": _new,
    "nomic_bert": _nomic,
}
