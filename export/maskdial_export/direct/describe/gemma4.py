"""Gemma 4: heads of two sizes, shared keys and values, inputs of layers, and experts."""

from typing import Any

from maskdial_export.direct.config import Config
from maskdial_export.direct.decoder import Biases, Decoder, Norms, SharingAttends
from maskdial_export.direct.describe.common import FULL, SLIDING, decoder_of, read_cap, windows
from maskdial_export.direct.experts import ExpertNorms, Experts, Router
from maskdial_export.direct.rotary import rotary
from maskdial_export.direct.streams import LayerInputs

NORMS = Norms(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_EXPERT_NORMS = ExpertNorms(
    before="pre_feedforward_layernorm_2",
    after="post_feedforward_layernorm_2",
    beside="post_feedforward_layernorm_1",
)
_GELU_TANH = ("gelu_pytorch_tanh",)
_OVERRIDES = {"head_dim", "num_key_value_heads"}


def gemma4(config: Config, architecture: str, limit: int | None) -> Decoder:
    """Towers of wrappers apart; attention both ways among the tokens of an image is not text's."""
    if config.take("use_bidirectional_attention", "vision") != "vision":
        config.refuse("use_bidirectional_attention")
    layers = _layers(config)
    shared = [index for index, each in enumerate(layers) if each.source is not None]
    width, wide = config.count("intermediate_size"), config.flag("use_double_wide_mlp", False)
    attention = config.flag("attention_bias", False)
    usual = layers[0]
    size, rows = layer_inputs(config)
    count = len(layers)
    return decoder_of(
        config,
        architecture,
        limit,
        layers,
        head_dim=usual.head_dim,
        tied=True,
        activation=config.one_of("hidden_activation", _GELU_TANH, _GELU_TANH[0]),
        width=width,
        widths=tuple(2 * width if wide and index in shared else width for index in range(count)),
        norms=NORMS,
        biases=Biases(attention, attention),
        embedding_scale=float(config.count("hidden_size") ** 0.5),
        attention_scale=1.0,
        logits_softcap=read_cap(config, "final_logit_softcapping", None),
        experts=_experts(config, count),
        layer_inputs=LayerInputs(rows, size) if size else None,
        layer_scalar="layer_scalar",
        unused=unused(layers),
    )


def unused(layers: tuple[SharingAttends, ...]) -> tuple[str, ...]:
    """How the names of weights begin that files may have of layers which read others' keys."""
    shared = [index for index, each in enumerate(layers) if each.source is not None]
    parts = ("k_proj.", "v_proj.", "k_norm.")
    return tuple(f"model.layers.{index}.self_attn.{part}" for index in shared for part in parts)


def _layers(config: Config) -> tuple[SharingAttends, ...]:
    window = config.count("sliding_window", 512)
    sliding = windows(config, window, lambda index: (index + 1) % 6 != 0)
    if "layer_types" not in config:
        sliding[-1] = False  # as transformers makes of it
    if sliding[-1]:
        config.refuse("layer_types")
    heads = _heads(config, sliding)
    turns = _rotations(config, sliding, [size for _, size in heads])
    same = config.flag("attention_k_eq_v", False)
    found = []
    for index, source in enumerate(sources(config, sliding, 0)):
        slides = sliding[index]
        if source is not None and heads[source] != heads[index]:
            config.refuse("num_kv_shared_layers")
        num_kv_heads, size = heads[index]
        found.append(
            SharingAttends(
                turns[slides],
                window if slides else None,
                num_kv_heads=num_kv_heads,
                head_dim=size,
                source=source,
                has_values=slides or not same,
            )
        )
    return tuple(found)


def sources(config: Config, sliding: list[bool], usual: int) -> list[int | None]:
    """Whose keys and values each layer reads: the last ones read those of the last one of their
    kind before them; None: its own."""
    num_shared, count = config.take("num_kv_shared_layers", usual), len(sliding)
    if type(num_shared) is not int or not 0 <= num_shared < count:
        config.refuse("num_kv_shared_layers")
    own = sliding[: count - num_shared]
    if {*sliding} != {*own}:
        config.refuse("num_kv_shared_layers")
    last = {slides: len(own) - 1 - own[::-1].index(slides) for slides in {*own}}
    return [None] * len(own) + [last[slides] for slides in sliding[len(own) :]]


def _heads(config: Config, sliding: list[bool]) -> list[tuple[int, int]]:
    """How many heads of keys each layer has, and of which size."""
    heads = config.count("num_attention_heads")
    usual = config.count("num_key_value_heads", 4), config.count("head_dim", 256)
    whole = config.count("global_head_dim", 512)
    fewer = config.take("num_global_key_value_heads")
    others: dict[str, Any] = {"head_dim": whole}
    if config.flag("attention_k_eq_v", False) and fewer is not None:
        others["num_key_value_heads"] = fewer
    by_layer = config.take("per_layer_config")
    if by_layer is None:
        by_layer = {str(index): others for index, slides in enumerate(sliding) if not slides}
    if not isinstance(by_layer, dict) or by_layer.keys() - set(map(str, range(len(sliding)))):
        config.refuse("per_layer_config")
    found = []
    for index in range(len(sliding)):
        own = by_layer.get(str(index), {})
        if not isinstance(own, dict) or own.keys() - _OVERRIDES:
            config.refuse("per_layer_config")
        pair = own.get("num_key_value_heads", usual[0]), own.get("head_dim", usual[1])
        if any(type(each) is not int or each < 1 for each in pair) or heads % pair[0]:
            config.refuse("per_layer_config")
        found.append(pair)
    for slides in (True, False):  # one set of tables turns all layers of a kind
        sizes = {size for (_, size), each in zip(found, sliding, strict=True) if each == slides}
        if len(sizes) > 1:
            config.refuse("per_layer_config")
    return found


def _rotations(config: Config, sliding: list[bool], sizes: list[int]) -> dict[bool, Any]:
    """How layers with a window turn, and those without."""
    rope = config.part("rope_parameters")
    parts = {True: Config({}), False: Config({"rope_type": "proportional"})}
    if rope is not None:
        for slides, name in ((True, SLIDING), (False, FULL)):
            part = rope.part(name)
            if part is None or "rope_theta" not in part:
                config.refuse("rope_parameters")
            else:
                parts[slides] = part
        rope.finish()
    found = {}
    for slides in {*sliding}:
        size = sizes[sliding.index(slides)]
        part, of_default = parts[slides], 0.25 if rope is None else 1.0
        theta, partial = (1e4, 1.0) if slides else (1e6, of_default)
        found[slides] = rotary(part, config, size, theta, partial, proportional=True)
    return found


def layer_inputs(config: Config) -> tuple[int, int]:
    """The columns of a layer's input, 0 for none, and the rows of their table."""
    size = config.stated("hidden_size_per_layer_input", 256) or 0
    if type(size) is not int or size < 0:
        config.refuse("hidden_size_per_layer_input")
    return size, config.count("vocab_size_per_layer_input", 262_144)


def _experts(config: Config, num_layers: int) -> Experts | None:
    entries = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not config.flag("enable_moe_block", False):
        for entry in entries:
            config.take(entry)
        return None
    count, chosen, width = (config.count(entry) for entry in entries)
    if chosen > count:
        config.refuse("top_k_experts")
    return Experts(
        count,
        chosen,
        width,
        layers=(True,) * num_layers,
        router=Router(
            "router.proj",
            normalizes=True,
            scale="router.scale",
            expert_scale="router.per_expert_scale",
        ),
        module="",
        graph_module="",
        beside=True,
        norms=_EXPERT_NORMS,
        activation="gelu_tanh",
    )
