"""Families of Mamba 2 beside attention: Nemotron-H, Falcon-H1, Bamba."""

import math
from collections.abc import Sequence
from dataclasses import replace

from maskdial_export.direct.config import Config
from maskdial_export.direct.decoder import (
    Attends,
    Beside,
    Biases,
    Decoder,
    Feeds,
    Layer,
    Multipliers,
    Names,
    Norms,
)
from maskdial_export.direct.describe.common import (
    decoder_of,
    read_experts,
    unless_one,
    usual_head,
)
from maskdial_export.direct.describe.hybrids import read_mamba
from maskdial_export.direct.describe.latent import corrected
from maskdial_export.direct.experts import Experts, SharedExpert
from maskdial_export.direct.recurrent import Mamba
from maskdial_export.direct.rotary import read_rotary

_MLP = {"gate": "feed_forward.gate_proj", "up": "feed_forward.up_proj"}
_FED = Names(last_norm="model.final_layernorm", down="feed_forward.down_proj", **_MLP)
_FED_NORMS = Norms(before_mlp="pre_ff_layernorm")
_MIXER = Names(
    table="model.embeddings",
    last_norm="model.norm_f",
    attention="mixer",
    attention_output="mixer.o_proj",
    up="mixer.up_proj",
    down="mixer.down_proj",
)
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
_NOT_READ = (
    *("expand", "chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "hidden_dropout"),
    *("num_logits_to_keep", "residual_in_fp32", "rescale_prenorm_residual", "time_step_floor"),
    *("time_step_limit", "time_step_max", "time_step_rank", "num_query_groups", "rms_norm_eps"),
    *("attention_head_dim", "rope_theta", "partial_rotary_factor", "moe_shared_expert_overlap"),
    *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    *("num_hidden_layers", "norm_eps"),
)
"""Entries of Nemotron-H's files that transformers does not read, or that are of training."""


def nemotron_h(config: Config, architecture: str, limit: int | None) -> Decoder:
    """Layers that mix tokens or have an MLP. Steps in time have transformers' lower bound."""
    kinds = _mixers(config)
    config.expect(mamba_hidden_act="silu", mlp_hidden_act="relu2", mamba_proj_bias=False)
    for key in ("sliding_window", "moe_latent_size"):
        if config.take(key) is not None:
            config.refuse(key)
    for key in _NOT_READ:
        config.take(key)
    bias, groups = config.flag("use_bias", False), config.count("n_groups", 8)
    mamba = Mamba(
        module="mixer",
        heads=config.count("mamba_num_heads", 128),
        head_size=config.count("mamba_head_dim", 64),
        groups=groups,
        state_size=config.count("ssm_state_size", 128),
        taps=config.count("conv_kernel", 4),
        has_conv_bias=config.flag("use_conv_bias", True),
        has_bias=bias,
        limits=(config.real("time_step_min", 0.001), math.inf),
        norm_groups=groups,
    )
    if mamba.heads % groups:
        config.refuse("n_groups")
    layers: dict[str, Layer] = {"mamba": mamba, "attention": Attends(None)}
    config.expect(attention_bias=False)
    return decoder_of(
        config,
        architecture,
        limit,
        tuple(layers.get(kind, Feeds()) for kind in kinds),
        head_dim=config.count("head_dim", 128),
        width=config.count("intermediate_size", 21504),
        epsilon=config.real("layer_norm_epsilon", 1e-5),
        activation="relu2",
        names=_MIXER,
        norms=Norms(before_attention="norm", before_mlp=None),
        alternates=True,
        gated=False,
        biases=Biases(mlp=config.flag("mlp_bias", False)),
        experts=_experts(config, [kind == "moe" for kind in kinds]),
        stored_base="backbone",
        further=("mtp.",),
    )


def _mixers(config: Config) -> list[str]:
    """What each layer is: of a list, or a letter each."""
    key = "layers_block_type" if "layers_block_type" in config else "hybrid_override_pattern"
    stated = config.take(key)
    config.take("hybrid_override_pattern")
    if isinstance(stated, str):
        stated = [_LETTERS.get(letter) for letter in stated]
    if not isinstance(stated, list) or not stated:
        config.refuse(key)
    kinds = [_KINDS.get(str(kind), str(kind)) for kind in stated]
    if {*kinds} - {*_LETTERS.values()}:
        config.refuse(key)
    return kinds


def _experts(config: Config, layers: Sequence[bool]) -> Experts | None:
    if not any(layers):  # configurations have them all the same
        for key in (
            *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group"),
            *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "topk_group"),
            *("norm_topk_prob", "routed_scaling_factor"),
        ):
            config.take(key)
        return None
    if config.flag("mlp_bias", False):
        config.refuse("mlp_bias")
    config.expect(n_shared_experts=1)
    return read_experts(
        config,
        config.count("n_routed_experts"),
        tuple(layers),
        width=config.count("moe_intermediate_size"),
        router=corrected(config),
        module="mixer",
        graph_module="mixer",
        shared=SharedExpert(
            config.count("moe_shared_expert_intermediate_size"), "shared_experts", None
        ),
        is_gated=False,
        activation="relu2",
    )


def falcon_h1(config: Config, architecture: str, limit: int | None) -> Decoder:
    """Mamba 2 beside attention in each layer, with multipliers of nearly everything."""
    size = usual_head(config)
    inner = config.count("mamba_expand", 2) * config.count("hidden_size")
    if config.stated("mamba_d_ssm", 1024) is not None:
        inner = config.count("mamba_d_ssm", 1024)
    mamba = read_mamba(config, inner)
    if mamba.width != inner:
        config.refuse("mamba_d_head")
    if config.flag("projectors_bias", False) != mamba.has_bias:  # of the last product
        config.refuse("projectors_bias")
    has_norm, before = (
        config.flag(f"mamba_{name}", default)
        for name, default in (("rms_norm", False), ("norm_before_gate", True))
    )
    if has_norm and before:
        config.refuse("mamba_norm_before_gate")
    for key in ("num_logits_to_keep", "mamba_use_mlp", "mlp_expansion_factor"):
        config.take(key)
    attention, mlp = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    gate, down = _multipliers(config, "mlp_multipliers", 2)
    mamba = replace(
        mamba,
        norm_groups=mamba.groups if has_norm else None,
        norm_is_written=False,
        scale_in=_multiplier(config, "ssm_in_multiplier"),
        scales=_multipliers(config, "ssm_multipliers", 5),
        scale_out=_multiplier(config, "ssm_out_multiplier"),
    )
    of_keys = _multiplier(config, "key_multiplier")
    kind = Beside(Attends(read_rotary(config, size)), mamba)
    return decoder_of(
        config,
        architecture,
        limit,
        (kind,) * config.count("num_hidden_layers"),
        head_dim=size,
        names=_FED,
        norms=_FED_NORMS,
        biases=Biases(attention, attention, mlp),
        apart=of_keys is not None,
        embedding_scale=_multiplier(config, "embedding_multiplier"),
        logits_factor=_multiplier(config, "lm_head_multiplier"),
        multipliers=Multipliers(
            attention_in=_multiplier(config, "attention_in_multiplier"),
            key=of_keys,
            attention_out=_multiplier(config, "attention_out_multiplier"),
            gate=unless_one(gate),
            mlp_out=unless_one(down),
        ),
    )


def _multiplier(config: Config, key: str) -> float | None:
    return unless_one(config.real(key, 1.0))


def _multipliers(config: Config, key: str, count: int) -> tuple[float, ...]:
    found = config.take(key, [1.0] * count)
    numbers = isinstance(found, list) and all(type(each) in (int, float) for each in found)
    if not numbers or len(found) != count or not all(map(math.isfinite, found)):
        config.refuse(key)
    return tuple(float(each) for each in found)


def bamba(config: Config, architecture: str, limit: int | None) -> Decoder:
    size, count = usual_head(config), config.count("num_hidden_layers")
    attending = config.take("attn_layer_indices", [])
    if not isinstance(attending, list) or {*attending} - {*range(count)}:
        config.refuse("attn_layer_indices")
    inner = config.count("mamba_expand", 2) * config.count("hidden_size")
    attends, mamba = Attends(read_rotary(config, size, partial=0.5)), read_mamba(config, inner)
    for key in ("z_loss_coefficient", "num_logits_to_keep"):  # of training, and of a call
        config.take(key)
    attention, mlp = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    return decoder_of(
        config,
        architecture,
        limit,
        tuple(attends if index in attending else mamba for index in range(count)),
        head_dim=size,
        names=_FED,
        norms=_FED_NORMS,
        biases=Biases(attention, attention, mlp),
    )
