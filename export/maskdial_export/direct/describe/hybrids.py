"""Families with recurrent layers beside attention."""

import math
from typing import Any

from maskdial_export.direct.config import Config
from maskdial_export.direct.decoder import Attends, Biases, Decoder, Names, Norms, Rotary
from maskdial_export.direct.describe.common import (
    FULL,
    decoder_of,
    multipliers,
    num_experts,
    read_experts,
    sparse_layers,
    unless_one,
    usual_head,
)
from maskdial_export.direct.describe.mixtures import granite_experts
from maskdial_export.direct.experts import Experts, Router, SharedExpert
from maskdial_export.direct.recurrent import DeltaNet, Mamba, ShortConvolution
from maskdial_export.direct.rotary import read_rotary

_LFM2 = Names(
    last_norm="model.embedding_norm",
    attention_output="self_attn.out_proj",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
)

_NOT_READ = (
    *("conv_dim", "conv_dim_out", "conv_use_xavier_init", "block_dim", "block_norm_eps"),
    *("block_mlp_init_scale", "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init"),
    *("use_pos_enc", "theta", "num_heads"),
)
"""Entries of the first LFM2's files that transformers does not read."""


def _kinds(config: Config, names: tuple[str, ...], default: list[str] | None) -> list[str]:
    """What each layer is.

    Raises:
        NotDirectError: there are layers of another kind.
    """
    kinds = config.take("layer_types", default)
    count = config.count("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != count or set(kinds) - {*names}:
        config.refuse("layer_types")
    return list(kinds)


def lfm2(config: Config, architecture: str, limit: int | None) -> Decoder:
    count = config.count("num_hidden_layers")
    attending = config.take("full_attn_idxs", list(range(count)))
    default = [FULL if index in attending else "conv" for index in range(count)]
    width = config.count("block_ff_dim", config.count("intermediate_size", 12288))
    multiple = config.count("block_multiple_of", 256)
    factor = config.real("block_ffn_dim_multiplier", 1.0)
    if config.flag("block_auto_adjust_ff_dim", True):
        width = int(factor * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    return _lfm2(config, architecture, limit, default, width=width)


def lfm2_moe(config: Config, architecture: str, limit: int | None) -> Decoder:
    dense, count = config.take("num_dense_layers", 2), config.count("num_hidden_layers")
    if type(dense) is not int:
        config.refuse("num_dense_layers")
    router = Router(
        scores="sigmoid",
        correction="expert_bias" if config.flag("use_expert_bias", True) else None,
        normalizes=config.flag("norm_topk_prob", True),
        least_sum=1e-6,
        factor=unless_one(config.real("routed_scaling_factor", 1.0)),
    )
    experts = read_experts(
        config,
        config.count("num_experts", 32),
        tuple(index >= dense for index in range(count)),
        width=config.count("moe_intermediate_size", 1792),
        router=router,
        module="feed_forward",
        graph_module="feed_forward",
        names=("w1", "w3", "w2"),
    )
    width = config.count("intermediate_size", 7168)
    return _lfm2(config, architecture, limit, None, width=width, experts=experts)


def _lfm2(
    config: Config, architecture: str, limit: int | None, default: list[str] | None, **more: Any
) -> Decoder:
    size = usual_head(config)
    attends = Attends(read_rotary(config, size, 1e6))
    convolves = ShortConvolution(config.count("conv_L_cache", 3), config.flag("conv_bias", False))
    kinds = _kinds(config, (FULL, "conv"), default)
    for key in _NOT_READ:
        config.take(key)
    return decoder_of(
        config,
        architecture,
        limit,
        tuple(attends if kind == FULL else convolves for kind in kinds),
        head_dim=size,
        tied=config.flag("tie_embedding", True),
        epsilon=config.real("norm_eps", 1e-5),
        names=_LFM2,
        norms=Norms(before_attention="operator_norm", before_mlp="ffn_norm"),
        head_norms="head",
        **more,
    )


def qwen3_5(config: Config, architecture: str, limit: int | None) -> Decoder:
    return _qwen(config, architecture, limit)


def qwen3_5_moe(config: Config, architecture: str, limit: int | None) -> Decoder:
    count = config.count("num_hidden_layers")
    config.take("intermediate_size")  # not read by this family
    experts = _qwen_experts(config, (True,) * count, Router(normalizes=True))
    return _qwen(config, architecture, limit, width=experts.width, experts=experts)


def qwen3_next(config: Config, architecture: str, limit: int | None) -> Decoder:
    sparse = sparse_layers(config, config.count("num_hidden_layers"))
    router = Router(normalizes=config.flag("norm_topk_prob", True))
    experts = _qwen_experts(config, sparse, router)
    return _qwen(config, architecture, limit, is_packed=True, experts=experts)


def _qwen_experts(config: Config, layers: tuple[bool, ...], router: Router) -> Experts:
    return read_experts(
        config,
        num_experts(config),
        layers,
        width=config.count("moe_intermediate_size", 512),
        router=router,
        shared=SharedExpert(config.count("shared_expert_intermediate_size", 512)),
    )


def _qwen(
    config: Config,
    architecture: str,
    limit: int | None,
    *,
    is_packed: bool = False,
    **more: Any,
) -> Decoder:
    """Gated delta nets, and every fourth layer attends, with a gate."""
    size = config.count("head_dim", 256)
    attends = Attends(read_rotary(config, size, partial=0.25))
    net = DeltaNet(
        key_heads=config.count("linear_num_key_heads", 16),
        value_heads=config.count("linear_num_value_heads", 32),
        key_size=config.count("linear_key_head_dim", 128),
        value_size=config.count("linear_value_head_dim", 128),
        taps=config.count("linear_conv_kernel_dim", 4),
        is_packed=is_packed,
    )
    if net.value_heads % net.key_heads:
        config.refuse("linear_num_value_heads")
    period, count = config.count("full_attention_interval", 4), config.count("num_hidden_layers")
    default = ["linear_attention" if (i + 1) % period else FULL for i in range(count)]
    kinds = _kinds(config, (FULL, "linear_attention"), default)
    attention = config.flag("attention_bias", False)
    if not config.flag("attn_output_gate", True):
        config.refuse("attn_output_gate")
    config.take("mamba_ssm_dtype")  # of states, which are float32 here
    for key in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        config.take(key)
    for key in ("use_sliding_window", "mlp_only_layers"):
        if config.take(key):
            config.refuse(key)
    return decoder_of(
        config,
        architecture,
        limit,
        tuple(attends if kind == FULL else net for kind in kinds),
        head_dim=size,
        head_norms="head",
        shifted=True,
        gated_attention=True,
        biases=Biases(attention, attention),
        further=("mtp.",),
        **more,
    )


def granite_hybrid(config: Config, architecture: str, limit: int | None) -> Decoder:
    size, count = usual_head(config), config.count("num_hidden_layers")
    rotation: Rotary | None = read_rotary(config, size)
    if config.one_of("position_embedding_type", ("rope", "nope"), "nope") == "nope":
        rotation = None
    experts = None
    if config.take("num_local_experts", 8):
        experts = granite_experts(config, beside=True)
    else:
        for key in ("num_experts_per_tok", "router_aux_loss_coef", "intermediate_size"):
            config.take(key)
    config.one_of("normalization_function", ("rmsnorm",), "rmsnorm")
    for key in ("init_method", "logits_to_keep"):  # of training, and of a call
        config.take(key)
    kinds = _kinds(config, ("attention", "mamba", FULL, "linear_attention"), ["mamba"] * count)
    inner = config.count("mamba_expand", 2) * config.count("hidden_size")
    attends, mamba = Attends(rotation), read_mamba(config, inner)
    attention = config.flag("attention_bias", False)
    return decoder_of(
        config,
        architecture,
        limit,
        tuple(attends if kind in ("attention", FULL) else mamba for kind in kinds),
        head_dim=size,
        width=config.count("shared_intermediate_size", 1024),
        packed_mlp=True,
        names=Names(gate_and_up="shared_mlp.input_linear", down="shared_mlp.output_linear"),
        biases=Biases(attention, attention),
        experts=experts,
        **multipliers(config),
    )


def read_mamba(config: Config, inner: int) -> Mamba:
    """``inner``: columns of all heads."""
    heads = config.count("mamba_n_heads", 128)
    if config.take("mamba_d_head", "auto") == "auto":
        size = inner // heads
    else:
        size = config.count("mamba_d_head")
    groups = config.count("mamba_n_groups", 1)
    if heads % groups:
        config.refuse("mamba_n_groups")
    config.take("mamba_chunk_size")
    return Mamba(
        module="mamba",
        heads=heads,
        head_size=size,
        groups=groups,
        state_size=config.count("mamba_d_state", 256),
        taps=config.count("mamba_d_conv", 4),
        has_conv_bias=config.flag("mamba_conv_bias", True),
        has_bias=config.flag("mamba_proj_bias", False),
        limits=read_limits(config),
        norm_groups=groups,
    )


def read_limits(config: Config) -> tuple[float, float]:
    """The least and the largest step; JSON has no infinity, so transformers writes an object."""
    infinite = {"__float__": "Infinity"}
    limits = config.take("time_step_limit", [0.0, infinite])
    if not isinstance(limits, list) or len(limits) != 2:
        config.refuse("time_step_limit")
    least, most = (math.inf if each == infinite else each for each in limits)
    if not all(isinstance(each, int | float) for each in (least, most)):
        config.refuse("time_step_limit")
    return float(least), float(most)
