"""The text part of a model that also reads images or sound: configuration, and weights' names.

On text alone such a model computes what its text part computes; the tracer compares both. Towers
are left out.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from maskdial_export.direct.decoder import NotDirectError
from maskdial_export.direct.weights import SafetensorsWeights

_ROLES = ("pad_token_id", "bos_token_id", "eos_token_id")
_MEDIA = re.compile(
    r"(audio|image|video|vision)\w*_token_(id|index)|(bo[aiv]|eo[aiv])_token_(id|index)"
)
# What else a wrapper says and its text part does not need
_IGNORED = frozenset(
    {
        *("architectures", "dtype", "initializer_range", "model_type", "text_config"),
        *("tie_word_embeddings", "torch_dtype", "transformers_version", "vision_config"),
        *("mm_tokens_per_image", "spatial_merge_size", "vision_feature_layer", "use_cache"),
        *("audio_config", "audio_soft_tokens_per_image", "vision_soft_tokens_per_image"),
        *("multimodal_projector_bias", "projector_hidden_act", "language_model_only"),
        *_ROLES,
    }
)
_VISION = ("model.vision_tower", "model.multi_modal_projector")
_TOWERS = ("model.vision_tower", "model.embed_vision", "model.audio_tower", "model.embed_audio")
_QWEN_VISION = ("model.visual",)


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A class of models that also read images.

    Attributes:
        architecture: transformers' class.
        left_out: the paths of its modules that text does without; some lack those of sound.
        kinds: the ``model_type`` of its text part, and that of the family that it is.
        defaults: what its text part says where its configuration says nothing.
        always: entries of the text part that the whole model has, whatever the file says.
        tied: whether its output layer's weight is the embedding table, unless it says otherwise.
    """

    architecture: str
    left_out: tuple[str, ...]
    kinds: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text part of a checkpoint.

    Attributes:
        architecture: the whole model's class.
        config: as the text part's own config.json would say it.
        left_out: the paths of the modules that are left out.
        media_tokens: the tokens that stand for images.
    """

    architecture: str
    config: Mapping[str, Any]
    left_out: tuple[str, ...]
    media_tokens: tuple[int, ...]


def text_part(config: Mapping[str, Any]) -> TextPart | None:
    """The text part of a configuration; None if that is no wrapper's that is known.

    Raises:
        NotDirectError: it says what is not known.
    """
    wrapper = _WRAPPERS.get(str(config.get("model_type")))
    if wrapper is None:
        return None
    text = config.get("text_config")
    kind = str(text.get("model_type")) if isinstance(text, dict) else ""
    if config.get("architectures") != [wrapper.architecture] or kind not in wrapper.kinds:
        raise NotDirectError(
            f"{config.get('architectures')} around a text model {kind!r} is not known to the "
            "direct path"
        )
    for key, value in config.items():
        if key not in _IGNORED and not _MEDIA.fullmatch(key) and value is not None:
            raise NotDirectError(f"{key} in config.json is not known to the direct path")
    assert isinstance(text, dict), "it has a model_type"
    outer = {role: config[role] for role in _ROLES if config.get(role) is not None}
    found = {**wrapper.defaults, **text, **outer, **wrapper.always}
    found["model_type"] = wrapper.kinds[kind]
    found.pop("architectures", None)
    tied = config.get("tie_word_embeddings")  # the whole model's, whatever its text part says
    found["tie_word_embeddings"] = wrapper.tied if tied is None else tied
    size = int(found.get("vocab_size") or 0)
    media = {
        value
        for key, value in config.items()
        if _MEDIA.fullmatch(key) and type(value) is int and 0 <= value < size
    }
    hears = config.get("audio_config") is not None
    left_out = tuple(path for path in wrapper.left_out if hears or "audio" not in path)
    return TextPart(wrapper.architecture, found, left_out, tuple(sorted(media)))


def architectures() -> frozenset[str]:
    """transformers' classes that are known."""
    return frozenset(each.architecture for each in _WRAPPERS.values())


def text_weights(weights: SafetensorsWeights, part: TextPart) -> SafetensorsWeights:
    """The text part's weights, by the names that they have in a checkpoint of it alone."""
    towers = tuple(f"{each}." for path in part.left_out for each in (path, path[len("model.") :]))

    def rename(name: str) -> str | None:
        if name.startswith(towers):
            return None
        for theirs, ours in _PREFIXES.items():
            if name.startswith(theirs):
                return ours + name[len(theirs) :]
        return name

    return weights.renamed(rename)


_PREFIXES = {
    "language_model.model.": "model.",  # of transformers 4, and of files that 5 writes for it
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_GEMMA3 = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
}
_WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper(
        "Gemma3ForConditionalGeneration",
        _VISION,
        {"gemma3_text": "gemma3_text"},
        _GEMMA3,
        always={"final_logit_softcapping": None},
        tied=True,
    ),
    "gemma3n": Wrapper(
        "Gemma3nForConditionalGeneration", _TOWERS, {"gemma3n_text": "gemma3n_text"}, tied=True
    ),
    "gemma4": Wrapper(
        "Gemma4ForConditionalGeneration",
        _TOWERS,
        {"gemma4_text": "gemma4_text"},
        tied=True,
    ),
    "mistral3": Wrapper(
        "Mistral3ForConditionalGeneration",
        _VISION,
        {"ministral3": "ministral3", "mistral": "mistral"},
        tied=True,
    ),
    "qwen3_5": Wrapper(
        "Qwen3_5ForConditionalGeneration", _QWEN_VISION, {"qwen3_5_text": "qwen3_5_text"}
    ),
    "qwen3_5_moe": Wrapper(
        "Qwen3_5MoeForConditionalGeneration",
        _QWEN_VISION,
        {"qwen3_5_moe_text": "qwen3_5_moe_text"},
    ),
    "qwen3_vl": Wrapper(
        "Qwen3VLForConditionalGeneration", _QWEN_VISION, {"qwen3_vl_text": "qwen3"}
    ),
    "qwen3_vl_moe": Wrapper(
        "Qwen3VLMoeForConditionalGeneration",
        _QWEN_VISION,
        {"qwen3_vl_moe_text": "qwen3_moe"},
        always={"norm_topk_prob": True},
    ),
}
