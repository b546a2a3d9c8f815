"""Families with layer norms: GPT-2, Phi, StarCoder 2, Cohere."""

from maskdial_export.choices import LONGEST
from maskdial_export.direct.config import Config
from maskdial_export.direct.decoder import (
    Attends,
    Biases,
    Decoder,
    Names,
    Norms,
    PositionTable,
)
from maskdial_export.direct.describe.common import (
    ACTIVATIONS,
    alike,
    decoder_of,
    read_window,
    usual_head,
    windows,
)
from maskdial_export.direct.rotary import read_rotary

_BIASES = Biases(query_key_value=True, attention_output=True, mlp=True)
_ONE_NORM = Norms(before_mlp=None)
_GELUS = ("gelu_new", "gelu_pytorch_tanh")
# Of code that StarCoder2's makers trained with
_STARCODER_UNREAD = (
    *("residual_dropout", "embedding_dropout", "activation_function", "layer_norm_epsilon"),
    *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
)


def gpt2(config: Config, architecture: str, limit: int | None) -> Decoder:
    hidden, heads = config.count("n_embd", 768), config.count("n_head", 12)
    rows, count = config.count("n_positions", 1024), config.count("n_layer", 12)
    if hidden % heads:
        config.refuse("n_head")
    for key in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"):
        if config.flag(key, False):
            config.refuse(key)
    for key in ("n_ctx", "attn_pdrop", "n_special", "predict_special_tokens", "summary_type"):
        config.take(key)
    for key in ("use_proj", "activation", "proj_to_labels", "first_dropout"):
        config.take(f"summary_{key}")
    size = hidden // heads
    base = "transformer"
    return Decoder(
        architecture=architecture,
        vocab_size=config.count("vocab_size", 50257),
        hidden_size=hidden,
        width=config.count("n_inner", 4 * hidden),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=size,
        epsilon=config.real("layer_norm_epsilon", 1e-5),
        layers=(Attends(None),) * count,
        max_length=min(rows, limit or LONGEST),
        activation=ACTIVATIONS[_gelu(config, "activation_function")],
        attention_scale=size**-0.5 if config.flag("scale_attn_weights", True) else 1.0,
        norms=Norms("ln_1", None, "ln_2", None),
        norm_kind="layer",
        names=Names(
            table=f"{base}.wte",
            layers=f"{base}.h",
            last_norm=f"{base}.ln_f",
            query_key_value="attn.c_attn",
            attention_output="attn.c_proj",
            up="mlp.c_fc",
            down="mlp.c_proj",
        ),
        biases=_BIASES,
        packed_attention=True,
        gated=False,
        positions=PositionTable(f"{base}.wpe", rows),
        inputs_first=True,
        tied=config.flag("tie_word_embeddings", True),
    )


def phi(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = usual_head(config)
    if config.flag("qk_layernorm", False):
        config.refuse("qk_layernorm")
    turned = int(size * config.real("partial_rotary_factor", 0.5))
    config.expect(attention_bias=False, rotary_dim=turned)
    return decoder_of(
        config,
        architecture,
        limit,
        alike(config, read_rotary(config, size, partial=0.5)),
        head_dim=size,
        activation=_gelu(config, "hidden_act"),
        epsilon=config.real("layer_norm_eps", 1e-5),
        norms=_ONE_NORM,
        norm_kind="layer",
        names=Names(
            last_norm="model.final_layernorm",
            attention_output="self_attn.dense",
            up="mlp.fc1",
            down="mlp.fc2",
        ),
        biases=_BIASES,
        apart=True,
        parallel="together",
        gated=False,
        head_bias=True,
    )


def starcoder2(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = usual_head(config)
    for key in _STARCODER_UNREAD:
        config.take(key)
    config.expect(norm_type="layer_norm", mlp_type="default", scale_attn_weights=True)
    has_biases = config.flag("use_bias", True)
    return decoder_of(
        config,
        architecture,
        limit,
        alike(config, read_rotary(config, size), read_window(config, None)),
        head_dim=size,
        tied=True,
        activation=_gelu(config, "hidden_act", "gelu_pytorch_tanh"),
        epsilon=config.real("norm_epsilon", 1e-5),
        norm_kind="layer",
        names=Names(up="mlp.c_fc", down="mlp.c_proj"),
        biases=Biases(has_biases, has_biases, has_biases),
        gated=False,
    )


def cohere(config: Config, architecture: str, limit: int | None) -> Decoder:
    if config.flag("use_qk_norm", False):
        config.refuse("use_qk_norm")
    size = usual_head(config)
    rotation = read_rotary(config, size, 500_000.0, interleaved=True)
    return _cohere(config, architecture, limit, alike(config, rotation), size)


def cohere2(config: Config, architecture: str, limit: int | None) -> Decoder:
    # The first configurations say it
    config.expect(
        order_of_interleaved_layers="local_attn_first",
        position_embedding_type="rope_gptj",
        rotary_pct=1.0,
        use_embedding_sharing=True,
        use_gated_activation=True,
        use_parallel_block=True,
        use_parallel_embedding=False,
        use_qk_norm=False,
    )
    size, window = usual_head(config), read_window(config, 4096)
    period = config.count("sliding_window_pattern", 4)
    if config.count("layer_switch", period) != period:
        config.refuse("layer_switch")
    sliding = windows(config, window, lambda index: (index + 1) % period != 0)
    rotation = read_rotary(config, size, interleaved=True)
    # Layers that see all have no positions
    layers = tuple(Attends(rotation, window) if each else Attends(None) for each in sliding)
    return _cohere(config, architecture, limit, layers, size)


def _cohere(
    config: Config,
    architecture: str,
    limit: int | None,
    layers: tuple[Attends, ...],
    size: int,
) -> Decoder:
    attention = config.flag("attention_bias", False)
    return decoder_of(
        config,
        architecture,
        limit,
        layers,
        head_dim=size,
        tied=True,
        epsilon=config.real("layer_norm_eps", 1e-5),
        norms=_ONE_NORM,
        norm_kind="centered",
        biases=Biases(attention, attention),
        parallel="in_turn",
        logits_factor=config.real("logit_scale", 0.0625),
    )


def _gelu(config: Config, key: str, default: str = "gelu_new") -> str:
    return config.one_of(key, _GELUS, default)
