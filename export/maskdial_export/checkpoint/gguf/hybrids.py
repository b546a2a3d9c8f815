"""Models with recurrent layers beside attention: Qwen3.5 and LFM2."""

from maskdial_export.checkpoint.gguf.common import (
    DECODER,
    QK_NORMS,
    RMS,
    head_dim,
    read_pooling,
    read_rope,
    shared,
    width,
)
from maskdial_export.checkpoint.gguf.model import Model, ValueHeads
from maskdial_export.checkpoint.gguf.settings import Settings
from maskdial_export.errors import ExportError

_QUERIES_AND_KEYS = 2
_MAX_LAYERS = 2**10


def qwen35(settings: Settings) -> Model:
    """Qwen3.5: gated delta nets. A layer that predicts further tokens is left out."""
    num_layers = settings.number(".block_count") - settings.number(".nextn_predict_layers", 0)
    interval = max(settings.number(".full_attention_interval", 4), 1)
    size = head_dim(settings)
    keys = settings.number(".ssm.group_count")
    values = settings.number(".ssm.time_step_rank")
    key_size = settings.number(".ssm.state_size")
    if not (size and keys and values and values % keys == 0 and 0 < num_layers <= _MAX_LAYERS):
        raise ExportError(
            f"{settings.file.path} has {num_layers:,} layers of {keys:,} key heads and "
            f"{values:,} value heads of a linear attention, which cannot be"
        )
    value_size = settings.number(".ssm.inner_size") // values
    config = shared(
        settings,
        model_type="qwen3_5_text",
        num_hidden_layers=num_layers,
        intermediate_size=width(settings),
        head_dim=size,
        rms_norm_eps=settings.real(RMS),
        linear_conv_kernel_dim=settings.number(".ssm.conv_kernel"),
        linear_key_head_dim=key_size,
        linear_num_key_heads=keys,
        linear_num_value_heads=values,
        linear_value_head_dim=value_size,
        layer_types=[
            "linear_attention" if (layer + 1) % interval else "full_attention"
            for layer in range(num_layers)
        ],
        rope_parameters=read_rope(settings)
        | {
            "partial_rotary_factor": settings.number(".rope.dimension_count", size // 4) / size,
            "mrope_section": [
                int(each) for each in settings.numbers(".rope.dimension_sections", 4) or () if each
            ],
            "mrope_interleaved": True,
        },
    )
    names = {
        **DECODER,
        **QK_NORMS,
        "blk.{}.post_attention_norm": "layers.{}.post_attention_layernorm",
        "blk.{}.attn_qkv": "layers.{}.linear_attn.in_proj_qkv",
        "blk.{}.attn_gate": "layers.{}.linear_attn.in_proj_z",
        "blk.{}.ssm_alpha": "layers.{}.linear_attn.in_proj_a",
        "blk.{}.ssm_beta": "layers.{}.linear_attn.in_proj_b",
        "blk.{}.ssm_conv1d": "layers.{}.linear_attn.conv1d",
        "blk.{}.ssm_norm": "layers.{}.linear_attn.norm",
        "blk.{}.ssm_out": "layers.{}.linear_attn.out_proj",
    }
    return Model(
        "Qwen3_5ForCausalLM",
        config,
        names,
        shifted=True,
        squeezed=frozenset({"blk.{}.ssm_conv1d"}),
        parameters={
            "blk.{}.ssm_a": "layers.{}.linear_attn.A_log",
            "blk.{}.ssm_dt.bias": "layers.{}.linear_attn.dt_bias",
        },
        value_heads=ValueHeads(
            keys, values // keys, value_size, _QUERIES_AND_KEYS * keys * key_size
        ),
    )


def lfm2(settings: Settings) -> Model:
    """LFM2: short convolutions, in layers that have no heads of keys."""
    num_layers = settings.number(".block_count")
    heads = settings.numbers(".attention.head_count_kv", num_layers)
    if not heads or max(heads) < 1:
        raise ExportError(f"{settings.file.path} does not say which layers attend")
    config = shared(
        settings,
        num_kv_heads=int(max(heads)),
        model_type="lfm2",
        intermediate_size=width(settings),
        block_auto_adjust_ff_dim=False,
        norm_eps=settings.real(RMS),
        conv_L_cache=settings.number(".shortconv.l_cache"),
        conv_bias="blk.0.shortconv.in_proj.bias" in settings.file.tensors,
        layer_types=["full_attention" if each else "conv" for each in heads],
        rope_parameters=read_rope(settings),
    )
    names = {
        "token_embd": "embed_tokens",
        "token_embd_norm": "embedding_norm",
        "output": "lm_head",
        "blk.{}.attn_norm": "layers.{}.operator_norm",
        "blk.{}.attn_q": "layers.{}.self_attn.q_proj",
        "blk.{}.attn_k": "layers.{}.self_attn.k_proj",
        "blk.{}.attn_v": "layers.{}.self_attn.v_proj",
        "blk.{}.attn_output": "layers.{}.self_attn.out_proj",
        "blk.{}.attn_q_norm": "layers.{}.self_attn.q_layernorm",
        "blk.{}.attn_k_norm": "layers.{}.self_attn.k_layernorm",
        "blk.{}.ffn_norm": "layers.{}.ffn_norm",
        "blk.{}.ffn_gate": "layers.{}.feed_forward.w1",
        "blk.{}.ffn_up": "layers.{}.feed_forward.w3",
        "blk.{}.ffn_down": "layers.{}.feed_forward.w2",
        "blk.{}.shortconv.in_proj": "layers.{}.conv.in_proj",
        "blk.{}.shortconv.out_proj": "layers.{}.conv.out_proj",
        "blk.{}.shortconv.conv": "layers.{}.conv.conv",
    }
    if read_pooling(settings) is not None:
        raise ExportError(
            f"{settings.file.path} is an LFM2 of embeddings, which is not supported as GGUF; "
            "export the checkpoint that it was made from"
        )
    return Model("Lfm2ForCausalLM", config, names, squeezed=frozenset({"blk.{}.shortconv.conv"}))
