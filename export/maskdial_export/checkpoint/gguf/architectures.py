"""The models that GGUF files hold: transformers' configuration, from the metadata.

llama.cpp's converter and its own reading of the metadata (``src/models``) are the source of both
the keys and the defaults; transformers' tables lack the rope scaling, the widths of experts, the
caps and scales of Gemma, and all encoders.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from maskdial_export.checkpoint.gguf.model import Config, Model
from maskdial_export.checkpoint.gguf.settings import Settings
from maskdial_export.checkpoint.gguf.weights import read_values
from maskdial_export.errors import ExportError

_RMS, _NORM = ".attention.layer_norm_rms_epsilon", ".attention.layer_norm_epsilon"
_MEAN, _CLS, _LAST, _RANK = 1, 2, 3, 4  # pooling types
_POOLINGS = {_MEAN: "mean_tokens", _CLS: "cls_token", _LAST: "lasttoken"}
# Parameters of llama3 scaling that models were trained with: low and high frequency, positions
_LLAMA3 = [
    (low, high, positions)
    for positions in (8192, 4096, 2048, 16384, 32768)
    for low, high in ((1.0, 4.0), (1.0, 2.0), (1.0, 8.0), (1.0, 32.0))
]

# Layers of nearly all decoders: name in the file -> name in transformers
_DECODER: Mapping[str, str] = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "layers.{}.input_layernorm",
    "blk.{}.attn_q": "layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "layers.{}.mlp.down_proj",
}
_QK_NORMS: Mapping[str, str] = {
    "blk.{}.attn_q_norm": "layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "layers.{}.self_attn.k_norm",
}
_GEMMA_NORMS: Mapping[str, str] = {
    "blk.{}.post_attention_norm": "layers.{}.post_attention_layernorm",
    "blk.{}.ffn_norm": "layers.{}.pre_feedforward_layernorm",
    "blk.{}.post_ffw_norm": "layers.{}.post_feedforward_layernorm",
}
_QWEN_EXPERTS: Mapping[str, str] = {
    "blk.{}.ffn_gate_inp": "layers.{}.mlp.gate",
    "blk.{}.ffn_gate_exps": "layers.{}.mlp.experts.*.gate_proj",
    "blk.{}.ffn_up_exps": "layers.{}.mlp.experts.*.up_proj",
    "blk.{}.ffn_down_exps": "layers.{}.mlp.experts.*.down_proj",
    "blk.{}.ffn_gate_inp_shexp": "layers.{}.mlp.shared_expert_gate",
    "blk.{}.ffn_gate_shexp": "layers.{}.mlp.shared_expert.gate_proj",
    "blk.{}.ffn_up_shexp": "layers.{}.mlp.shared_expert.up_proj",
    "blk.{}.ffn_down_shexp": "layers.{}.mlp.shared_expert.down_proj",
}


def read_model(settings: Settings) -> Model:
    """Describes the model of a file.

    Raises:
        ExportError: the architecture or one of its settings is not supported, or settings are
            missing.
    """
    read = _READERS.get(settings.architecture)
    if read is None:
        raise ExportError(
            f"{settings.file.path} has the architecture {settings.architecture!r}, which is not "
            f"supported as GGUF (these are: {', '.join(sorted(_READERS))}); export the checkpoint "
            "that it was made from"
        )
    return read(settings)


def _shared(settings: Settings, **config: Any) -> Config:
    """The entries that nearly all models have."""
    tokens = settings.file.tensors.get("token_embd.weight")
    if tokens is None or len(tokens.shape) != 2:
        raise ExportError(f"{settings.file.path} has no matrix token_embd.weight")
    heads = settings.number(".attention.head_count")
    if heads == 0:
        raise ExportError(f"the attention of {settings.file.path} has no heads")
    shared: Config = {
        "vocab_size": tokens.shape[0],
        "hidden_size": settings.number(".embedding_length"),
        "num_hidden_layers": settings.number(".block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.number(".attention.head_count_kv", heads),
        "max_position_embeddings": settings.number(".context_length"),
        "tie_word_embeddings": "output.weight" not in settings.file.tensors,
    }
    for role in ("bos", "eos", "pad"):
        key = f"tokenizer.ggml.{'padding' if role == 'pad' else role}_token_id"
        index = settings.find(key)
        inside = type(index) is int and 0 <= index < tokens.shape[0]
        shared[f"{role}_token_id"] = index if inside else None
    return shared | config


def _width(settings: Settings) -> int:
    return settings.number(".feed_forward_length")


def _head_dim(settings: Settings) -> int:
    heads = settings.number(".attention.head_count")
    return settings.number(".attention.key_length", settings.number(".embedding_length") // heads)


def _rope(settings: Settings, theta: float = 10_000.0) -> Config:
    """The settings of rotary positions, with their scaling."""
    rope: Config = {
        "rope_type": "default",
        "rope_theta": settings.real(".rope.freq_base", theta),
    }
    kind = settings.text(".rope.scaling.type", "none")
    factor = settings.real(".rope.scaling.factor", settings.real(".rope.scale_linear", 1.0))
    if kind == "none" and settings.find(".rope.scale_linear") is not None:
        kind = "linear"
    if kind == "linear" and factor not in (0.0, 1.0):
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": settings.number(
                ".rope.scaling.original_context_length"
            ),
        }
        for theirs, ours in (
            ("attention_factor", ".rope.scaling.yarn_attn_factor"),
            ("beta_fast", ".rope.scaling.yarn_beta_fast"),
            ("beta_slow", ".rope.scaling.yarn_beta_slow"),
        ):
            if settings.find(ours) is not None:
                rope[theirs] = settings.real(ours)
    elif kind == "longrope":
        rope |= _longrope(settings)
    elif kind not in ("none", "linear"):
        raise ExportError(
            f"the positions of {settings.file.path} are scaled by {kind!r}, which is not supported"
        )
    if "rope_freqs.weight" in settings.file.tensors:
        rope |= _llama3(settings, rope["rope_theta"])
    return rope


def _factors(settings: Settings, name: str) -> list[float]:
    tensor = settings.file.tensors.get(name)
    if tensor is None:
        raise ExportError(f"{settings.file.path} has no tensor {name}")
    return [float(each) for each in read_values(tensor).flatten()]


def _longrope(settings: Settings) -> Config:
    positions = settings.number(".rope.scaling.original_context_length")
    rope: Config = {
        "rope_type": "longrope",
        "short_factor": _factors(settings, "rope_factors_short.weight"),
        "long_factor": _factors(settings, "rope_factors_long.weight"),
        "original_max_position_embeddings": positions,
        "factor": settings.number(".context_length") / max(positions, 1),
    }
    if settings.find(".rope.scaling.attn_factor") is not None:
        rope["attention_factor"] = settings.real(".rope.scaling.attn_factor")
    return rope


def _llama3(settings: Settings, theta: float) -> Config:
    """The scaling of Llama 3, of which the file has only the divisors of the frequencies."""
    found = np.array(_factors(settings, "rope_freqs.weight"), np.float32)
    if np.all(found == 1):
        return {}
    size = 2 * len(found)
    wavelengths = 2 * np.pi * theta ** (np.arange(0, size, 2) / size)
    factor = float(found.max())
    for low, high, positions in _LLAMA3:
        smooth = np.clip((positions / wavelengths - low) / (high - low), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if np.allclose(expected, found, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": positions,
            }
    raise ExportError(
        f"rope_freqs.weight of {settings.file.path} divides frequencies in a way that is not "
        "that of Llama 3, which is not supported"
    )


def _embedding(settings: Settings, model: str) -> tuple[str, str, str | None]:
    """The class, the prefix of its names, and how it pools: a decoder may be one of embeddings."""
    pooling = settings.number(".pooling_type", 0)
    if pooling == 0:
        return f"{model}ForCausalLM", "model.", None
    return f"{model}Model", "", _pooling(settings)


def _pooling(settings: Settings) -> str | None:
    kind = settings.number(".pooling_type", 0)
    if kind == _RANK or any(name.startswith("cls.") for name in settings.file.tensors):
        raise ExportError(
            f"{settings.file.path} is a reranker or classifier, which are not supported as GGUF; "
            "export the checkpoint that it was made from"
        )
    if kind not in (0, *_POOLINGS):
        raise ExportError(f"{settings.file.path} pools in the way {kind}, which does not exist")
    return _POOLINGS.get(kind)


def _llama(settings: Settings) -> Model:
    head_dim = settings.number(".rope.dimension_count", _head_dim(settings))
    config = _shared(
        settings,
        intermediate_size=_width(settings),
        head_dim=head_dim,
        rms_norm_eps=settings.real(_RMS),
        rope_parameters=_rope(settings),
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
        return Model("MixtralForCausalLM", config, {**_DECODER, **names}, permuted=True)
    tensors = settings.file.tensors
    config |= {
        "model_type": "llama",
        "attention_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    architecture, prefix, pooling = _embedding(settings, "Llama")
    return Model(
        architecture,
        config,
        _DECODER,
        prefix,
        permuted=True,
        pooling=pooling,
    )


def _qwen2(settings: Settings) -> Model:
    config = _shared(
        settings,
        model_type="qwen2",
        intermediate_size=_width(settings),
        rms_norm_eps=settings.real(_RMS),
        rope_parameters=_rope(settings),
    )
    architecture, prefix, pooling = _embedding(settings, "Qwen2")
    return Model(architecture, config, _DECODER, prefix, pooling=pooling)


def _qwen3(settings: Settings) -> Model:
    config = _shared(
        settings,
        model_type="qwen3",
        intermediate_size=_width(settings),
        head_dim=_head_dim(settings),
        rms_norm_eps=settings.real(_RMS),
        rope_parameters=_rope(settings),
    )
    architecture, prefix, pooling = _embedding(settings, "Qwen3")
    return Model(architecture, config, {**_DECODER, **_QK_NORMS}, prefix, pooling=pooling)


def _qwen_experts(settings: Settings, kind: str, **config: Any) -> Config:
    dense = [
        layer
        for layer in range(min(settings.number(".block_count"), 2**16))
        if f"blk.{layer}.ffn_gate.weight" in settings.file.tensors
    ]
    return _shared(
        settings,
        model_type=kind,
        intermediate_size=_width(settings),
        rms_norm_eps=settings.real(_RMS),
        rope_parameters=_rope(settings),
        num_experts=settings.number(".expert_count"),
        num_experts_per_tok=settings.number(".expert_used_count"),
        mlp_only_layers=dense,
        decoder_sparse_step=1,
        **config,
    )


def _qwen2_moe(settings: Settings) -> Model:
    width = settings.number(".expert_shared_feed_forward_length", _width(settings))
    config = _qwen_experts(
        settings,
        "qwen2_moe",
        moe_intermediate_size=settings.number(".expert_feed_forward_length", 0)
        or _width(settings) // max(settings.number(".expert_used_count"), 1),
        shared_expert_intermediate_size=width,
        norm_topk_prob=False,
    )
    return Model("Qwen2MoeForCausalLM", config, {**_DECODER, **_QWEN_EXPERTS})


def _qwen3_moe(settings: Settings) -> Model:
    config = _qwen_experts(
        settings,
        "qwen3_moe",
        moe_intermediate_size=settings.number(".expert_feed_forward_length"),
        head_dim=_head_dim(settings),
        norm_topk_prob=True,
    )
    names = {**_DECODER, **_QK_NORMS, **_QWEN_EXPERTS}
    return Model("Qwen3MoeForCausalLM", config, names)


def _phi3(settings: Settings) -> Model:
    head_dim = settings.number(".embedding_length") // settings.number(".attention.head_count")
    rope = _rope(settings)
    if "rope_factors_long.weight" in settings.file.tensors:
        rope |= _longrope(settings)
        del rope["factor"]  # of positions, which Phi-3 computes itself
    partial = settings.number(".rope.dimension_count", head_dim) / max(head_dim, 1)
    positions = settings.number(".context_length")
    config = _shared(
        settings,
        model_type="phi3",
        intermediate_size=_width(settings),
        rms_norm_eps=settings.real(_RMS),
        rope_parameters=rope | {"partial_rotary_factor": partial},
        original_max_position_embeddings=settings.number(
            ".rope.scaling.original_context_length", positions
        ),
        sliding_window=settings.number(".attention.sliding_window", 0) or None,
    )
    names = {
        **_DECODER,
        "blk.{}.attn_qkv": "layers.{}.self_attn.qkv_proj",
        "blk.{}.ffn_up": "layers.{}.mlp.gate_up_proj",
    }
    return Model("Phi3ForCausalLM", config, names)


def _gemma(settings: Settings) -> Model:
    config = _shared(
        settings,
        model_type="gemma",
        intermediate_size=_width(settings),
        head_dim=_head_dim(settings),
        rms_norm_eps=settings.real(_RMS),
        rope_parameters=_rope(settings),
    )
    return Model("GemmaForCausalLM", config, _DECODER, shifted=True)


def _query_scale(settings: Settings, layers_of_27b: int) -> int:
    """By whose root queries are divided: the width of a head, but for the 27B models."""
    if settings.number(".block_count") == layers_of_27b:
        return settings.number(".embedding_length") // settings.number(".attention.head_count")
    return _head_dim(settings)


def _gemma2(settings: Settings) -> Model:
    config = _shared(
        settings,
        model_type="gemma2",
        intermediate_size=_width(settings),
        head_dim=_head_dim(settings),
        rms_norm_eps=settings.real(_RMS),
        rope_parameters=_rope(settings),
        query_pre_attn_scalar=_query_scale(settings, 46),
        sliding_window=settings.number(".attention.sliding_window", 4096),
        attn_logit_softcapping=settings.real(".attn_logit_softcapping", 50.0),
        final_logit_softcapping=settings.real(".final_logit_softcapping", 30.0),
    )
    return Model("Gemma2ForCausalLM", config, {**_DECODER, **_GEMMA_NORMS}, shifted=True)


def _gemma3(settings: Settings, **config: Any) -> Model:
    num_layers = min(settings.number(".block_count"), 2**16)
    window = settings.number(".attention.sliding_window", 0)
    pattern = _pattern(settings, num_layers, 6) if window else [False] * num_layers
    local = {
        "rope_type": "default",
        "rope_theta": settings.real(".rope.freq_base_swa", 10_000.0),
    }
    config = _shared(
        settings,
        model_type="gemma3_text",
        intermediate_size=_width(settings),
        head_dim=_head_dim(settings),
        rms_norm_eps=settings.real(_RMS),
        rope_parameters={
            "full_attention": _rope(settings, 1_000_000.0),
            "sliding_attention": local,
        },
        query_pre_attn_scalar=_query_scale(settings, 62),
        sliding_window=window or 4096,
        layer_types=["sliding_attention" if each else "full_attention" for each in pattern],
        final_logit_softcapping=settings.real(".final_logit_softcapping", 0.0) or None,
        **config,
    )
    names = {**_DECODER, **_QK_NORMS, **_GEMMA_NORMS}
    return Model("Gemma3ForCausalLM", config, names, shifted=True)


def _pattern(settings: Settings, num_layers: int, period: int) -> list[bool]:
    """Whether each layer attends within the window; of a period, the last one does not."""
    given = settings.find(".attention.sliding_window_pattern")
    if isinstance(given, np.ndarray) and len(given) == num_layers:
        return [bool(each) for each in given]
    period = settings.number(".attention.sliding_window_pattern", period)
    return [bool(period) and (layer + 1) % period != 0 for layer in range(num_layers)]


def _embedding_gemma(settings: Settings) -> Model:
    causal = _gemma3(settings, use_bidirectional_attention=True)
    return Model(
        "Gemma3TextModel",
        causal.config,
        causal.names,
        prefix="",
        shifted=True,
        pooling=_pooling(settings) or "mean_tokens",
    )


def _starcoder2(settings: Settings) -> Model:
    config = _shared(
        settings,
        model_type="starcoder2",
        intermediate_size=_width(settings),
        norm_epsilon=settings.real(_NORM),
        rope_parameters=_rope(settings),
        sliding_window=None,
        use_bias="blk.0.attn_q.bias" in settings.file.tensors
        or "blk.0.attn_qkv.bias" in settings.file.tensors,
    )
    names = {
        **_DECODER,
        "blk.{}.ffn_up": "layers.{}.mlp.c_fc",
        "blk.{}.ffn_down": "layers.{}.mlp.c_proj",
    }
    return Model("Starcoder2ForCausalLM", config, names)


def _gpt2(settings: Settings) -> Model:
    shared = _shared(settings)
    config = {
        "model_type": "gpt2",
        "vocab_size": shared["vocab_size"],
        "n_embd": shared["hidden_size"],
        "n_layer": shared["num_hidden_layers"],
        "n_head": shared["num_attention_heads"],
        "n_positions": shared["max_position_embeddings"],
        "n_inner": _width(settings),
        "layer_norm_epsilon": settings.real(_NORM),
        "bos_token_id": shared["bos_token_id"],
        "eos_token_id": shared["eos_token_id"],
        "tie_word_embeddings": shared["tie_word_embeddings"],
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


_BERT: Mapping[str, str] = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "blk.{}.attn_q": "encoder.layer.{}.attention.self.query",
    "blk.{}.attn_k": "encoder.layer.{}.attention.self.key",
    "blk.{}.attn_v": "encoder.layer.{}.attention.self.value",
    "blk.{}.attn_output": "encoder.layer.{}.attention.output.dense",
    "blk.{}.attn_output_norm": "encoder.layer.{}.attention.output.LayerNorm",
    "blk.{}.ffn_up": "encoder.layer.{}.intermediate.dense",
    "blk.{}.ffn_down": "encoder.layer.{}.output.dense",
    "blk.{}.layer_output_norm": "encoder.layer.{}.output.LayerNorm",
}


def _bert(settings: Settings) -> Model:
    """BERT by its WordPiece tokenizer; otherwise RoBERTa or XLM-RoBERTa, whose positions from the
    padding token's id on are all that the file has."""
    types = settings.file.tensors.get("token_types.weight")
    if types is None:
        raise ExportError(
            f"{settings.file.path} is a DistilBERT (it has no token_types.weight), which is not "
            "supported as GGUF; export the checkpoint that it was made from"
        )
    config = _shared(
        settings,
        intermediate_size=_width(settings),
        layer_norm_eps=settings.real(_NORM),
        hidden_act="gelu",
        type_vocab_size=types.shape[0],
    )
    del config["num_key_value_heads"], config["tie_word_embeddings"]
    kind = settings.text("tokenizer.ggml.model")
    pooling = _pooling(settings)
    if kind == "bert":
        config |= {"model_type": "bert"}
        return Model("BertModel", config, _BERT, prefix="", pooling=pooling)
    padding = settings.number("tokenizer.ggml.padding_token_id", 1)
    config |= {
        "model_type": "xlm-roberta" if kind == "t5" else "roberta",
        "pad_token_id": padding,
    }
    config["max_position_embeddings"] += padding + 1
    architecture = "XLMRobertaModel" if kind == "t5" else "RobertaModel"
    return Model(architecture, config, _BERT, prefix="", padding=padding + 1, pooling=pooling)


def _nomic_bert(settings: Settings) -> Model:
    types = settings.file.tensors.get("token_types.weight")
    config = _shared(
        settings,
        model_type="nomic_bert",
        intermediate_size=_width(settings),
        layer_norm_eps=settings.real(_NORM),
        hidden_act="silu",
        type_vocab_size=2 if types is None else types.shape[0],
        rope_parameters=_rope(settings),
    )
    del config["num_key_value_heads"], config["tie_word_embeddings"]
    names = {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "emb_ln",
        "blk.{}.attn_qkv": "encoder.layers.{}.attn.Wqkv",
        "blk.{}.attn_output": "encoder.layers.{}.attn.out_proj",
        "blk.{}.attn_output_norm": "encoder.layers.{}.norm1",
        "blk.{}.ffn_up": "encoder.layers.{}.mlp.fc11",
        "blk.{}.ffn_gate": "encoder.layers.{}.mlp.fc12",
        "blk.{}.ffn_down": "encoder.layers.{}.mlp.fc2",
        "blk.{}.layer_output_norm": "encoder.layers.{}.norm2",
    }
    return Model("NomicBertModel", config, names, prefix="", pooling=_pooling(settings))


def _modernbert(settings: Settings) -> Model:
    num_layers = min(settings.number(".block_count"), 2**16)
    period = settings.number(".attention.sliding_window_pattern", 3) or 1
    theta = settings.real(".rope.freq_base", 160_000.0)
    config = _shared(
        settings,
        model_type="modernbert",
        intermediate_size=_width(settings),
        norm_eps=settings.real(_NORM if settings.find(_RMS) is None else _RMS),
        hidden_activation=settings.text(".hidden_activation", "gelu"),
        local_attention=settings.number(".attention.sliding_window", 128),
        layer_types=[
            "sliding_attention" if layer % period else "full_attention"
            for layer in range(num_layers)
        ],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": theta},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": settings.real(".rope.freq_base_swa", 10_000.0),
            },
        },
    )
    del config["num_key_value_heads"], config["tie_word_embeddings"]
    names = {
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        "output_norm": "final_norm",
        "blk.{}.attn_norm": "layers.{}.attn_norm",
        "blk.{}.attn_qkv": "layers.{}.attn.Wqkv",
        "blk.{}.attn_output": "layers.{}.attn.Wo",
        "blk.{}.ffn_norm": "layers.{}.mlp_norm",
        "blk.{}.ffn_up": "layers.{}.mlp.Wi",
        "blk.{}.ffn_down": "layers.{}.mlp.Wo",
    }
    return Model("ModernBertModel", config, names, prefix="", pooling=_pooling(settings))


def _eurobert(settings: Settings) -> Model:
    config = _shared(
        settings,
        model_type="eurobert",
        intermediate_size=_width(settings),
        head_dim=_head_dim(settings),
        rms_norm_eps=settings.real(_RMS),
        rope_parameters=_rope(settings),
    )
    return Model("EuroBertModel", config, _DECODER, prefix="", pooling=_pooling(settings))


_READERS: Mapping[str, Callable[[Settings], Model]] = {
    "bert": _bert,
    "eurobert": _eurobert,
    "gemma": _gemma,
    "gemma-embedding": _embedding_gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "llama": _llama,
    "modern-bert": _modernbert,
    "nomic-bert": _nomic_bert,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "starcoder2": _starcoder2,
}
