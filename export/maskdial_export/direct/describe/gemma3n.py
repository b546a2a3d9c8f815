"""Gemma 3n: several streams, shared keys and values, inputs of layers, gates that are cut off."""

import statistics

from maskdial_export.direct.config import Config
from maskdial_export.direct.decoder import Biases, Decoder, SharingAttends
from maskdial_export.direct.describe.common import decoder_of, read_cap, windows
from maskdial_export.direct.describe.gemma import two_rotations
from maskdial_export.direct.describe.gemma4 import NORMS, layer_inputs, sources, unused
from maskdial_export.direct.streams import AltUp, LayerInputs

_GELU_TANH = ("gelu_pytorch_tanh",)
_SPARSE, _DENSE_FROM = 0.95, 10  # of configurations that do not say which layers are sparse


def gemma3n(config: Config, architecture: str, limit: int | None) -> Decoder:
    """Its text part; the towers of wrappers are apart."""
    size, window = config.count("head_dim", 256), config.count("sliding_window", 512)
    sliding = windows(config, window, lambda index: (index + 1) % 5 != 0)
    far, close = two_rotations(config, size)
    heads = config.count("num_key_value_heads", 2)
    layers = tuple(
        SharingAttends(
            close if slides else far,
            window if slides else None,
            num_kv_heads=heads,
            head_dim=size,
            source=source,
        )
        for slides, source in zip(sliding, sources(config, sliding, 15), strict=True)
    )
    columns, rows = layer_inputs(config)
    if not columns:
        config.refuse("hidden_size_per_layer_input")
    attention, widths = config.flag("attention_bias", False), _widths(config, len(layers))
    return decoder_of(
        config,
        architecture,
        limit,
        layers,
        head_dim=size,
        tied=True,
        activation=config.one_of("hidden_activation", _GELU_TANH, _GELU_TANH[0]),
        width=widths[0],
        widths=widths,
        norms=NORMS,
        biases=Biases(attention, attention),
        embedding_scale=float(config.count("hidden_size") ** 0.5),
        attention_scale=1.0,
        logits_softcap=read_cap(config, "final_logit_softcapping", 30.0),
        layer_inputs=LayerInputs(rows, columns),
        altup=_altup(config, len(layers)),
        unused=unused(layers),
    )


def _widths(config: Config, count: int) -> tuple[int, ...]:
    given = config.take("intermediate_size", 16_384)
    widths = given if isinstance(given, list) else [given] * count
    if len(widths) != count or not all(type(each) is int and each > 0 for each in widths):
        config.refuse("intermediate_size")
    return tuple(widths)


def _altup(config: Config, count: int) -> AltUp:
    config.take("altup_coef_clip")  # of training
    if config.take("altup_active_idx", 0) != 0:
        config.refuse("altup_active_idx")
    usual = [
        _SPARSE if count > _DENSE_FROM and each < _DENSE_FROM else 0.0 for each in range(count)
    ]
    shares = config.take("activation_sparsity_pattern", usual)
    known = isinstance(shares, list) and len(shares) == count
    if not known or not all(type(each) in (int, float) and 0 <= each < 1 for each in shares):
        config.refuse("activation_sparsity_pattern")
    normal = statistics.NormalDist()
    return AltUp(
        config.count("altup_num_inputs", 4),
        config.count("laurel_rank", 64),
        config.flag("altup_correct_scale", True),
        tuple(normal.inv_cdf(share) if share else None for share in shares),
    )
