"""Gemma 1 to 3."""

from typing import Any

from maskdial_export.direct.config import Config
from maskdial_export.direct.decoder import (
    Attends,
    Biases,
    Decoder,
    Layer,
    Norms,
    Rotary,
)
from maskdial_export.direct.describe.common import (
    FULL,
    SLIDING,
    alike,
    decoder_of,
    read_cap,
    read_window,
    windows,
)
from maskdial_export.direct.rotary import read_rotary, rotary

_GEMMA_NORMS = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_GELU_TANH = ("gelu_pytorch_tanh",)


def gemma(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = config.count("head_dim", 256)
    _reads_forward(config)
    # The first files say gelu and mean its approximation; so does transformers read them
    activation = config.one_of("hidden_act", ("gelu", *_GELU_TANH), _GELU_TANH[0])
    config.one_of("hidden_activation", _GELU_TANH, _GELU_TANH[0])
    layers = alike(config, read_rotary(config, size))
    return decoder_of(
        config,
        architecture,
        limit,
        layers,
        head_dim=size,
        tied=True,
        activation=activation,
        shifted=True,
        biases=_gemma_biases(config),
        embedding_scale=_root_of_width(config),
    )


def gemma2(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = config.count("head_dim", 256)
    _reads_forward(config)
    rotation, window = read_rotary(config, size), read_window(config, 4096)
    config.expect(sliding_window_size=window)
    sliding = windows(config, window, lambda index: index % 2 == 0)
    layers = tuple(Attends(rotation, window if each else None) for each in sliding)
    return _later_gemma(config, architecture, limit, layers, size, 50.0, 30.0)


def gemma3(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = config.count("head_dim", 256)
    window, ahead = read_window(config, 4096), config.flag("use_bidirectional_attention", False)
    if ahead and window is not None:  # half of it to either side
        window = window // 2 + 1
    period = config.take("sliding_window_pattern", config.take("_sliding_window_pattern", 6))
    if type(period) is not int or period < 1:
        config.refuse("sliding_window_pattern")
    sliding = windows(config, window, lambda index: (index + 1) % period != 0)
    far, close = two_rotations(config, size)
    layers = tuple(Attends(close, window) if each else Attends(far) for each in sliding)
    return _later_gemma(
        config,
        architecture,
        limit,
        layers,
        size,
        None,
        None,
        head_norms="transposed",
        reads_ahead=ahead,
    )


def two_rotations(config: Config, size: int) -> tuple[Rotary, Rotary]:
    """How layers turn that see all, and those with a window."""
    rope = config.part("rope_parameters")
    if rope is not None and ("rope_theta" in config or "rope_scaling" in config):
        config.refuse("rope_parameters")
    theta, local = config.real("rope_theta", 1e6), config.real("rope_local_base_freq", 1e4)
    if rope is None:
        whole, near = config.part("rope_scaling") or Config({}), Config({})
    else:
        whole, near = rope.part(FULL) or Config({}), rope.part(SLIDING) or Config({})
        rope.finish()
    return rotary(whole, config, size, theta), rotary(near, config, size, local)


def _later_gemma(
    config: Config,
    architecture: str,
    limit: int | None,
    layers: tuple[Layer, ...],
    size: int,
    attention_softcap: float | None,
    logits_softcap: float | None,
    **more: Any,
) -> Decoder:
    """Gemma 2 and 3."""
    config.one_of("hidden_act", _GELU_TANH, _GELU_TANH[0])  # the class reads the other
    activation = config.one_of("hidden_activation", _GELU_TANH, _GELU_TANH[0])
    scalar = config.real("query_pre_attn_scalar", 256)
    if scalar <= 0:
        config.refuse("query_pre_attn_scalar")
    return decoder_of(
        config,
        architecture,
        limit,
        layers,
        head_dim=size,
        tied=True,
        activation=activation,
        shifted=True,
        norms=_GEMMA_NORMS,
        biases=_gemma_biases(config),
        embedding_scale=_root_of_width(config),
        attention_scale=scalar**-0.5,
        attention_softcap=read_cap(config, "attn_logit_softcapping", attention_softcap),
        logits_softcap=read_cap(config, "final_logit_softcapping", logits_softcap),
        **more,
    )


def _reads_forward(config: Config) -> None:
    if config.flag("use_bidirectional_attention", False):
        config.refuse("use_bidirectional_attention")


def _gemma_biases(config: Config) -> Biases:
    attention = config.flag("attention_bias", False)
    return Biases(attention, attention)


def _root_of_width(config: Config) -> float:
    return float(config.count("hidden_size") ** 0.5)
