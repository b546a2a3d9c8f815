"""GGUF files of tiny models, written as llama.cpp's converter does, by the gguf package's names."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

Array = NDArray[Any]
Fill = Callable[[gguf.GGUFWriter], None]
Rename = Callable[[str, Array, Any], Iterator[tuple[str, Array]]]

_NAMES = {each: kind for kind, each in gguf.MODEL_ARCH_NAMES.items()}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPECIAL = ("<|begin|>", "<|end|>", "<|pad|>")
TEMPLATE = "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}"


def byte_level(writer: gguf.GGUFWriter) -> None:
    """A vocabulary of all bytes, two merges and special tokens."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", *SPECIAL, "<think>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([NORMAL] * 258 + [CONTROL] * 3 + [USER_DEFINED])
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(259)
    writer.add_pad_token_id(260)
    writer.add_chat_template(TEMPLATE)


BYTE_LEVEL_SIZE = 262


def word_pieces(writer: gguf.GGUFWriter) -> None:
    """Letters, at the start of words with a mark, and the special tokens of BERT."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = "abcdefghijklmnopqrstuvwxyz.,"
    tokens = [*special, *(f"▁{each}" for each in letters), *letters]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL] * 5 + [NORMAL] * (len(tokens) - 5))
    for add, index in (
        (writer.add_pad_token_id, 0),
        (writer.add_unk_token_id, 1),
        (writer.add_bos_token_id, 2),
        (writer.add_sep_token_id, 3),
        (writer.add_mask_token_id, 4),
    ):
        add(index)


WORD_PIECES_SIZE = 61


def make_model(architecture: str, **settings: Any) -> Any:
    """A model of random weights, including biases and norms."""
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.mul_(1 + 0.1 * torch.randn_like(buffer))
    return model.eval()


def permute(weights: Array, heads: int) -> Array:
    """Rows of queries or keys, as the converter of Llama orders them."""
    shape = (heads, 2, len(weights) // heads // 2, *weights.shape[1:])
    return weights.reshape(shape).swapaxes(1, 2).reshape(weights.shape)


def plain(name: str, values: Array, _config: Any) -> Iterator[tuple[str, Array]]:
    yield name, values


def as_llama(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    if ".q_proj." in name:
        values = permute(values, config.num_attention_heads)
    if ".k_proj." in name:
        values = permute(values, config.num_key_value_heads)
    yield from as_experts(name, values, config)


def as_experts(name: str, values: Array, _config: Any) -> Iterator[tuple[str, Array]]:
    """The converter has gate and up of all experts as two tensors."""
    if name.endswith("experts.gate_up_proj"):
        middle = values.shape[1] // 2
        yield name.replace("gate_up_proj", "gate_proj") + ".weight", values[:, :middle]
        yield name.replace("gate_up_proj", "up_proj") + ".weight", values[:, middle:]
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", values
    else:
        yield name, values


def as_gemma(name: str, values: Array, _config: Any) -> Iterator[tuple[str, Array]]:
    yield name, values + 1 if name.endswith("norm.weight") else values


def as_gemma4(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """The numbers of layers and routers are scales of llama.cpp's own."""
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("layer_scalar"):
        yield f"blk.{layer}.layer_output_scale.weight", values
    elif name.endswith("router.scale"):
        yield f"blk.{layer}.ffn_gate_inp.scale", values
    elif name.endswith("router.per_expert_scale"):
        yield f"blk.{layer}.ffn_down_exps.scale", values
    elif name.endswith("experts.gate_up_proj"):
        yield f"blk.{layer}.ffn_gate_up_exps.weight", values
    else:
        yield from as_experts(name, values, config)


def as_gemma3n(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """Numbered matrices of streams are one tensor."""
    number = re.fullmatch(r"model\.(altup_\w+)\.(\d)\.weight", name)
    if number is None:
        end = ".weight" if name.endswith("_scale") else ""
        yield name + end, values
        return
    _STACKED.setdefault(number[1], []).append(values)
    if len(_STACKED[number[1]]) == config.altup_num_inputs - 1:
        yield f"model.{number[1]}.weight", np.stack(_STACKED.pop(number[1]))


_STACKED: dict[str, list[Array]] = {}


def as_gpt2(name: str, values: Array, _config: Any) -> Iterator[tuple[str, Array]]:
    is_matrix = re.search(r"\.c_(attn|proj|fc)\.weight$", name)
    yield name, values.T if is_matrix else values


def as_nomic(name: str, values: Array, _config: Any) -> Iterator[tuple[str, Array]]:
    """Names of the original checkpoints; three rows of the names that transformers has stand for
    one matrix, which newer files may have in three parts, too."""
    for theirs, original in (
        ("embeddings.LayerNorm", "emb_ln"),
        ("post_attention_layernorm", "norm1"),
        ("post_mlp_layernorm", "norm2"),
        ("up_proj", "fc11"),
        ("gate_proj", "fc12"),
        ("down_proj", "fc2"),
        ("self_attn.o_proj", "attn.out_proj"),
    ):
        name = name.replace(theirs, original)
    part = re.fullmatch(r"layers\.(\d)\.self_attn\.([qkv])_proj\.weight", name)
    if part is not None:
        yield f"blk.{part[1]}.attn_{part[2]}.weight", values
    else:
        yield re.sub(r"^layers", "encoder.layers", name), values


def as_lfm2(name: str, values: Array, _config: Any) -> Iterator[tuple[str, Array]]:
    yield name, values.squeeze(1) if name.endswith("conv.conv.weight") else values


def as_qwen35(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """Norms plus one, decays instead of their logarithms, and values by their place in a group."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads

    def tiled(part: Array, size: int) -> Array:
        shape = (keys, heads // keys, size, *part.shape[1:])
        return part.reshape(shape).swapaxes(0, 1).reshape(part.shape)

    size = config.linear_value_head_dim
    offset = 2 * keys * config.linear_key_head_dim
    if name.endswith("norm.weight") and "linear_attn.norm" not in name:
        values = values + 1
    elif name.endswith("A_log"):
        values = tiled(-np.exp(values), 1)
    elif name.endswith("dt_bias"):
        name, values = name.replace("dt_bias", "dt_proj.bias"), tiled(values, 1)
    elif name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
        values = tiled(values, 1)
    elif name.endswith("in_proj_z.weight"):
        values = tiled(values, size)
    elif name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        values = np.concatenate([values[:offset], tiled(values[offset:], size)])
        values = values.squeeze(1) if "conv1d" in name else values
    elif name.endswith("linear_attn.out_proj.weight"):
        values = tiled(values.T, size).T
    yield name, values


def as_lfm2_moe(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    numbers = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for part, rows in as_experts(name, values, config):
        for theirs, number in numbers.items() if "experts" in part else ():
            part = part.replace(f"experts.{theirs}", f"experts.{number}")
        part = part.replace("model.layers", "layers") if "experts.w" in part else part
        if part.endswith("expert_bias"):
            part = f"{part}.bias"
        yield from as_lfm2(part, rows, config)


def as_qwen35_moe(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    for part, rows in as_experts(name, values, config):
        yield from as_qwen35(part, rows, config)


def as_qwen3_next(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """Norms plus one, decays instead of their logarithms, and gates in a matrix of their own."""
    if name.endswith("in_proj_qkvz.weight"):
        layer, keys = name.split(".")[2], config.linear_num_key_heads
        size = config.linear_value_head_dim * config.linear_num_value_heads // keys
        heads = values.reshape(keys, -1, values.shape[1])
        edges = np.cumsum([config.linear_key_head_dim] * 2 + [size])
        *parts, gates = (
            part.reshape(-1, values.shape[1]) for part in np.split(heads, edges, axis=1)
        )
        yield f"blk.{layer}.attn_qkv.weight", np.concatenate(parts)
        yield f"blk.{layer}.attn_gate.weight", gates
        return
    if name.endswith("norm.weight") and "linear_attn.norm" not in name:
        values = values + 1
    elif name.endswith("A_log"):
        values = -np.exp(values)
    elif name.endswith("conv1d.weight"):
        values = values.squeeze(1)
    name = name.replace("dt_bias", "dt_proj.bias")
    yield from as_experts(name, values, config)


def as_mamba(name: str, values: Array, groups: int) -> Iterator[tuple[str, Array]]:
    """Vectors of Mamba 2 get a second dimension."""
    if name.endswith("A_log"):
        values = -np.exp(values)[:, None]
    elif name.endswith((".D", "dt_bias")):
        values = values if name.endswith("dt_bias") else values[:, None]
        name = name.replace("dt_bias", "dt_proj.bias")
    elif name.endswith("conv1d.weight"):
        values = values.squeeze(1)
    elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        values = values.reshape(groups, -1)
    yield name, values


def as_falcon_h1(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    yield from as_mamba(name, values, config.mamba_n_groups)


def as_nemotron_h(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """The map has the names of NVIDIA's checkpoints."""
    layer = name.split(".")[2] if ".layers." in name else ""
    name = re.sub(r"^model\.", "backbone.", name)
    if "mixer.experts." in name:
        part = "up" if "up_proj" in name else "down"
        yield f"blk.{layer}.ffn_{part}_exps.weight", values
    elif name.endswith("e_score_correction_bias"):
        yield f"blk.{layer}.exp_probs_b.bias", values
    else:
        yield from as_mamba(name, values, config.n_groups)


def as_granite_hybrid(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """Gate and up of each MLP are two tensors."""
    layer = name.split(".")[2] if ".layers." in name else ""
    end = "_shexp" if config.num_local_experts else ""
    if "shared_mlp" in name:
        if "output_linear" in name:
            yield f"blk.{layer}.ffn_down{end}.weight", values
            return
        for part, rows in zip(("gate", "up"), np.split(values, 2), strict=True):
            yield f"blk.{layer}.ffn_{part}{end}.weight", rows
    elif ".mamba." in name:
        yield from as_mamba(name, values, config.mamba_n_groups)
    elif "block_sparse_moe.experts" in name:
        ends = {"gate_proj": "gate_exps", "up_proj": "up_exps", "down_proj": "down_exps"}
        for part, rows in as_experts(name, values, config):
            (which,) = (each for each in ends if f".{each}." in part)
            yield f"blk.{layer}.ffn_{ends[which]}.weight", rows
    elif "block_sparse_moe" in name:
        yield f"blk.{layer}.ffn_gate_inp.weight", values
    else:
        yield from as_llama(name, values, config)


def as_granite_moe(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    layer = name.split(".")[2] if ".layers." in name else ""
    if "block_sparse_moe" not in name:
        yield from as_llama(name, values, config)
    elif "experts" not in name:
        yield f"blk.{layer}.ffn_gate_inp.weight", values
    elif "down_proj" in name:
        yield f"blk.{layer}.ffn_down_exps.weight", values
    else:
        for part, rows in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
            yield f"blk.{layer}.ffn_{part}_exps.weight", rows


def as_glm4_moe(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    if name.endswith("e_score_correction_bias"):
        yield f"blk.{name.split('.')[2]}.exp_probs_b.bias", values
    else:
        yield from as_experts(name, values, config)


def as_deepseek(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    """The product of keys and values is two tensors, and that of keys is turned."""
    if not name.endswith("kv_b_proj.weight"):
        yield from as_glm4_moe(name, values, config)
        return
    sizes, layer = [config.qk_nope_head_dim, config.v_head_dim], name.split(".")[2]
    heads = values.reshape(config.num_attention_heads, sum(sizes), -1)
    keys, rows = np.split(heads, sizes[:1], axis=1)
    yield f"blk.{layer}.attn_k_b.weight", keys.swapaxes(1, 2)
    yield f"blk.{layer}.attn_v_b.weight", rows


def as_gpt_oss(name: str, values: Array, _config: Any) -> Iterator[tuple[str, Array]]:
    """Rows of gate and up, which take turns in transformers' matrices of all experts."""
    layer = name.split(".")[2] if ".layers." in name else ""
    end = "bias" if name.endswith("_bias") else "weight"
    if "experts." in name:
        rows = values if end == "bias" else values.swapaxes(1, 2)
        if "down_proj" in name:
            yield f"blk.{layer}.ffn_down_exps.{end}", rows
        else:
            yield f"blk.{layer}.ffn_gate_exps.{end}", rows[:, ::2]
            yield f"blk.{layer}.ffn_up_exps.{end}", rows[:, 1::2]
    elif name.endswith("sinks"):
        yield f"{name}.weight", values
    else:
        yield name, values


def as_roberta(name: str, values: Array, config: Any) -> Iterator[tuple[str, Array]]:
    is_positions = name.endswith("position_embeddings.weight")
    yield name, values[config.pad_token_id + 1 :] if is_positions else values


def write_gguf(
    path: Path,
    architecture: str,
    model: Any,
    fill: Fill,
    rename: Rename = plain,
    quantize: Mapping[str, str] | None = None,
    max_tensors: int = 0,
) -> Path:
    """Writes a model.

    Args:
        path: the file.
        architecture: llama.cpp's name of it.
        model: transformers'.
        fill: adds the metadata.
        rename: what the converter makes of a weight.
        quantize: the type of each tensor that is to be quantized, by an end of its name.
        max_tensors: how many each part has; 0 for a single file.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=max_tensors)
    fill(writer)
    num_layers = model.config.num_hidden_layers
    names = gguf.get_tensor_name_map(_NAMES[architecture], num_layers)
    tied = model.config.tie_word_embeddings
    for name, parameter in model.state_dict().items():
        if (name == "lm_head.weight" and tied) or name.startswith("pooler."):
            continue
        for part, values in rename(name, parameter.numpy(), model.config):
            stored = names.get_name(part, try_suffixes=(".weight", ".bias"))
            stored = part if part.startswith("blk.") else stored
            assert stored is not None, part
            _add(writer, stored, np.ascontiguousarray(values), quantize or {})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, values: Array, quantize: Mapping[str, str]) -> None:
    kind = next((kind for end, kind in quantize.items() if name.endswith(end)), None)
    if kind is None or values.ndim < 2:
        writer.add_tensor(name, values)
        return
    of = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(values, of), raw_dtype=of)


def basics(writer: gguf.GGUFWriter, config: Any) -> None:
    """The entries that nearly all models have."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if hasattr(config, "intermediate_size"):
        writer.add_feed_forward_length(config.intermediate_size)
    if hasattr(config, "num_key_value_heads"):
        writer.add_head_count_kv(config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
