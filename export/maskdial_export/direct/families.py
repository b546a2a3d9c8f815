"""The families that are known: what each one's configuration means, by ``model_type``.

Defaults are those of transformers' configuration classes. An entry that no family knows is an
error, and never passed over; see `Config`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from maskdial_export.choices import LONGEST
from maskdial_export.direct.config import Config
from maskdial_export.direct.decoder import (
    Attends,
    Biases,
    Decoder,
    Experts,
    Norms,
    NotDirectError,
    Rotary,
)
from maskdial_export.direct.rotary import read_rotary, rotary
from maskdial_export.errors import ExportError

_GEMMA_NORMS = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_OLMO_NORMS = Norms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
_GELU_TANH = ("gelu_pytorch_tanh",)
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2}
_GEMMA_IDS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_TOKEN_IDS: Mapping[str, Mapping[str, int]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "granite"), _LLAMA_IDS),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _GEMMA_IDS),
    "olmoe": {"pad_token_id": 1, "eos_token_id": 50279},
    "exaone4": {"bos_token_id": 0, "eos_token_id": 2},
    "seed_oss": {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    "olmo2": {"pad_token_id": 1, "eos_token_id": 50279},
    "phi3": {"bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000},
    "smollm3": {"pad_token_id": 128004, "bos_token_id": 128000, "eos_token_id": 128001},
}


def read_decoder(name: str, values: Mapping[str, Any], limit: int | None = None) -> Decoder:
    """The decoder that a configuration describes.

    Args:
        name: of the checkpoint, for errors.
        values: config.json.
        limit: tokens of a text; None for as many as it has positions for, at most `LONGEST`.

    Raises:
        NotDirectError: the family or an entry is not known.
        ExportError: there are fewer positions than the limit.
    """
    kind = str(values.get("model_type"))
    read = _FAMILIES.get(kind)
    if read is None:
        raise NotDirectError(
            f"model_type {kind!r} is not known to the direct path (these are: "
            f"{', '.join(sorted(_FAMILIES))})"
        )
    config = Config(values)
    architecture = _ARCHITECTURES[kind]
    if values.get("architectures") not in ([architecture], None):
        config.refuse("architectures")
    found = read(config, architecture, limit)
    config.finish()
    if limit is not None and found.max_length < limit:
        raise ExportError(
            f"{name} reads at most {found.max_length} tokens, fewer than --max-length {limit}"
        )
    return found


def architectures() -> frozenset[str]:
    """transformers' classes that are known."""
    return frozenset(_ARCHITECTURES.values())


def token_ids(values: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens that a configuration names, with those that its class has by default."""
    return {**_TOKEN_IDS.get(str(values.get("model_type")), {}), **values}


def _decoder(
    config: Config,
    architecture: str,
    limit: int | None,
    layers: tuple[Attends, ...],
    *,
    head_dim: int,
    tied: bool = False,
    activation: str | None = None,
    **more: Any,
) -> Decoder:
    """What all families have; ``more`` is what one has beside it."""
    # The graph has the tables of shorter texts, if longer ones would turn by others
    bounds = [each.rotary.longest for each in layers if each.rotary is not None]
    longest = min(
        [config.count("max_position_embeddings"), limit or LONGEST, *filter(None, bounds)]
    )
    if activation is None:
        config.one_of("hidden_act", ("silu",), "silu")
    heads = config.count("num_attention_heads")
    more.setdefault("attention_scale", head_dim**-0.5)
    found = Decoder(
        architecture=architecture,
        vocab_size=config.count("vocab_size"),
        hidden_size=config.count("hidden_size"),
        width=config.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.count("num_key_value_heads", heads),
        head_dim=head_dim,
        epsilon=config.real("rms_norm_eps"),
        layers=layers,
        max_length=longest,
        activation="silu" if activation is None else "gelu_tanh",
        tied=config.flag("tie_word_embeddings", tied),
        **more,
    )
    if found.num_heads % found.num_kv_heads:
        config.refuse("num_key_value_heads")
    return found


def _usual_head(config: Config) -> int:
    """The width of a head where it may be left out."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if "head_dim" not in config and hidden % heads:
        config.refuse("num_attention_heads")
    return config.count("head_dim", hidden // heads)


def _alike(config: Config, rotation: Rotary, window: int | None = None) -> tuple[Attends, ...]:
    """Layers that all attend in one way."""
    return (Attends(rotation, window),) * config.count("num_hidden_layers")


def _windows(
    config: Config, window: int | None, default: Callable[[int], bool] | None
) -> list[bool]:
    """Whether each layer attends within the window: ``layer_types``, or a family's own way.

    Raises:
        NotDirectError: a layer is of another type, or has a window that is not stated.
    """
    count = config.count("num_hidden_layers")
    kinds = config.take("layer_types")
    if kinds is None:
        return [default is not None and default(index) for index in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or set(kinds) - {_FULL, _SLIDING}:
        config.refuse("layer_types")
    if window is None and _SLIDING in kinds:
        config.refuse("sliding_window")
    return [kind == _SLIDING for kind in kinds]


def _window(config: Config, default: int | None) -> int | None:
    value = config.stated("sliding_window", default)
    if value is not None and (type(value) is not int or value < 1):
        config.refuse("sliding_window")
    return None if value is None else int(value)


def _qwen_layers(config: Config, rotation: Rotary) -> tuple[Attends, ...]:
    """Of families whose window has to be turned on."""
    config.take("max_window_layers")
    config.take("sliding_window")  # says nothing, and may be 0, unless it is turned on
    window = None
    if config.flag("use_sliding_window", False):
        window = _window(config, None)
        if config.take("layer_types") is None:  # transformers counts them by max_window_layers
            config.refuse("use_sliding_window")
    sliding = _windows(config, window, None)
    return tuple(Attends(rotation, window if each else None) for each in sliding)


def _llama(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = _usual_head(config)
    attention = config.flag("attention_bias", False)
    biases = Biases(attention, attention, config.flag("mlp_bias", False))
    layers = _alike(config, read_rotary(config, size))
    return _decoder(config, architecture, limit, layers, head_dim=size, biases=biases)


def _mistral(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = _usual_head(config)
    layers = _alike(config, read_rotary(config, size), _window(config, 4096))
    return _decoder(config, architecture, limit, layers, head_dim=size)


def _qwen2(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = _usual_head(config)
    layers = _qwen_layers(config, read_rotary(config, size))
    biases = Biases(query_key_value=True)
    return _decoder(config, architecture, limit, layers, head_dim=size, biases=biases)


def _qwen3(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = config.count("head_dim", 128)
    layers = _qwen_layers(config, read_rotary(config, size))
    attention = config.flag("attention_bias", False)
    return _decoder(
        config,
        architecture,
        limit,
        layers,
        head_dim=size,
        biases=Biases(attention, attention),
        head_norms="head",
    )


def _experts(config: Config, count: int, layers: tuple[bool, ...], **more: Any) -> Experts:
    """``count`` is the number of experts."""
    config.take("router_aux_loss_coef")
    chosen = config.count("num_experts_per_tok")
    if chosen > count:
        config.refuse("num_experts_per_tok")
    return Experts(count, chosen, layers=layers, **more)


def _num_experts(config: Config, default: int | None = None) -> int:
    """transformers 5 has another name for it, and may write either."""
    names = "num_experts", "num_local_experts"
    stated = {config.count(name) for name in names if name in config}
    if len(stated) > 1 or not (stated or default):
        config.refuse(names[0])
    return stated.pop() if stated else int(default or 0)


def _sparse_layers(config: Config, count: int) -> tuple[bool, ...]:
    """Which layers have experts, of Qwen."""
    step, dense = config.count("decoder_sparse_step", 1), config.take("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(each) is int for each in dense):
        config.refuse("mlp_only_layers")
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(count))


def _qwen2_moe(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = _usual_head(config)
    layers = _qwen_layers(config, read_rotary(config, size))
    experts = _experts(
        config,
        _num_experts(config),
        _sparse_layers(config, len(layers)),
        width=config.count("moe_intermediate_size", 1408),
        normalizes=config.flag("norm_topk_prob", False),
        shared_width=config.count("shared_expert_intermediate_size", 5632),
    )
    biases = Biases(query_key_value=config.flag("qkv_bias", True))
    return _decoder(
        config, architecture, limit, layers, head_dim=size, biases=biases, experts=experts
    )


def _qwen3_moe(config: Config, architecture: str, limit: int | None) -> Decoder:
    count = config.count("num_hidden_layers")
    experts = _experts(
        config,
        _num_experts(config),
        _sparse_layers(config, count),
        width=config.count("moe_intermediate_size", 768),
        normalizes=config.flag("norm_topk_prob", False),
    )
    size = _usual_head(config)
    layers = _qwen_layers(config, read_rotary(config, size))
    attention = config.flag("attention_bias", False)
    biases = Biases(attention, attention)
    return _decoder(
        config,
        architecture,
        limit,
        layers,
        head_dim=size,
        biases=biases,
        head_norms="head",
        experts=experts,
    )


def _mixtral(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = _usual_head(config)
    config.take("router_jitter_noise")  # of training
    layers = _alike(config, read_rotary(config, size, 1e6), _window(config, None))
    experts = _experts(
        config,
        _num_experts(config, 8),
        (True,) * len(layers),
        width=config.count("intermediate_size"),
        normalizes=True,
        module="block_sparse_moe",
        names=("w1", "w3", "w2"),
    )
    return _decoder(config, architecture, limit, layers, head_dim=size, experts=experts)


def _olmoe(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = _usual_head(config)
    layers = _alike(config, read_rotary(config, size))
    attention = config.flag("attention_bias", False)
    config.take("moe_intermediate_size")  # not read by this family
    experts = _experts(
        config,
        _num_experts(config, 64),
        (True,) * len(layers),
        width=config.count("intermediate_size"),
        normalizes=config.flag("norm_topk_prob", False),
    )
    return _decoder(
        config,
        architecture,
        limit,
        layers,
        head_dim=size,
        head_norms="row",
        biases=Biases(attention, attention),
        experts=experts,
    )


def _smollm3(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = _usual_head(config)
    layers = _qwen_layers(config, read_rotary(config, size, config.real("rope_theta", 2e6)))
    interval = config.count("no_rope_layer_interval", 4)
    turns = config.take("no_rope_layers")
    if turns is None:
        turns = [int((index + 1) % interval != 0) for index in range(len(layers))]
    if not isinstance(turns, list) or len(turns) != len(layers) or set(turns) - {0, 1}:
        config.refuse("no_rope_layers")
    attention = config.flag("attention_bias", False)
    return _decoder(
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


def _granite(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = _usual_head(config)
    layers = _alike(config, read_rotary(config, size))
    attention = config.flag("attention_bias", False)
    scaling = config.real("logits_scaling", 1.0)
    if scaling == 0:
        config.refuse("logits_scaling")
    return _decoder(
        config,
        architecture,
        limit,
        layers,
        head_dim=size,
        biases=Biases(attention, attention, config.flag("mlp_bias", False)),
        attention_scale=config.real("attention_multiplier", 1.0),
        embedding_scale=_unless_one(config.real("embedding_multiplier", 1.0)),
        residual_scale=_unless_one(config.real("residual_multiplier", 1.0)),
        logits_scale=_unless_one(1 / scaling),
    )


def _unless_one(factor: float) -> float | None:
    return None if factor == 1 else factor


def _olmo2(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = _usual_head(config)
    layers = _alike(config, read_rotary(config, size))
    attention = config.flag("attention_bias", False)
    return _decoder(
        config,
        architecture,
        limit,
        layers,
        head_dim=size,
        norms=_OLMO_NORMS,
        head_norms="row",
        biases=Biases(attention, attention),
    )


def _exaone4(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = _usual_head(config)
    rotation, window = read_rotary(config, size), _window(config, 4096)
    period = config.count("sliding_window_pattern", 4) if window is not None else 1
    config.take("sliding_window_pattern")
    sliding = _windows(config, window, lambda index: (index + 1) % period != 0)
    # Beside layers with windows, those that see all have no positions
    layers = tuple(
        Attends(rotation if each or window is None else None, window if each else None)
        for each in sliding
    )
    return _decoder(
        config, architecture, limit, layers, head_dim=size, norms=_OLMO_NORMS, head_norms="head"
    )


def _seed_oss(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = config.count("head_dim", 128)
    layers = _alike(config, read_rotary(config, size))
    config.take("residual_dropout")
    biases = Biases(
        config.flag("attention_bias", True),
        config.flag("attention_out_bias", False),
        config.flag("mlp_bias", False),
    )
    return _decoder(config, architecture, limit, layers, head_dim=size, biases=biases)


def _phi3(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = _usual_head(config)
    rotation = read_rotary(config, size)
    config.take("original_max_position_embeddings")  # of longrope
    layers = _alike(config, rotation, _window(config, None))
    return _decoder(config, architecture, limit, layers, head_dim=size, packed=True)


def _gemma(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = config.count("head_dim", 256)
    _reads_forward(config)
    # The first files say gelu and mean its approximation; so does transformers read them
    activation = config.one_of("hidden_act", ("gelu", *_GELU_TANH), _GELU_TANH[0])
    config.one_of("hidden_activation", _GELU_TANH, _GELU_TANH[0])
    layers = _alike(config, read_rotary(config, size))
    return _decoder(
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


def _gemma2(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = config.count("head_dim", 256)
    rotation, window = read_rotary(config, size), _window(config, 4096)
    sliding = _windows(config, window, lambda index: index % 2 == 0)
    layers = tuple(Attends(rotation, window if each else None) for each in sliding)
    return _later_gemma(config, architecture, limit, layers, size, 50.0, 30.0)


def _gemma3(config: Config, architecture: str, limit: int | None) -> Decoder:
    size = config.count("head_dim", 256)
    window = _window(config, 4096)
    period = config.take("sliding_window_pattern", config.take("_sliding_window_pattern", 6))
    if type(period) is not int or period < 1:
        config.refuse("sliding_window_pattern")
    sliding = _windows(config, window, lambda index: (index + 1) % period != 0)
    rope = config.part("rope_parameters")
    if rope is not None and ("rope_theta" in config or "rope_scaling" in config):
        config.refuse("rope_parameters")
    theta, local = config.real("rope_theta", 1e6), config.real("rope_local_base_freq", 1e4)
    if rope is None:
        whole, near = config.part("rope_scaling") or Config({}), Config({})
    else:
        whole, near = rope.part(_FULL) or Config({}), rope.part(_SLIDING) or Config({})
        rope.finish()
    far = rotary(whole, config, size, theta)
    close = rotary(near, config, size, local)
    layers = tuple(Attends(close, window) if each else Attends(far) for each in sliding)
    return _later_gemma(
        config, architecture, limit, layers, size, None, None, head_norms="transposed"
    )


def _later_gemma(
    config: Config,
    architecture: str,
    limit: int | None,
    layers: tuple[Attends, ...],
    size: int,
    attention_softcap: float | None,
    logits_softcap: float | None,
    **more: Any,
) -> Decoder:
    """Gemma 2 and 3."""
    _reads_forward(config)
    activation = config.one_of("hidden_activation", _GELU_TANH, _GELU_TANH[0])
    scalar = config.real("query_pre_attn_scalar", 256)
    if scalar <= 0:
        config.refuse("query_pre_attn_scalar")
    return _decoder(
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
        attention_softcap=_cap(config, "attn_logit_softcapping", attention_softcap),
        logits_softcap=_cap(config, "final_logit_softcapping", logits_softcap),
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


def _cap(config: Config, key: str, default: float | None) -> float | None:
    value = config.stated(key, default)
    if value is None:
        return None
    if type(value) not in (int, float) or not value > 0:
        config.refuse(key)
    return float(value)


_FAMILIES: Mapping[str, Callable[[Config, str, int | None], Decoder]] = {
    "exaone4": _exaone4,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "granite": _granite,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
}
_ARCHITECTURES: Mapping[str, str] = {
    "exaone4": "Exaone4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
