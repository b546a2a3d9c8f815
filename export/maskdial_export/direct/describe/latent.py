"""Families with latent attention: DeepSeek 2 and 3, GLM-4.7-Flash, MiniCPM 3, Youtu."""

import math
from typing import Any, Literal

from maskdial_export.direct.config import Config
from maskdial_export.direct.decoder import Attends, Biases, Decoder
from maskdial_export.direct.describe.common import decoder_of, read_experts, unless_one
from maskdial_export.direct.experts import Experts, Groups, Router, SharedExpert
from maskdial_export.direct.latent import Latent
from maskdial_export.direct.rotary import read_rotary

_LEAST_SUM = 1e-20


def deepseek_v2(config: Config, architecture: str, limit: int | None) -> Decoder:
    config.expect(scoring_func="softmax", norm_topk_prob=False, mlp_bias=False)
    method = config.one_of("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    groups = None
    if method == "greedy":  # reads no groups
        for key in ("n_group", "topk_group"):
            config.take(key)
    else:
        groups = _groups(config, best=1, otherwise=0.0)
    router = Router(factor=_factor(config), groups=groups, is_sorted=False)
    experts = _experts(config, router, _sparse_from(config))
    return _decoder(config, architecture, limit, "neighbors", experts=experts)


def deepseek_v3(config: Config, architecture: str, limit: int | None) -> Decoder:
    experts = _experts(config, corrected(config), _sparse_from(config))
    return _decoder(config, architecture, limit, _pairs(config), experts=experts)


def glm4_moe_lite(config: Config, architecture: str, limit: int | None) -> Decoder:
    count = config.count("num_hidden_layers")
    kinds = config.take("mlp_layer_types", ["dense"] + ["sparse"] * (count - 1))
    if not isinstance(kinds, list) or len(kinds) != count or {*kinds} - {"dense", "sparse"}:
        config.refuse("mlp_layer_types")
    sparse = tuple(kind == "sparse" for kind in kinds)
    config.expect(first_k_dense_replace=count - sum(sparse))
    experts = _experts(config, corrected(config), sparse)
    return _decoder(config, architecture, limit, _pairs(config), experts=experts)


def youtu(config: Config, architecture: str, limit: int | None) -> Decoder:
    """Youtu. The row of the padding stays what it is, of which transformers makes zeros."""
    config.take("embedding_initializer_range")
    return _decoder(config, architecture, limit, _pairs(config), tied=True)


def minicpm3(config: Config, architecture: str, limit: int | None) -> Decoder:
    width, count = config.count("hidden_size"), config.count("num_hidden_layers")
    config.expect(mlp_bias=False)
    depth, base = math.sqrt(count), width
    if config.stated("scale_depth", 1.4) is not None:
        depth = config.real("scale_depth", 1.4)
    if config.stated("dim_model_base", 256) is not None:
        base = config.count("dim_model_base", 256)
    return _decoder(
        config,
        architecture,
        limit,
        "halves",
        value_size=config.count("v_head_dim", width // config.count("num_attention_heads")),
        tied=True,
        embedding_scale=config.real("scale_emb", 12.0),
        residual_scale=depth / math.sqrt(count),
        hidden_divisor=width / base,
    )


def _decoder(
    config: Config,
    architecture: str,
    limit: int | None,
    pairs: Literal["neighbors", "apart", "halves"],
    *,
    value_size: int | None = None,
    **more: Any,
) -> Decoder:
    """``value_size``: None for what the configuration says."""
    heads, count = config.count("num_attention_heads"), config.count("num_hidden_layers")
    rank = config.stated("q_lora_rank", 0)
    latent = Latent(
        query_rank=None if rank is None else config.count("q_lora_rank"),
        rank=config.count("kv_lora_rank"),
        still=config.count("qk_nope_head_dim"),
        turning=config.count("qk_rope_head_dim"),
        value_size=value_size or config.count("v_head_dim"),
        has_bias=config.flag("attention_bias", False),
        pairs=pairs,
    )
    config.expect(head_dim=latent.turning, qk_head_dim=latent.key_size)
    config.expect(num_key_value_heads=heads)
    if latent.value_size > latent.key_size:  # the cache has heads of one size
        config.refuse("v_head_dim")
    for key in ("num_mtp_layers", "num_nextn_predict_layers", "ep_size"):
        config.take(key)
    return decoder_of(
        config,
        architecture,
        limit,
        (Attends(read_rotary(config, latent.turning)),) * count,
        head_dim=latent.key_size,
        attention_scale=latent.key_size**-0.5 * _temperature(config),
        latent=latent,
        biases=Biases(attention_output=latent.has_bias),
        further=(f"model.layers.{count}.",),
        **more,
    )


def _temperature(config: Config) -> float:
    """What scores are multiplied by where positions are scaled: YaRN's, squared."""
    rope = config.part("rope_parameters") or config.part("rope_scaling")
    if rope is None or rope.take("rope_type", rope.take("type")) in (None, "default"):
        return 1.0
    times, factor = rope.real("mscale_all_dim", 0.0), rope.real("factor", 1.0)
    return 1.0 if factor <= 1 else (0.1 * times * math.log(factor) + 1.0) ** 2


def _pairs(config: Config) -> Literal["apart", "halves"]:
    return "apart" if config.flag("rope_interleave", True) else "halves"


def _sparse_from(config: Config) -> tuple[bool, ...]:
    """Which layers have experts: all behind the first ones."""
    config.expect(moe_layer_freq=1)
    first = config.take("first_k_dense_replace")
    if type(first) is not int or first < 0:
        config.refuse("first_k_dense_replace")
    return tuple(index >= first for index in range(config.count("num_hidden_layers")))


def corrected(config: Config) -> Router:
    """DeepSeek 3's router (arXiv:2412.19437, section 2.1.2)."""
    config.expect(scoring_func="sigmoid", topk_method="noaux_tc")
    return Router(
        scores="sigmoid",
        correction="gate.e_score_correction_bias",
        normalizes=config.flag("norm_topk_prob", True),
        least_sum=_LEAST_SUM,
        factor=_factor(config),
        groups=_groups(config, best=2, otherwise=-math.inf),
        is_sorted=False,
    )


def _groups(config: Config, *, best: int, otherwise: float) -> Groups | None:
    """None if all of them are chosen."""
    count, chosen = config.count("n_group"), config.count("topk_group")
    experts = config.count("n_routed_experts")
    size = experts // count
    if experts % count or size < best:
        config.refuse("n_group")
    if chosen > count or chosen * size < config.count("num_experts_per_tok"):
        config.refuse("topk_group")
    return None if chosen == count else Groups(count, chosen, best, otherwise)


def _factor(config: Config) -> float | None:
    return unless_one(config.real("routed_scaling_factor"))


def _experts(config: Config, router: Router, layers: tuple[bool, ...]) -> Experts:
    width = config.count("moe_intermediate_size")
    for key in ("aux_loss_alpha", "seq_aux"):  # of training
        config.take(key)
    config.expect(num_local_experts=config.count("n_routed_experts"))
    return read_experts(
        config,
        config.count("n_routed_experts"),
        layers,
        width=width,
        router=router,
        shared=SharedExpert(width * config.count("n_shared_experts"), "shared_experts", None),
    )
