"""What the descriptions of families share: the entries that nearly all have, by one rule each."""

from collections.abc import Callable, Mapping
from typing import Any

from maskdial_export.choices import LONGEST
from maskdial_export.direct.config import Config
from maskdial_export.direct.decoder import (
    Activation,
    Attends,
    Decoder,
    Layer,
    Rotary,
)
from maskdial_export.direct.experts import Experts

FULL, SLIDING = "full_attention", "sliding_attention"


ACTIVATIONS: Mapping[str | None, Activation] = {
    None: "silu",
    "gelu": "gelu_tanh",  # of the first Gemma
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}


def decoder_of(
    config: Config,
    architecture: str,
    limit: int | None,
    layers: tuple[Layer, ...],
    *,
    head_dim: int,
    tied: bool = False,
    activation: str | None = None,
    epsilon: float | None = None,
    width: int | None = None,
    **more: Any,
) -> Decoder:
    """What all families have; ``more`` is what one has beside it."""
    # The graph has the tables of shorter texts, if longer ones would turn by others
    rotations = [each.rotary for each in layers if isinstance(each, Attends)]
    bounds = [each.longest for each in rotations if each is not None]
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
        width=width or config.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.count("num_key_value_heads", heads),
        head_dim=head_dim,
        epsilon=epsilon or config.real("rms_norm_eps"),
        layers=layers,
        max_length=longest,
        activation=ACTIVATIONS[activation],
        tied=config.flag("tie_word_embeddings", tied),
        **more,
    )
    if found.num_heads % found.num_kv_heads:
        config.refuse("num_key_value_heads")
    return found


def usual_head(config: Config) -> int:
    """The width of a head where it may be left out."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if "head_dim" not in config and hidden % heads:
        config.refuse("num_attention_heads")
    return config.count("head_dim", hidden // heads)


def alike(config: Config, rotation: Rotary, window: int | None = None) -> tuple[Attends, ...]:
    """Layers that all attend in one way."""
    return (Attends(rotation, window),) * config.count("num_hidden_layers")


def windows(
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
    if not isinstance(kinds, list) or len(kinds) != count or set(kinds) - {FULL, SLIDING}:
        config.refuse("layer_types")
    if window is None and SLIDING in kinds:
        config.refuse("sliding_window")
    return [kind == SLIDING for kind in kinds]


def read_window(config: Config, default: int | None) -> int | None:
    value = config.stated("sliding_window", default)
    if value is not None and (type(value) is not int or value < 1):
        config.refuse("sliding_window")
    return None if value is None else int(value)


def qwen_layers(config: Config, rotation: Rotary) -> tuple[Attends, ...]:
    """Of families whose window has to be turned on."""
    config.take("max_window_layers")
    config.take("sliding_window")  # says nothing, and may be 0, unless it is turned on
    window = None
    if config.flag("use_sliding_window", False):
        window = read_window(config, None)
        if config.take("layer_types") is None:  # transformers counts them by max_window_layers
            config.refuse("use_sliding_window")
    sliding = windows(config, window, None)
    return tuple(Attends(rotation, window if each else None) for each in sliding)


def read_experts(config: Config, count: int, layers: tuple[bool, ...], **more: Any) -> Experts:
    """``count`` is the number of experts."""
    config.take("router_aux_loss_coef")
    chosen = config.count("num_experts_per_tok")
    if chosen > count:
        config.refuse("num_experts_per_tok")
    return Experts(count, chosen, layers=layers, **more)


def num_experts(config: Config, default: int | None = None) -> int:
    """transformers 5 has another name for it, and may write either."""
    names = "num_experts", "num_local_experts"
    stated = {config.count(name) for name in names if name in config}
    if len(stated) > 1 or not (stated or default):
        config.refuse(names[0])
    return stated.pop() if stated else int(default or 0)


def sparse_layers(config: Config, count: int) -> tuple[bool, ...]:
    """Which layers have experts, of Qwen."""
    step, dense = config.count("decoder_sparse_step", 1), config.take("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(each) is int for each in dense):
        config.refuse("mlp_only_layers")
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(count))


def unless_one(factor: float) -> float | None:
    return None if factor == 1 else factor


def read_cap(config: Config, key: str, default: float | None) -> float | None:
    value = config.stated(key, default)
    if value is None:
        return None
    if type(value) not in (int, float) or not value > 0:
        config.refuse(key)
    return float(value)


def multipliers(config: Config) -> dict[str, Any]:
    """Granite's factors, as fields of a decoder."""
    scaling = config.real("logits_scaling", 1.0)
    if scaling == 0:
        config.refuse("logits_scaling")
    return {
        "attention_scale": config.real("attention_multiplier", 1.0),
        "embedding_scale": unless_one(config.real("embedding_multiplier", 1.0)),
        "residual_scale": unless_one(config.real("residual_multiplier", 1.0)),
        "logits_scale": unless_one(1 / scaling),
    }
