"""Families with attention alone, and one MLP in each layer."""

from dataclasses import replace
from typing import Any

from maskdial_export.direct.config import Config
from maskdial_export.direct.decoder import (
    Attends,
    Biases,
    Decoder,
    Norms,
)
from maskdial_export.direct.describe.common import (
    FULL,
    SLIDING,
    alike,
    decoder_of,
    multipliers,
    qwen_layers,
    read_window,
    usual_head,
    windows,
)
from maskdial_export.direct.rotary import read_rotary, rotary

_OLMO_NORMS = Norms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


def llama(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = usual_head(config)
    attention = config.flag("attention_bias", False)
    biases = Biases(attention, attention, config.flag("mlp_bias", False))
    layers = alike(config, read_rotary(config, size))
    return decoder_of(config, architecture, limit, layers, head_dim=size, biases=biases)


def mistral(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = usual_head(config)
    layers = alike(config, read_rotary(config, size), read_window(config, 4096))
    return decoder_of(config, architecture, limit, layers, head_dim=size)


def ministral3(config: Config, architecture: str, limit: int | None) -> Decoder:
    size, beta = config.count("head_dim", 128), "llama_4_scaling_beta"
    rope = config.part("rope_parameters")
    if rope is None:
        config.refuse("rope_parameters")
    assert rope is not None, "it is there"
    rotation = read_rotary(config, size, 1e6, beside=(beta, "max_position_embeddings"))
    if rope.real(beta, 0.0):  # queries beyond the first training's positions are multiplied by more
        rotation = replace(rotation, longest=rope.count("original_max_position_embeddings"))
    layers = alike(config, rotation, read_window(config, None))
    # A trace scales queries, by 1 here, before they are rotated
    return decoder_of(config, architecture, limit, layers, head_dim=size, apart=True)


def qwen2(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = usual_head(config)
    config.expect(use_mrope=False)
    layers = qwen_layers(config, read_rotary(config, size))
    biases = Biases(query_key_value=True)
    return decoder_of(config, architecture, limit, layers, head_dim=size, biases=biases)


def qwen3(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = config.count("head_dim", 128)
    layers = qwen_layers(config, read_rotary(config, size))
    attention = config.flag("attention_bias", False)
    return decoder_of(
        config,
        architecture,
        limit,
        layers,
        head_dim=size,
        biases=Biases(attention, attention),
        head_norms="head",
    )


def smollm3(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = usual_head(config)
    layers = qwen_layers(config, read_rotary(config, size, config.real("rope_theta", 2e6)))
    interval = config.count("no_rope_layer_interval", 4)
    turns = config.take("no_rope_layers")
    if turns is None:
        turns = [int((index + 1) % interval != 0) for index in range(len(layers))]
    if not isinstance(turns, list) or len(turns) != len(layers) or set(turns) - {0, 1}:
        config.refuse("no_rope_layers")
    attention = config.flag("attention_bias", False)
    return decoder_of(
        config,
        architecture,
        limit,
        tuple(
            each if turn else Attends(None, each.window)
            for each, turn in zip(layers, turns, strict=True)
        ),
        head_dim=size,
        tied=True,
        biases=Biases(attention, attention, config.flag("mlp_bias", False)),
    )


def granite(config: Config, architecture: str, limit: int | None, **more: Any) -> Decoder:
    size = usual_head(config)
    layers = alike(config, read_rotary(config, size))
    attention = config.flag("attention_bias", False)
    return decoder_of(
        config,
        architecture,
        limit,
        layers,
        head_dim=size,
        biases=Biases(attention, attention, config.flag("mlp_bias", False)),
        **multipliers(config),
        **more,
    )


def olmo2(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = usual_head(config)
    layers = alike(config, read_rotary(config, size))
    attention = config.flag("attention_bias", False)
    return decoder_of(
        config,
        architecture,
        limit,
        layers,
        head_dim=size,
        norms=_OLMO_NORMS,
        head_norms="row",
        biases=Biases(attention, attention),
    )


def exaone4(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = usual_head(config)
    rotation, window = read_rotary(config, size), read_window(config, 4096)
    period = 4
    if window is not None and "layer_types" not in config:  # beside them, it may be "LLLG"
        period = config.count("sliding_window_pattern", 4)
    config.take("sliding_window_pattern")
    sliding = windows(config, window, lambda index: (index + 1) % period != 0)
    # Beside layers with windows, those that see all have no positions
    layers = tuple(
        Attends(rotation if each or window is None else None, window if each else None)
        for each in sliding
    )
    return decoder_of(
        config, architecture, limit, layers, head_dim=size, norms=_OLMO_NORMS, head_norms="head"
    )


def seed_oss(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = config.count("head_dim", 128)
    layers = alike(config, read_rotary(config, size))
    config.take("residual_dropout")
    biases = Biases(
        config.flag("attention_bias", True),
        config.flag("attention_out_bias", False),
        config.flag("mlp_bias", False),
    )
    return decoder_of(config, architecture, limit, layers, head_dim=size, biases=biases)


def phi3(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = usual_head(config)
    rotation = read_rotary(config, size)
    config.take("original_max_position_embeddings")  # of longrope
    config.expect(attention_bias=False, mlp_bias=False, lm_head_bias=False)
    config.expect(full_attn_mod=1, interpolate_factor=1)
    layers = alike(config, rotation, read_window(config, None))
    return decoder_of(
        config, architecture, limit, layers, head_dim=size, packed_attention=True, packed_mlp=True
    )


def olmo3(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = usual_head(config)
    window = read_window(config, 4096)
    sliding = windows(config, window, lambda index: (index + 1) % 4 != 0)
    rope, theta = config.part("rope_parameters"), config.real("rope_theta", 5e5)
    near = Config({})
    if rope is None:
        whole = config.part("rope_scaling") or Config({})
    else:
        whole, near = rope.part(FULL) or Config({}), rope.part(SLIDING) or Config({})
        rope.finish()
    far, close = rotary(whole, config, size, theta), rotary(near, config, size, theta)
    attention = config.flag("attention_bias", False)
    return decoder_of(
        config,
        architecture,
        limit,
        tuple(Attends(close, window) if each else Attends(far) for each in sliding),
        head_dim=size,
        norms=_OLMO_NORMS,
        head_norms="row",
        biases=Biases(attention, attention),
    )


def glm4(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = config.count("head_dim", 128)
    layers = alike(config, read_rotary(config, size, partial=0.5, interleaved=True))
    return decoder_of(
        config,
        architecture,
        limit,
        layers,
        head_dim=size,
        norms=Norms(
            after_attention="post_self_attn_layernorm",
            before_mlp="post_attention_layernorm",
            after_mlp="post_mlp_layernorm",
        ),
        biases=Biases(query_key_value=config.flag("attention_bias", True)),
        packed_mlp=True,
    )
