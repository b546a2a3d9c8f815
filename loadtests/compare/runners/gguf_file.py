"""A Llama checkpoint as a GGUF file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file

_FILE_TYPES = {"F32": 0, "Q4_0": 2, "Q8_0": 7}
_PLAIN, _CONTROL = 1, 3
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(checkpoint: Path, path: Path, kind: str) -> None:
    """Writes weights of ``kind`` (``Q8_0``, ``Q4_0``, ``F32``); norms stay float32."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "llama")
    _write_shape(writer, config, kind)
    _write_vocabulary(writer, checkpoint)
    quantisation = GGMLQuantizationType[kind]
    for name, weights in _tensors(checkpoint, config):
        if weights.ndim == 1 or kind == "F32":
            writer.add_tensor(name, weights)
        else:
            packed = gguf.quants.quantize(weights, quantisation)
            writer.add_tensor(name, packed, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: Any, config: dict[str, Any], kind: str) -> None:
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def _write_vocabulary(writer: Any, checkpoint: Path) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([_CONTROL if i in special else _PLAIN for i in range(len(vocab))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(min(special))
    writer.add_eos_token_id(min(special))


def _tensors(checkpoint: Path, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, weights in load_file(checkpoint / "model.safetensors").items():
        weights = weights.astype(np.float32)
        name = name.removesuffix(".weight")
        if name in _NAMES:
            yield f"{_NAMES[name]}.weight", weights
            continue
        _, _, layer, part = name.split(".", 3)
        if part == "self_attn.q_proj":
            weights = _interleave(weights, config["num_attention_heads"])
        elif part == "self_attn.k_proj":
            weights = _interleave(weights, config["num_key_value_heads"])
        yield f"blk.{layer}.{_NAMES[part]}.weight", weights


def _interleave(weights: Any, num_heads: int) -> Any:
    """Rotary pairs side by side, as GGUF's Llama has them; transformers halves each head."""
    rows, columns = weights.shape
    halves = weights.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)
