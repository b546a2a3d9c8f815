"""Mixtures of experts, with attention alone."""

from maskdial_export.direct.config import Config
from maskdial_export.direct.decoder import (
    Attends,
    Biases,
    Decoder,
)
from maskdial_export.direct.describe.common import (
    alike,
    decoder_of,
    num_experts,
    qwen_layers,
    read_experts,
    read_window,
    sparse_layers,
    unless_one,
    usual_head,
    windows,
)
from maskdial_export.direct.describe.plain import granite
from maskdial_export.direct.experts import Clamp, Experts, Fused, Router, SharedExpert
from maskdial_export.direct.rotary import read_rotary


def qwen2_moe(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = usual_head(config)
    layers = qwen_layers(config, read_rotary(config, size))
    experts = read_experts(
        config,
        num_experts(config),
        sparse_layers(config, len(layers)),
        width=config.count("moe_intermediate_size", 1408),
        router=Router(normalizes=config.flag("norm_topk_prob", False)),
        shared=SharedExpert(config.count("shared_expert_intermediate_size", 5632)),
    )
    biases = Biases(query_key_value=config.flag("qkv_bias", True))
    return decoder_of(
        config, architecture, limit, layers, head_dim=size, biases=biases, experts=experts
    )


def qwen3_moe(config: Config, architecture: str, limit: int | None) -> Decoder:
    count = config.count("num_hidden_layers")
    experts = read_experts(
        config,
        num_experts(config),
        sparse_layers(config, count),
        width=config.count("moe_intermediate_size", 768),
        router=Router(normalizes=config.flag("norm_topk_prob", False)),
    )
    size = usual_head(config)
    layers = qwen_layers(config, read_rotary(config, size))
    attention = config.flag("attention_bias", False)
    biases = Biases(attention, attention)
    return decoder_of(
        config,
        architecture,
        limit,
        layers,
        head_dim=size,
        biases=biases,
        head_norms="head",
        experts=experts,
    )


def mixtral(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = usual_head(config)
    config.take("router_jitter_noise")  # of training
    layers = alike(config, read_rotary(config, size, 1e6), read_window(config, None))
    experts = read_experts(
        config,
        num_experts(config, 8),
        (True,) * len(layers),
        width=config.count("intermediate_size"),
        router=Router(normalizes=True),
        module="block_sparse_moe",
        names=("w1", "w3", "w2"),
    )
    return decoder_of(config, architecture, limit, layers, head_dim=size, experts=experts)


def olmoe(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = usual_head(config)
    layers = alike(config, read_rotary(config, size))
    attention = config.flag("attention_bias", False)
    config.take("moe_intermediate_size")  # not read by this family
    experts = read_experts(
        config,
        num_experts(config, 64),
        (True,) * len(layers),
        width=config.count("intermediate_size"),
        router=Router(normalizes=config.flag("norm_topk_prob", False)),
    )
    return decoder_of(
        config,
        architecture,
        limit,
        layers,
        head_dim=size,
        head_norms="row",
        biases=Biases(attention, attention),
        experts=experts,
    )


def gpt_oss(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = config.count("head_dim", 64)
    window = read_window(config, 128)
    sliding = windows(config, window, lambda index: index % 2 == 0)
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
    yarn |= {"original_max_position_embeddings": 4096}
    rotation = read_rotary(config, size, 150_000.0, yarn)
    _reads_mxfp4(config)
    config.take("initial_context_length")  # of YaRN, which says it itself
    for key in ("experts_per_token", "num_experts"):  # other names of two counts
        config.take(key)
    attention = config.flag("attention_bias", True)
    experts = read_experts(
        config,
        config.count("num_local_experts", 128),
        (True,) * len(sliding),
        width=config.count("intermediate_size"),
        router=Router("router", "chosen", has_bias=True),
        has_biases=True,
        clamp=Clamp(config.real("swiglu_alpha", 1.702), config.real("swiglu_limit", 7.0)),
        fused=Fused(is_transposed=True, is_interleaved=True),
    )
    return decoder_of(
        config,
        architecture,
        limit,
        tuple(Attends(rotation, window if each else None) for each in sliding),
        head_dim=size,
        biases=Biases(attention, attention),
        sinks=True,
        experts=experts,
    )


def _reads_mxfp4(config: Config) -> None:
    """Integers in blocks, of which the tensors themselves say which they are."""
    stored = config.part("quantization_config")
    if stored is not None:
        stored.one_of("quant_method", ("mxfp4",), "")
        stored.take("modules_to_not_convert")
        stored.finish()


def granite_moe(config: Config, architecture: str, limit: int | None) -> Decoder:
    return granite(config, architecture, limit, experts=granite_experts(config))


def granite_experts(config: Config, *, beside: bool = False) -> Experts:
    """Of all layers. ``beside``: whether an MLP computes every token, too."""
    return read_experts(
        config,
        config.count("num_local_experts", 8),
        (True,) * config.count("num_hidden_layers"),
        width=config.count("intermediate_size"),
        router=Router("router.layer", "chosen"),
        module="block_sparse_moe",
        graph_module="block_sparse_moe",
        fused=Fused("input_linear.weight", "output_linear.weight"),
        beside=beside,
    )


def glm4_moe(config: Config, architecture: str, limit: int | None) -> Decoder:
    size, count = usual_head(config), config.count("num_hidden_layers")
    dense = config.take("first_k_dense_replace", 1)
    width = config.count("moe_intermediate_size", 1408)
    for key in ("n_group", "topk_group"):  # groups of experts, of which one is all
        if config.count(key, 1) != 1:
            config.refuse(key)
    if type(dense) is not int:
        config.refuse("first_k_dense_replace")
    router = Router(
        scores="sigmoid",
        correction="gate.e_score_correction_bias",
        normalizes=config.flag("norm_topk_prob", True),
        least_sum=1e-20,
        factor=unless_one(config.real("routed_scaling_factor", 1.0)),
    )
    experts = read_experts(
        config,
        config.count("n_routed_experts", 128),
        tuple(index >= dense for index in range(count)),
        width=width,
        router=router,
        shared=SharedExpert(width * config.count("n_shared_experts", 1), "shared_experts", None),
    )
    for key in ("num_mtp_layers", "num_nextn_predict_layers", "num_local_experts"):
        config.take(key)
    attention = config.flag("attention_bias", False)
    return decoder_of(
        config,
        architecture,
        limit,
        alike(config, read_rotary(config, size, partial=0.5)),
        head_dim=size,
        head_norms="head" if config.flag("use_qk_norm", False) else None,
        biases=Biases(query_key_value=attention),
        experts=experts,
        further=(f"model.layers.{count}.",),
    )
