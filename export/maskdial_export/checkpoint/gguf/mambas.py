"""Models of Mamba 2 with and beside attention: Nemotron-H and Falcon-H1."""

from collections.abc import Mapping

from maskdial_export.checkpoint.gguf.common import (
    NORM,
    RMS,
    head_dim,
    read_rope,
    shared,
    width,
)
from maskdial_export.checkpoint.gguf.model import Model
from maskdial_export.checkpoint.gguf.settings import Settings
from maskdial_export.errors import ExportError

_LEAST_STEP = 1e-30  # transformers takes its logarithm
_MIXERS: Mapping[str, str] = {
    "token_embd": "embeddings",
    "output_norm": "norm_f",
    "output": "lm_head",
    "blk.{}.attn_norm": "layers.{}.norm",
    **{f"blk.{{}}.attn_{name}": f"layers.{{}}.mixer.{name}_proj" for name in "qkv"},
    "blk.{}.attn_output": "layers.{}.mixer.o_proj",
    "blk.{}.ffn_up": "layers.{}.mixer.up_proj",
    "blk.{}.ffn_down": "layers.{}.mixer.down_proj",
    "blk.{}.ffn_gate_inp": "layers.{}.mixer.gate",
    "blk.{}.ffn_up_exps": "layers.{}.mixer.experts.*.up_proj",
    "blk.{}.ffn_down_exps": "layers.{}.mixer.experts.*.down_proj",
    "blk.{}.ffn_up_shexp": "layers.{}.mixer.shared_experts.up_proj",
    "blk.{}.ffn_down_shexp": "layers.{}.mixer.shared_experts.down_proj",
}
_FED: Mapping[str, str] = {
    "token_embd": "embed_tokens",
    "output_norm": "final_layernorm",
    "output": "lm_head",
    "blk.{}.attn_norm": "layers.{}.input_layernorm",
    **{f"blk.{{}}.attn_{name}": f"layers.{{}}.self_attn.{name}_proj" for name in "qkv"},
    "blk.{}.attn_output": "layers.{}.self_attn.o_proj",
    **{
        f"blk.{{}}.ffn_{name}": f"layers.{{}}.feed_forward.{name}_proj"
        for name in ("gate", "up", "down")
    },
}


def nemotron_h(settings: Settings) -> Model:
    """Nemotron-H, with experts or without; layers that predict further tokens are left out.

    Steps in time have no lower bound, as llama.cpp and NVIDIA's kernels have none.
    """
    kinds = _mixers(settings)
    epsilon = RMS if settings.find(RMS) is not None else NORM
    settings.find(NORM)
    for key in (".rope.freq_base", ".rope.dimension_count"):  # there are no positions
        settings.find(key)
    heads, size = mamba_heads(settings)
    widths = [int(each) for each in _of_layers(settings, ".feed_forward_length") if each]
    config = shared(
        settings,
        num_kv_heads=int(max(_of_layers(settings, ".attention.head_count_kv"))),
        model_type="nemotron_h",
        num_hidden_layers=len(kinds),
        layers_block_type=kinds,
        head_dim=head_dim(settings),
        intermediate_size=max(widths, default=1),
        layer_norm_epsilon=settings.real(epsilon),
        mamba_num_heads=heads,
        mamba_head_dim=size,
        n_groups=settings.number(".ssm.group_count"),
        ssm_state_size=settings.number(".ssm.state_size"),
        conv_kernel=settings.number(".ssm.conv_kernel"),
        use_conv_bias=_has_bias(settings, "ssm_conv1d"),
        use_bias=_has_bias(settings, "ssm_in"),
        mlp_bias=_has_bias(settings, "ffn_up"),
        time_step_min=_LEAST_STEP,
    )
    if "moe" in kinds:
        config |= {
            "n_routed_experts": settings.number(".expert_count"),
            "num_experts_per_tok": settings.number(".expert_used_count"),
            "moe_intermediate_size": settings.number(".expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": settings.number(
                ".expert_shared_feed_forward_length"
            ),
            "n_shared_experts": settings.number(".expert_shared_count", 1),
            "n_group": settings.number(".expert_group_count", 1),
            "topk_group": settings.number(".expert_group_used_count", 1),
            "norm_topk_prob": settings.flag(".expert_weights_norm", False),
            "routed_scaling_factor": settings.real(".expert_weights_scale", 1.0),
        }
    return Model(
        "NemotronHForCausalLM",
        config,
        {**_MIXERS, **mamba_names("mixer")},
        squeezed=frozenset({"blk.{}.ssm_conv1d"}),
        parameters={
            **mamba_vectors("mixer"),
            "blk.{}.exp_probs_b.bias": "layers.{}.mixer.gate.e_score_correction_bias",
        },
    )


def _mixers(settings: Settings) -> list[str]:
    """What each layer is, by its heads of keys and the width of its MLP."""
    further = settings.number(".nextn_predict_layers", 0)
    heads = _of_layers(settings, ".attention.head_count_kv")
    widths = _of_layers(settings, ".feed_forward_length")
    fed = "moe" if settings.number(".expert_count", 0) else "mlp"
    kinds = [
        "full_attention" if head else fed if size else "linear_attention"
        for head, size in zip(heads, widths, strict=True)
    ]
    kinds = kinds[: len(kinds) - further]
    if "full_attention" not in kinds:
        raise ExportError(f"{settings.file.path} does not say which layers attend")
    return kinds


def _of_layers(settings: Settings, key: str) -> list[float]:
    found = settings.numbers(key, settings.number(".block_count"))
    if not found:
        raise ExportError(f"{settings.file.path} has no {settings.architecture}{key} of each layer")
    return [*found]


def falcon_h1(settings: Settings) -> Model:
    """Falcon-H1, whose multipliers are in the weights of a file."""
    heads, size = mamba_heads(settings)
    config = shared(
        settings,
        model_type="falcon_h1",
        intermediate_size=width(settings),
        head_dim=head_dim(settings),
        rms_norm_eps=settings.real(RMS),
        rope_parameters=read_rope(settings),
        attention_bias=_has_bias(settings, "attn_q"),
        mlp_bias=_has_bias(settings, "ffn_up"),
        mamba_proj_bias=_has_bias(settings, "ssm_in"),
        projectors_bias=_has_bias(settings, "ssm_out"),
        mamba_n_heads=heads,
        mamba_d_head=size,
        mamba_d_ssm=heads * size,
        mamba_n_groups=settings.number(".ssm.group_count"),
        mamba_d_state=settings.number(".ssm.state_size"),
        mamba_d_conv=settings.number(".ssm.conv_kernel"),
        mamba_conv_bias=_has_bias(settings, "ssm_conv1d"),
        mamba_rms_norm="blk.0.ssm_norm.weight" in settings.file.tensors,
        mamba_norm_before_gate=False,
    )
    return Model(
        "FalconH1ForCausalLM",
        config,
        {**_FED, **mamba_names("mamba")},
        squeezed=frozenset({"blk.{}.ssm_conv1d"}),
        # llama.cpp gives these norms no ending
        parameters={
            "blk.{}.ffn_norm": "layers.{}.pre_ff_layernorm.weight",
            **mamba_vectors("mamba"),
        },
    )


def mamba_heads(settings: Settings) -> tuple[int, int]:
    """Of Mamba 2: how many, and the columns of one. Raises: ExportError: they cannot be."""
    heads, inner = settings.number(".ssm.time_step_rank"), settings.number(".ssm.inner_size")
    if not heads or inner % heads:
        raise ExportError(f"{settings.file.path} has {heads} heads of {inner} columns in all")
    return heads, inner // heads


def _has_bias(settings: Settings, name: str) -> bool:
    return any(each.endswith(f".{name}.bias") for each in settings.file.tensors)


def mamba_names(module: str) -> dict[str, str]:
    """The modules of Mamba 2, as `Model.names`, by its own in a layer."""
    return {
        "blk.{}.ssm_in": f"layers.{{}}.{module}.in_proj",
        "blk.{}.ssm_conv1d": f"layers.{{}}.{module}.conv1d",
        "blk.{}.ssm_out": f"layers.{{}}.{module}.out_proj",
    }


def mamba_vectors(module: str) -> dict[str, str]:
    """Its other weights, as `Model.parameters`."""
    return {
        "blk.{}.ssm_a": f"layers.{{}}.{module}.A_log",
        "blk.{}.ssm_d": f"layers.{{}}.{module}.D",
        "blk.{}.ssm_dt.bias": f"layers.{{}}.{module}.dt_bias",
        "blk.{}.ssm_norm.weight": f"layers.{{}}.{module}.norm.weight",
    }
