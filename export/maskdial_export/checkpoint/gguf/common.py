"""What descriptions of models share: entries of the configuration, positions, pooling, names."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from maskdial_export.checkpoint.gguf.model import Config, Model
from maskdial_export.checkpoint.gguf.settings import Settings
from maskdial_export.checkpoint.gguf.weights import read_values
from maskdial_export.errors import ExportError

RMS, NORM = ".attention.layer_norm_rms_epsilon", ".attention.layer_norm_epsilon"
_MEAN, _CLS, _LAST, _RANK = 1, 2, 3, 4  # pooling types
_POOLINGS = {_MEAN: "mean_tokens", _CLS: "cls_token", _LAST: "lasttoken"}
# What an entry that nobody reads has to be, to say nothing; all others 0, false or a text
_OF_HEADS = (".attention.key_length", ".attention.value_length", ".rope.dimension_count")
_FACTORS = (
    *(".rope.scaling.attn_factor", ".rope.scaling.yarn_attn_factor", ".rope.scaling.factor"),
    *(".attention.scale", ".embedding_scale", ".residual_scale", ".logit_scale"),
)
# Counts that tensors have as well, the origin of a scaling, the base of windows without any, yarn's
# parameters where positions are not scaled by it, and the tokens of an image
_MEANINGLESS = re.compile(
    r"\.vocab_size|\.dense_[23]_feat_(in|out)|\.rope\.scaling\.(finetuned|original_context_length)|"
    r"\.rope\.freq_base_swa|\.context_length|\.expert_used_count|"
    r"\.rope\.scaling\.yarn_beta_(fast|slow)|\.mm\.tokens_per_image"
)
# Parameters of llama3 scaling that models were trained with: low and high frequency, positions
_LLAMA3 = [
    (low, high, positions)
    for positions in (8192, 4096, 2048, 16384, 32768)
    for low, high in ((1.0, 4.0), (1.0, 2.0), (1.0, 8.0), (1.0, 32.0))
]

# Layers of nearly all decoders: name in the file -> name in transformers
DECODER: Mapping[str, str] = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "layers.{}.input_layernorm",
    "blk.{}.attn_q": "layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "layers.{}.mlp.down_proj",
}
QK_NORMS: Mapping[str, str] = {
    "blk.{}.attn_q_norm": "layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "layers.{}.self_attn.k_norm",
}


def shared(settings: Settings, num_kv_heads: int | None = None, **config: Any) -> Config:
    """The entries that nearly all models have."""
    tokens = settings.file.tensors.get("token_embd.weight")
    if tokens is None or len(tokens.shape) != 2:
        raise ExportError(f"{settings.file.path} has no matrix token_embd.weight")
    heads = num_heads(settings)
    shared: Config = {
        "vocab_size": tokens.shape[0],
        "hidden_size": settings.number(".embedding_length"),
        "num_hidden_layers": settings.number(".block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": num_kv_heads or settings.number(".attention.head_count_kv", heads),
        "max_position_embeddings": settings.number(".context_length"),
        "tie_word_embeddings": "output.weight" not in settings.file.tensors,
    }
    for role in ("bos", "eos", "pad"):
        key = f"tokenizer.ggml.{'padding' if role == 'pad' else role}_token_id"
        index = settings.find(key)
        inside = type(index) is int and 0 <= index < tokens.shape[0]
        shared[f"{role}_token_id"] = index if inside else None
    return shared | config


def num_heads(settings: Settings) -> int:
    """Of queries. Raises: ExportError: there are none."""
    heads = settings.number(".attention.head_count")
    if heads == 0:
        raise ExportError(f"the attention of {settings.file.path} has no heads")
    return heads


def width(settings: Settings) -> int:
    return settings.number(".feed_forward_length")


def head_dim(settings: Settings) -> int:
    """The width of a head. Raises: ExportError: there is none."""
    usual = settings.number(".embedding_length") // num_heads(settings)
    size = settings.number(".attention.key_length", usual)
    if size == 0:
        raise ExportError(f"heads of the attention of {settings.file.path} have no width")
    return size


def read_rope(settings: Settings, theta: float = 10_000.0) -> Config:
    """The settings of rotary positions, with their scaling."""
    rope: Config = {
        "rope_type": "default",
        "rope_theta": settings.real(".rope.freq_base", theta),
    }
    kind = settings.text(".rope.scaling.type", "linear")
    factor = settings.real(".rope.scaling.factor", settings.real(".rope.scale_linear", 1.0))
    if kind == "linear" and factor not in (0.0, 1.0):
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        rope |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": settings.number(
                ".rope.scaling.original_context_length"
            ),
        }
        for theirs, ours in (
            ("attention_factor", ".rope.scaling.yarn_attn_factor"),
            ("beta_fast", ".rope.scaling.yarn_beta_fast"),
            ("beta_slow", ".rope.scaling.yarn_beta_slow"),
        ):
            if settings.find(ours) is not None:
                rope[theirs] = settings.real(ours)
    elif kind == "longrope":
        rope |= longrope(settings)
    elif kind not in ("none", "linear"):
        raise ExportError(
            f"the positions of {settings.file.path} are scaled by {kind!r}, which is not supported"
        )
    if "rope_freqs.weight" in settings.file.tensors:
        rope |= _llama3(settings, rope["rope_theta"])
    return rope


def read_factors(settings: Settings, name: str) -> list[float]:
    """A vector. Raises: ExportError: there is none of that name."""
    tensor = settings.file.tensors.get(name)
    if tensor is None:
        raise ExportError(f"{settings.file.path} has no tensor {name}")
    return [float(each) for each in read_values(tensor).flatten()]


def longrope(settings: Settings) -> Config:
    length = settings.number(".context_length")
    positions = settings.number(".rope.scaling.original_context_length", length)
    rope: Config = {
        "rope_type": "longrope",
        "short_factor": read_factors(settings, "rope_factors_short.weight"),
        "long_factor": read_factors(settings, "rope_factors_long.weight"),
        "original_max_position_embeddings": positions,
        "factor": length / max(positions, 1),
    }
    if settings.find(".rope.scaling.attn_factor") is not None:
        rope["attention_factor"] = settings.real(".rope.scaling.attn_factor")
    return rope


def _llama3(settings: Settings, theta: float) -> Config:
    """The scaling of Llama 3, of which the file has only the divisors of the frequencies."""
    found = np.array(read_factors(settings, "rope_freqs.weight"), np.float32)
    if np.all(found == 1):
        return {}
    size = 2 * len(found)
    wavelengths = 2 * np.pi * theta ** (np.arange(0, size, 2) / size)
    factor = float(found.max())
    for low, high, positions in _LLAMA3:
        smooth = np.clip((positions / wavelengths - low) / (high - low), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if np.allclose(expected, found, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": positions,
            }
    raise ExportError(
        f"rope_freqs.weight of {settings.file.path} divides frequencies in a way that is not "
        "that of Llama 3, which is not supported"
    )


def embedding(settings: Settings, model: str, config: Config) -> tuple[str, str, str | None]:
    """The class, the prefix of its names, and how it pools: a decoder may be one of embeddings.

    Such a decoder may read both ways, which ``config`` then says.
    """
    pooling = settings.number(".pooling_type", 0)
    if pooling == 0:
        return f"{model}ForCausalLM", "model.", None
    if not settings.flag(".attention.causal", True):
        config["is_causal"] = False
    return f"{model}Model", "", read_pooling(settings)


def check_unread(settings: Settings, model: Model) -> None:
    """Refuses what an architecture's metadata says and nobody has read, unless it says nothing.

    Raises:
        ExportError: there is such an entry.
    """
    usual = {
        ".attention.causal": model.architecture.endswith(("ForCausalLM", "LMHeadModel")),
        **dict.fromkeys(_OF_HEADS, head_dim(settings)),
        **dict.fromkeys(_FACTORS, 1),
        ".rope.scaling.yarn_ext_factor": int(settings.find(".rope.scaling.type") == "yarn"),
    }
    if "rms_norm_eps" in model.config:  # its norms are none of the kind that has the other
        settings.find(NORM)
    for key, value in settings.unread():
        if _MEANINGLESS.fullmatch(key) or isinstance(value, str):
            continue
        different = {*value} if isinstance(value, list | np.ndarray) else {value}
        if different - {usual.get(key, 0)}:
            raise ExportError(
                f"{settings.architecture}{key} of {settings.file.path} is {_shown(value)}, which "
                "is not supported as GGUF; export the checkpoint that it was made from"
            )


def _shown(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, np.ndarray) else value)[:50]


def read_pooling(settings: Settings) -> str | None:
    kind = settings.number(".pooling_type", 0)
    if kind == _RANK or any(name.startswith("cls.") for name in settings.file.tensors):
        raise ExportError(
            f"{settings.file.path} is a reranker or classifier of {settings.architecture!r}, and "
            "only RoBERTa's and Qwen3-Reranker are supported as GGUF; export the checkpoint that "
            "it was made from"
        )
    if kind not in (0, *_POOLINGS):
        raise ExportError(f"{settings.file.path} pools in the way {kind}, which does not exist")
    return _POOLINGS.get(kind)


def ranks_by_rows(settings: Settings) -> Config | None:
    """What says that a file is a reranker of two rows of its output layer; None if it is none.

    Raises:
        ExportError: its labels are not two.
    """
    head = settings.file.tensors.get("cls.output.weight")
    if head is None or settings.number(".pooling_type", 0) != _RANK:
        return None
    labels = settings.texts(".classifier.output_labels")
    if len(labels) != 2 or len(set(labels)) != 2 or head.shape[0] != 2:
        raise ExportError(
            f"{settings.file.path} ranks by {head.shape[0]} rows and the labels "
            f"{', '.join(map(str, labels))[:100]}; a match and none, two different ones, are known"
        )
    # llama.cpp takes the first one's share as the score
    return {"id2label": {"0": labels[0], "1": labels[1]}, "classifier_from_token": labels[::-1]}


def check_ranks(settings: Settings) -> None:
    """Refuses a classifier that reads vectors otherwise than by the first token."""
    kind = settings.number(".pooling_type", _RANK)
    if kind != _RANK:
        raise ExportError(
            f"{settings.file.path} has a classifier, and pools in the way {kind}, which is not "
            "supported"
        )


def window_pattern(settings: Settings, num_layers: int, period: int) -> list[bool]:
    """Whether each layer attends within the window; of a period, the last one does not."""
    given = settings.find(".attention.sliding_window_pattern")
    if isinstance(given, np.ndarray) and len(given) == num_layers:
        return [bool(each) for each in given]
    period = settings.number(".attention.sliding_window_pattern", period)
    return [bool(period) and (layer + 1) % period != 0 for layer in range(num_layers)]
