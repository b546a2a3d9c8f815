"""Models with recurrent layers beside attention: Qwen3-Next, Qwen3.5, LFM2 and Granite 4."""

from collections.abc import Mapping

from maskdial_export.checkpoint.gguf.common import (
    DECODER,
    QK_NORMS,
    RMS,
    head_dim,
    read_pooling,
    read_rope,
    shared,
    width,
)
from maskdial_export.checkpoint.gguf.decoders import QWEN_EXPERTS
from maskdial_export.checkpoint.gguf.mambas import mamba_heads, mamba_names, mamba_vectors
from maskdial_export.checkpoint.gguf.model import Config, Model, PackedHeads, ValueHeads
from maskdial_export.checkpoint.gguf.settings import Settings
from maskdial_export.errors import ExportError

_QUERIES_AND_KEYS = 2
_SIGMOID = 2  # of how experts are chosen
_STEPS: Mapping[str, str] = {
    "blk.{}.ssm_a": "layers.{}.linear_attn.A_log",
    "blk.{}.ssm_dt.bias": "layers.{}.linear_attn.dt_bias",
}
_MAX_LAYERS = 2**10


def qwen35(settings: Settings) -> Model:
    """Qwen3.5: gated delta nets. A layer that predicts further tokens is left out."""
    config, names = _delta_net(settings, "qwen3_5_text")
    config["intermediate_size"] = width(settings)
    return _tiled("Qwen3_5ForCausalLM", config, names)


def qwen35_moe(settings: Settings) -> Model:
    """Qwen3.5 with experts."""
    config, names = _delta_net(settings, "qwen3_5_moe_text")
    config |= _experts(settings)
    settings.find(".feed_forward_length")  # of no layer
    return _tiled("Qwen3_5MoeForCausalLM", config, {**names, **QWEN_EXPERTS})


def qwen3_next(settings: Settings) -> Model:
    """Qwen3-Next: as Qwen3.5, with matrices that are packed by heads of keys."""
    if "blk.0.ssm_in.weight" in settings.file.tensors:
        raise ExportError(
            f"{settings.file.path} was written by an early converter of Qwen3-Next, which is not "
            "supported as GGUF; get a newer file, or export the checkpoint"
        )
    config, names = _delta_net(settings, "qwen3_next")
    config |= {"intermediate_size": settings.number(".feed_forward_length", 0) or 1}
    config |= {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}
    config |= _experts(settings)
    for key in ("blk.{}.attn_gate", "blk.{}.ssm_alpha", "blk.{}.ssm_beta"):
        del names[key]
    names["blk.{}.attn_qkv"] = "layers.{}.linear_attn.in_proj_qkvz"
    names["blk.{}.ssm_ba"] = "layers.{}.linear_attn.in_proj_ba"
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    return Model(
        "Qwen3NextForCausalLM",
        config,
        {**names, **QWEN_EXPERTS},
        shifted=True,
        squeezed=frozenset({"blk.{}.ssm_conv1d"}),
        parameters=_STEPS,
        packed_heads=PackedHeads(
            keys,
            config["linear_key_head_dim"],
            values // keys * config["linear_value_head_dim"],
        ),
    )


def _experts(settings: Settings) -> Config:
    return {
        "num_experts": settings.number(".expert_count"),
        "num_experts_per_tok": settings.number(".expert_used_count"),
        "moe_intermediate_size": settings.number(".expert_feed_forward_length"),
        "shared_expert_intermediate_size": settings.number(".expert_shared_feed_forward_length"),
    }


def _tiled(architecture: str, config: Config, names: Mapping[str, str]) -> Model:
    """A model of which llama.cpp's converter reorders the values."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    offset = _QUERIES_AND_KEYS * keys * config["linear_key_head_dim"]
    return Model(
        architecture,
        config,
        names,
        shifted=True,
        squeezed=frozenset({"blk.{}.ssm_conv1d"}),
        parameters=_STEPS,
        value_heads=ValueHeads(keys, values // keys, config["linear_value_head_dim"], offset),
    )


def _delta_net(settings: Settings, kind: str) -> tuple[Config, dict[str, str]]:
    """The configuration without the MLP, and the names of the weights."""
    num_layers = settings.number(".block_count") - settings.number(".nextn_predict_layers", 0)
    interval = max(settings.number(".full_attention_interval", 4), 1)
    size = head_dim(settings)
    keys = settings.number(".ssm.group_count")
    values = settings.number(".ssm.time_step_rank")
    key_size = settings.number(".ssm.state_size")
    if not (size and keys and values and values % keys == 0 and 0 < num_layers <= _MAX_LAYERS):
        raise ExportError(
            f"{settings.file.path} has {num_layers:,} layers of {keys:,} key heads and "
            f"{values:,} value heads of a linear attention, which cannot be"
        )
    value_size = settings.number(".ssm.inner_size") // values
    rope = read_rope(settings)
    rope["partial_rotary_factor"] = settings.number(".rope.dimension_count", size // 4) / size
    sections = settings.numbers(".rope.dimension_sections", 4)
    if sections:
        rope["mrope_section"] = [int(each) for each in sections if each]
        rope["mrope_interleaved"] = True
    config = shared(
        settings,
        model_type=kind,
        num_hidden_layers=num_layers,
        head_dim=size,
        rms_norm_eps=settings.real(RMS),
        linear_conv_kernel_dim=settings.number(".ssm.conv_kernel"),
        linear_key_head_dim=key_size,
        linear_num_key_heads=keys,
        linear_num_value_heads=values,
        linear_value_head_dim=value_size,
        layer_types=[
            "linear_attention" if (layer + 1) % interval else "full_attention"
            for layer in range(num_layers)
        ],
        rope_parameters=rope,
    )
    names = {
        **DECODER,
        **QK_NORMS,
        "blk.{}.post_attention_norm": "layers.{}.post_attention_layernorm",
        "blk.{}.attn_qkv": "layers.{}.linear_attn.in_proj_qkv",
        "blk.{}.attn_gate": "layers.{}.linear_attn.in_proj_z",
        "blk.{}.ssm_alpha": "layers.{}.linear_attn.in_proj_a",
        "blk.{}.ssm_beta": "layers.{}.linear_attn.in_proj_b",
        "blk.{}.ssm_conv1d": "layers.{}.linear_attn.conv1d",
        "blk.{}.ssm_norm": "layers.{}.linear_attn.norm",
        "blk.{}.ssm_out": "layers.{}.linear_attn.out_proj",
    }
    return config, names


def lfm2(settings: Settings) -> Model:
    """LFM2: short convolutions, in layers that have no heads of keys."""
    config, names = _short_convolutions(settings, "lfm2")
    config |= {"intermediate_size": width(settings), "block_auto_adjust_ff_dim": False}
    return Model("Lfm2ForCausalLM", config, names, squeezed=frozenset({"blk.{}.shortconv.conv"}))


def lfm2_moe(settings: Settings) -> Model:
    """LFM2 with experts."""
    config, names = _short_convolutions(settings, "lfm2_moe")
    config |= {
        "intermediate_size": width(settings),
        "moe_intermediate_size": settings.number(".expert_feed_forward_length"),
        "num_experts": settings.number(".expert_count"),
        "num_experts_per_tok": settings.number(".expert_used_count"),
        "num_dense_layers": settings.number(".leading_dense_block_count"),
        "use_expert_bias": True,
        "norm_topk_prob": True,
    }
    if settings.number(".expert_gating_func", _SIGMOID) != _SIGMOID:
        raise ExportError(
            f"{settings.file.path} chooses experts in a way that LFM2 does not, which is not "
            "supported as GGUF; export the checkpoint that it was made from"
        )
    names |= {
        "blk.{}.ffn_gate_inp": "layers.{}.feed_forward.gate",
        "blk.{}.ffn_gate_exps": "layers.{}.feed_forward.experts.*.w1",
        "blk.{}.ffn_down_exps": "layers.{}.feed_forward.experts.*.w2",
        "blk.{}.ffn_up_exps": "layers.{}.feed_forward.experts.*.w3",
    }
    return Model(
        "Lfm2MoeForCausalLM",
        config,
        names,
        squeezed=frozenset({"blk.{}.shortconv.conv"}),
        parameters={"blk.{}.exp_probs_b.bias": "layers.{}.feed_forward.expert_bias"},
    )


def granite_hybrid(settings: Settings) -> Model:
    """Granite 4: Mamba 2, in layers that have no heads of keys."""
    num_layers = settings.number(".block_count")
    heads = settings.numbers(".attention.head_count_kv", num_layers)
    if not heads or max(heads) < 1 or min(heads) > 0:
        raise ExportError(f"{settings.file.path} does not say which layers attend")
    experts = settings.number(".expert_count", 0)
    steps, size = mamba_heads(settings)
    inner, embedding = steps * size, settings.number(".embedding_length")
    if not embedding or inner % embedding:
        raise ExportError(f"{settings.file.path} has {steps} heads of {inner} columns in all")
    config = shared(
        settings,
        num_kv_heads=int(max(heads)),
        model_type="granitemoehybrid",
        intermediate_size=settings.number(".feed_forward_length", 0) or 1,
        shared_intermediate_size=settings.number(".expert_shared_feed_forward_length", 0)
        or width(settings),
        num_local_experts=experts,
        num_experts_per_tok=settings.number(".expert_used_count", 0),
        rms_norm_eps=settings.real(RMS),
        layer_types=["attention" if each else "mamba" for each in heads],
        position_embedding_type=(
            "rope" if settings.flag(".rope.scaling.finetuned", False) else "nope"
        ),
        rope_parameters=read_rope(settings),
        mamba_n_heads=steps,
        mamba_d_head=size,
        mamba_expand=inner // embedding,
        mamba_n_groups=settings.number(".ssm.group_count"),
        mamba_d_state=settings.number(".ssm.state_size"),
        mamba_d_conv=settings.number(".ssm.conv_kernel"),
        attention_multiplier=settings.real(".attention.scale", head_dim(settings) ** -0.5),
        embedding_multiplier=settings.real(".embedding_scale", 1.0),
        residual_multiplier=settings.real(".residual_scale", 1.0),
        logits_scaling=settings.real(".logit_scale", 1.0),
    )
    gate, up, down = (
        f"blk.{{}}.ffn_{name}{'_shexp' if experts else ''}" for name in ("gate", "up", "down")
    )
    names = {key: name for key, name in DECODER.items() if "ffn_" not in key or "norm" in key} | {
        gate: "layers.{}.shared_mlp.input_linear",
        down: "layers.{}.shared_mlp.output_linear",
        "blk.{}.ffn_gate_inp": "layers.{}.block_sparse_moe.router.layer",
        "blk.{}.ffn_gate_exps": "layers.{}.block_sparse_moe.experts.*.gate_proj",
        "blk.{}.ffn_up_exps": "layers.{}.block_sparse_moe.experts.*.up_proj",
        "blk.{}.ffn_down_exps": "layers.{}.block_sparse_moe.experts.*.down_proj",
        **mamba_names("mamba"),
    }
    return Model(
        "GraniteMoeHybridForCausalLM",
        config,
        names,
        permuted=True,
        squeezed=frozenset({"blk.{}.ssm_conv1d"}),
        parameters=mamba_vectors("mamba"),
        joined={gate: (up,)},
        traceable=not experts,
    )


def _short_convolutions(settings: Settings, kind: str) -> tuple[Config, dict[str, str]]:
    """The configuration without the MLP, and the names of the weights."""
    num_layers = settings.number(".block_count")
    heads = settings.numbers(".attention.head_count_kv", num_layers)
    if not heads or max(heads) < 1:
        raise ExportError(f"{settings.file.path} does not say which layers attend")
    config = shared(
        settings,
        num_kv_heads=int(max(heads)),
        model_type=kind,
        norm_eps=settings.real(RMS),
        conv_L_cache=settings.number(".shortconv.l_cache"),
        conv_bias="blk.0.shortconv.in_proj.bias" in settings.file.tensors,
        layer_types=["full_attention" if each else "conv" for each in heads],
        rope_parameters=read_rope(settings),
    )
    names = {
        "token_embd": "embed_tokens",
        "token_embd_norm": "embedding_norm",
        "output": "lm_head",
        "blk.{}.attn_norm": "layers.{}.operator_norm",
        "blk.{}.attn_q": "layers.{}.self_attn.q_proj",
        "blk.{}.attn_k": "layers.{}.self_attn.k_proj",
        "blk.{}.attn_v": "layers.{}.self_attn.v_proj",
        "blk.{}.attn_output": "layers.{}.self_attn.out_proj",
        "blk.{}.attn_q_norm": "layers.{}.self_attn.q_layernorm",
        "blk.{}.attn_k_norm": "layers.{}.self_attn.k_layernorm",
        "blk.{}.ffn_norm": "layers.{}.ffn_norm",
        "blk.{}.ffn_gate": "layers.{}.feed_forward.w1",
        "blk.{}.ffn_up": "layers.{}.feed_forward.w3",
        "blk.{}.ffn_down": "layers.{}.feed_forward.w2",
        "blk.{}.shortconv.in_proj": "layers.{}.conv.in_proj",
        "blk.{}.shortconv.out_proj": "layers.{}.conv.out_proj",
        "blk.{}.shortconv.conv": "layers.{}.conv.conv",
    }
    if read_pooling(settings) is not None:
        raise ExportError(
            f"{settings.file.path} is an LFM2 of embeddings, which is not supported as GGUF; "
            "export the checkpoint that it was made from"
        )
    return config, names
