"""Gemma 3n: several streams, shared keys and values, inputs of layers, gates that are cut off."""

import statistics
from collections.abc import Mapping

import numpy as np

from maskdial_export.checkpoint.gguf.common import (
    DECODER,
    QK_NORMS,
    RMS,
    head_dim,
    read_rope,
    shared,
    window_pattern,
)
from maskdial_export.checkpoint.gguf.gemma import GEMMA_NORMS
from maskdial_export.checkpoint.gguf.gemma4 import LAYER_INPUTS, by_layer
from maskdial_export.checkpoint.gguf.model import Model
from maskdial_export.checkpoint.gguf.settings import Settings
from maskdial_export.errors import ExportError

_NAMES: Mapping[str, str] = {
    "altup_proj": "altup_projections.*",
    "altup_unembd_proj": "altup_unembed_projections.*",
    "blk.{}.altup_correct_coef": "layers.{}.altup.correction_coefs",
    "blk.{}.altup_predict_coef": "layers.{}.altup.prediction_coefs",
    "blk.{}.altup_router": "layers.{}.altup.modality_router",
    "blk.{}.altup_router_norm": "layers.{}.altup.router_norm",
    "blk.{}.laurel_l": "layers.{}.laurel.linear_left",
    "blk.{}.laurel_r": "layers.{}.laurel.linear_right",
    "blk.{}.laurel_post_norm": "layers.{}.laurel.post_laurel_norm",
}
_FIRST_SHARED, _SPARSE, _SHARE = 20, 10, 0.95
"""llama.cpp's of files that say nothing, and so its own: the first layer that reads another's keys,
and how many are sparse, of which share.
"""


def gemma3n(settings: Settings) -> Model:
    """Gemma 3n."""
    count, tensors = min(settings.number(".block_count"), 2**16), settings.file.tensors
    needed = "per_layer_token_embd.weight", "blk.0.laurel_l.weight"
    table, low = (tensors.get(name) for name in needed)
    if table is None or low is None:
        raise ExportError(f"{settings.file.path} has no tensor {needed[0 if table is None else 1]}")
    pattern = window_pattern(settings, count, 5)
    local = {
        "rope_type": "default",
        "rope_theta": settings.real(".rope.freq_base_swa", 10_000.0),
    }
    config = shared(
        settings,
        model_type="gemma3n_text",
        intermediate_size=by_layer(settings, ".feed_forward_length", count),
        head_dim=head_dim(settings),
        rms_norm_eps=settings.real(RMS),
        rope_parameters={
            "full_attention": read_rope(settings, 1_000_000.0),
            "sliding_attention": local,
        },
        sliding_window=settings.number(".attention.sliding_window"),
        layer_types=["sliding_attention" if each else "full_attention" for each in pattern],
        final_logit_softcapping=settings.real(".final_logit_softcapping", 30.0),
        num_kv_shared_layers=settings.number(
            ".attention.shared_kv_layers", max(count - _FIRST_SHARED, 0)
        ),
        hidden_size_per_layer_input=settings.number(".embedding_length_per_layer_input"),
        vocab_size_per_layer_input=table.shape[0],
        altup_num_inputs=settings.number(".altup.num_inputs", 4),
        altup_active_idx=settings.number(".altup.active_idx", 0),
        laurel_rank=low.shape[0],
        activation_sparsity_pattern=_sparsity(settings, count),
    )
    return Model(
        "Gemma3nForCausalLM",
        config,
        {**DECODER, **QK_NORMS, **GEMMA_NORMS, **LAYER_INPUTS, **_NAMES},
        parameters={
            "blk.{}.altup_correct_scale.weight": "layers.{}.altup.correct_output_scale",
        },
    )


def _sparsity(settings: Settings, count: int) -> list[float]:
    """The shares that are cut off; a file has how many standard deviations that is."""
    given = settings.find(".activation_sparsity_scale")
    if given is None:
        return [_SHARE if each < _SPARSE else 0.0 for each in range(count)]
    if not isinstance(given, np.ndarray) or len(given) != count or np.isnan(given).any():
        raise ExportError(
            f"{settings.architecture}.activation_sparsity_scale of {settings.file.path} is no "
            f"list of {count:,} numbers"
        )
    normal = statistics.NormalDist()
    return [round(normal.cdf(float(each)), 6) for each in given]
