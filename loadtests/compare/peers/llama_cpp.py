"""llama.cpp, through the C interface of llama-cpp-python, whose own class runs one text at a time.

The checkpoint is converted to a GGUF file.
"""

import ctypes
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from safetensors.numpy import load_file

from loadtests import LoadTestError
from loadtests.checkpoints import causal_ids, new_folder
from loadtests.compare.peers import Runner
from loadtests.compare.setup import Setup
from loadtests.compare.work import Work

_FILE = "model.gguf"
_FILE_TYPES = {"F32": 0, "Q4_0": 2, "Q8_0": 7}
_PLAIN, _CONTROL = 1, 3

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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

Tokens = Sequence[tuple[int, int, int, bool]]
"""Token id, position, sequence, and whether its logits are needed."""


def prepare(setup: Setup) -> None:
    """Converts the checkpoint to GGUF."""
    with new_folder(setup.product) as path:
        if setup.variant in _FILE_TYPES:
            write_gguf(setup.checkpoint, path / _FILE, setup.variant)
            return
        plain = path / "plain.gguf"
        write_gguf(setup.checkpoint, plain, "F32")
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{setup.variant}")
        params.nthread = setup.threads
        status = llama_cpp.llama_model_quantize(
            str(plain).encode(), str(path / _FILE).encode(), ctypes.byref(params)
        )
        if status != 0:
            raise LoadTestError(f"llama_model_quantize returned {status}")
        plain.unlink()


def open_runner(setup: Setup) -> Runner:
    """Loads the file; what is not set here keeps llama.cpp's default."""
    llama_cpp.llama_backend_init()
    path = setup.product / _FILE
    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = setup.room.batch * setup.room.context
    params.n_seq_max = setup.room.batch
    params.n_batch = setup.room.context
    params.n_threads = params.n_threads_batch = setup.threads
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise LoadTestError("llama.cpp could not create a context")
    return _Model(model, context, setup)


class _Model:
    def __init__(self, model: Any, context: Any, setup: Setup) -> None:
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        vocab = llama_cpp.llama_model_get_vocab(model)
        self._num_words = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(setup.room.context, 0, 1)
        self._rng = random.Random(setup.seed)

    def run(self, work: Work) -> float:
        llama_cpp.llama_memory_clear(self._memory, True)
        started = time.perf_counter()
        chosen = [self._read(work.length, sequence) for sequence in range(work.batch)]
        if work.kind == "prefill":
            return time.perf_counter() - started
        chosen = self._step(chosen, work.length)
        started = time.perf_counter()
        for position in range(work.length + 1, work.length + 1 + work.repeats):
            chosen = self._step(chosen, position)
        return (time.perf_counter() - started) / work.repeats

    def close(self) -> None:
        pass

    def _read(self, length: int, sequence: int) -> int:
        prompt = causal_ids(self._rng, length, self._num_words)
        last = length - 1
        self._decode([(token, i, sequence, i == last) for i, token in enumerate(prompt)])
        return int(self._logits(last).argmax())

    def _step(self, tokens: list[int], position: int) -> list[int]:
        self._decode([(token, position, i, True) for i, token in enumerate(tokens)])
        return [int(self._logits(i).argmax()) for i in range(len(tokens))]

    def _decode(self, tokens: Tokens) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise LoadTestError(f"llama_decode returned {status}")

    def _logits(self, index: int) -> NDArray[np.float32]:
        pointer = llama_cpp.llama_get_logits_ith(self._context, index)
        row = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float * self._num_words)).contents
        return np.frombuffer(row, np.float32)


def write_gguf(checkpoint: Path, path: Path, kind: str) -> None:
    """Writes a Llama checkpoint with ``Q8_0``, ``Q4_0`` or ``F32`` weights; norms stay float32."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, "llama")
    _write_shape(writer, config, kind)
    _write_vocabulary(writer, checkpoint)
    quantization = GGMLQuantizationType[kind]
    for name, weights in _tensors(checkpoint, config):
        if weights.ndim == 1 or kind == "F32":
            writer.add_tensor(name, weights)
        else:
            packed = gguf.quants.quantize(weights, quantization)
            writer.add_tensor(name, packed, raw_dtype=quantization)
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
    """Puts rotary pairs side by side as GGUF does; transformers splits each head into halves."""
    rows, columns = weights.shape
    halves = weights.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)
